"""What to do with sound of the user that comes while an answer is given: one table, the first row that fits."""

from __future__ import annotations

from array import array
from typing import Literal, TypeAlias

from msgspec import Struct

Action: TypeAlias = Literal["listen", "drop", "barge_in"]

SHORT_ACKS = frozenset({
    "yes", "yeah", "yep", "ok", "okay", "right", "sure", "continue", "go on", "mhm", "uh huh", "i see", "got it",
    "嗯", "嗯嗯", "对", "好", "好的", "是", "是的", "继续",
})  # fmt: skip
"""Words that tell the speaker to go on."""

BARGE_IN = frozenset({"barge_in", "interrupt", "cancel"})
LISTEN = frozenset({"listen", "continue", "continue_output", "ack"})
DROP = frozenset({"drop", "ignore", "silence"})
ACTIONS = BARGE_IN | LISTEN | DROP
"""What a client may ask for."""


class Overlap(Struct, frozen=True, kw_only=True):
    """A piece of sound, and what is known about it."""

    client_action: str | None = None
    force_barge_in: bool = False
    force_listen: bool = False
    is_speech: bool = True
    transcript: str | None = None
    duration_ms: float = 0.0
    overlap_speech_ms: float = 0.0
    """Speech so far during this answer, this piece included."""
    policy: str = "listen_only"
    short_ack_ms: float = 700.0
    barge_in_ms: float = 1200.0
    can_barge_in: bool = True
    is_auto_response: bool = False
    is_continuing: bool = False
    """A detector says that this utterance began before."""
    has_detector: bool = False


class Decision(Struct, frozen=True):
    """What is done, why, and whether the sound waits for the next turn."""

    action: Action
    reason: str
    keeps_audio: bool = True


def decide(overlap: Overlap) -> Decision:
    """Apply the table."""
    return _asked(overlap) or _continuous(overlap) or _commit_driven(overlap)


def _asked(overlap: Overlap) -> Decision | None:
    """What the client wants comes first."""
    action = overlap.client_action
    wants_barge_in = action in BARGE_IN or overlap.force_barge_in
    if wants_barge_in and not overlap.can_barge_in:
        return Decision("listen", "barge_in_unsupported")
    if action in BARGE_IN:
        return Decision("barge_in", "client_overlap_action")
    if action in LISTEN:
        is_kept = action == "listen" and overlap.is_speech and overlap.overlap_speech_ms > overlap.short_ack_ms
        return Decision("listen", "client_overlap_action", is_kept)
    if action in DROP:
        return Decision("drop", "client_overlap_action", keeps_audio=False)
    if overlap.force_barge_in:
        return Decision("barge_in", "client_force_barge_in")
    return None


def _continuous(overlap: Overlap) -> Decision | None:
    """Models that hear while they speak."""
    if not overlap.is_auto_response:
        return None
    is_interrupting = overlap.is_speech and overlap.policy == "barge_in_on_speech" and not overlap.is_continuing
    if is_interrupting and overlap.can_barge_in:
        return Decision("barge_in", "server_vad_speech_started" if overlap.has_detector else "barge_in_on_speech")
    return Decision("listen", "auto_response_continuous")


def _commit_driven(overlap: Overlap) -> Decision:
    """Models that hear what was committed."""
    if overlap.force_listen:
        return Decision("listen", "client_force_listen")
    if not overlap.is_speech:
        return Decision("drop", "silence_or_noise", keeps_audio=False)
    if overlap.transcript is not None and is_short_ack(overlap.transcript):
        return Decision("listen", "short_ack_transcript", keeps_audio=False)
    if overlap.policy == "listen_only":
        return Decision("listen", "policy_listen_only")
    if overlap.policy == "barge_in_on_speech":
        return _interrupting(overlap)
    if max(overlap.duration_ms, overlap.overlap_speech_ms) <= overlap.short_ack_ms:
        return Decision("listen", "short_ack")
    if overlap.overlap_speech_ms >= overlap.barge_in_ms and overlap.can_barge_in:
        return Decision("barge_in", "long_overlap_speech")
    return Decision("listen", "accumulating_overlap_speech")


def _interrupting(overlap: Overlap) -> Decision:
    if not overlap.can_barge_in:
        return Decision("listen", "barge_in_unsupported")
    if overlap.is_continuing:
        return Decision("listen", "server_vad_utterance_active")
    return Decision("barge_in", "server_vad_speech_started" if overlap.has_detector else "policy_barge_in_on_speech")


def is_short_ack(transcript: str) -> bool:
    """Whether words only tell the speaker to go on."""
    return transcript.strip().strip(".,!?。，！？").lower() in SHORT_ACKS


MAX_MEASURED = 16_000
"""Samples of one piece whose loudness is looked at, evenly over it: a whole second, or some of more."""


def rms(audio: bytes) -> float:
    """Return the root mean square of s16 samples, of full scale 1."""
    samples = array("h", audio[: len(audio) // 2 * 2])
    samples = samples[:: 1 + len(samples) // MAX_MEASURED]
    if not samples:
        return 0.0
    return (sum(sample * sample for sample in samples) / len(samples)) ** 0.5 / 32768
