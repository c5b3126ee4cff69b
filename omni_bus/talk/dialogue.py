"""A conversation as its client follows it: OpenAI's GA events in, what to show and to send out. No socket, no clock."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.client.playback import PlaybackClock

PATIENCE_S = 20.0
"""What was spoken and is not answered for so long won't be: no speech was in it, or none that could be written down."""

HEARD = "conversation.item.input_audio_transcription"
SAID = "response.output_audio_transcript"
SOUND = "response.output_audio.delta"

TRANSCRIPTION: dict[str, Any] = {
    "type": "session.update",
    "event_id": "talk_transcription",
    # OpenAI's servers want a name of theirs; ours write down with what they have.
    "session": {"type": "realtime", "audio": {"input": {"transcription": {"model": "whisper-1"}}}},
}
"""Asks for what the user says as text; a server that can't tell refuses this and no more."""

PARTS = {
    "detected": "end of turn",
    "generation": "transcription",
    "first_text": "first word",
    "first_audio": "first sound",
}
"""Steps of an answer in the server's words and in ours."""


class Turn(msgspec.Struct):
    """One turn of the user and its answer; moments are seconds since the first piece of sound was sent."""

    speech_at: float
    stopped_at: float | None = None
    """When it was told that the user had stopped."""
    first_sound_at: float | None = None
    """When the first sound of the answer came."""
    played_at: float | None = None
    played_until: float = 0.0
    heard: str = ""
    timings: dict[str, float] = {}
    """As the server counted them: ms from the end of speech."""

    @property
    def speech_end_at(self) -> float | None:
        """When the user stopped, as far as it is known."""
        return None if self.stopped_at is None else self.stopped_at - self.timings.get("detected", 0) / 1000


class Dialogue:
    """Follows events, plays answers, and knows when a turn was answered and heard.

    Args:
        playback: gets the sound.
        show: prints text, without a line's end of its own.
        warn: prints what went wrong in a conversation that goes on.
    """

    def __init__(self, playback: PlaybackClock, show: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._playback = playback
        self._show = show
        self._warn = warn
        self._line = ""
        """What the open line of the screen belongs to."""
        self._active: dict[str, Turn | None] = {}
        """Answers that are being given, and to what."""
        self._name = ""
        self._is_speaking = False
        self._is_awaiting = False
        self._awaiting_since = 0.0
        self.is_ready = False
        """The session is as we want it."""
        self.turns: list[Turn] = []
        self.problems: list[str] = []

    # --- what the user does -----------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Expect an answer to a file that is spoken from now on."""
        self._name, self._is_awaiting, self._awaiting_since = name, True, float("inf")

    def end(self, at: float) -> None:
        """Take note that it was spoken."""
        self._awaiting_since = at

    def on_played(self, since: float, until: float) -> None:
        """Take note that an answer is being heard."""
        if self.turns:
            turn = self.turns[-1]
            turn.played_at = since if turn.played_at is None else turn.played_at
            turn.played_until = until

    def is_settled(self, at: float) -> bool:
        """Whether nobody speaks and no answer is awaited any more."""
        if self._is_speaking or self._active or not self._playback.is_empty:
            return False
        if self._is_awaiting and at - self._awaiting_since >= PATIENCE_S:
            self._is_awaiting = False
            self._problem({"message": f"no answer came to {self._name} within {PATIENCE_S:g} s"})
        return not self._is_awaiting

    # --- what the server says ---------------------------------------------------------------------------------

    def on_event(self, event: dict[str, Any], at: float) -> list[dict[str, Any]]:
        """Take an event; return those that answer it."""
        kind: str = event["type"]
        match kind:
            case "session.updated":
                self.is_ready = True
            case "error" if event["error"].get("event_id") == TRANSCRIPTION["event_id"]:
                pass
            case "error":
                self._problem(event["error"])
            case "input_audio_buffer.speech_started":
                return self._on_speech(event["audio_start_ms"] / 1000)
            case "input_audio_buffer.speech_stopped":
                self._is_speaking, self._is_awaiting, self._awaiting_since = False, True, at
                if self.turns:
                    self.turns[-1].stopped_at = at
            case "response.created":
                self._active[event["response"]["id"]] = self.turns[-1] if self.turns else None
                self._is_awaiting = False
            case "response.done":
                self._on_done(event["response"])
            case _ if kind == SOUND:
                self._on_sound(event, at)
            case _ if kind.startswith((HEARD, SAID)):
                self._on_words(kind, event)
            case _:
                pass
        return []

    def _on_speech(self, at: float) -> list[dict[str, Any]]:
        self._is_speaking = True
        self.turns.append(Turn(at))
        cut = self._playback.cut()
        if cut is None:
            return []
        item, played_ms = cut
        self._print("", f"(interrupted: {played_ms / 1000:.2f} s of the answer were heard)")
        told = {"item_id": item, "content_index": 0, "audio_end_ms": played_ms}
        return [{"type": "conversation.item.truncate", **told}]

    def _on_sound(self, event: dict[str, Any], at: float) -> None:
        turn = self._active.get(event["response_id"])
        if turn is not None and turn.first_sound_at is None:
            turn.first_sound_at = at
        self._playback.put(event["item_id"], base64.b64decode(event["delta"]))

    def _on_done(self, response: dict[str, Any]) -> None:
        turn = self._active.pop(response["id"], None)
        self._end_line()
        details = response.get("status_details") or {}
        if response["status"] == "failed":
            self._problem(details.get("error") or {})
        if turn is not None:
            turn.timings = response.get("timings") or {}

    def _on_words(self, kind: str, event: dict[str, Any]) -> None:
        who, what = ("heard", kind[len(HEARD) :]) if kind.startswith(HEARD) else ("said", kind[len(SAID) :])
        line = f"{who}:{event['item_id']}"
        match what:
            case ".delta":
                self._print(line, event["delta"])
            case ".completed" | ".done":
                if self._line != line:
                    self._print(line, event["transcript"])
                self._end_line()
                if who == "heard" and self.turns:
                    self.turns[-1].heard = event["transcript"].strip()
            case ".failed":
                self._problem(event["error"])
            case _:
                pass

    # --- the screen -------------------------------------------------------------------------------------------

    def _print(self, line: str, text: str) -> None:
        """Print more of a line, which is named ``heard:ID`` or ``said:ID``; without a name, a whole one."""
        if line and line == self._line:
            self._show(text)
            return
        self._end_line()
        who = line.partition(":")[0]
        self._show(f"{who}: {text.lstrip()}" if who else text)
        self._line = line
        if not line:
            self._show("\n")

    def _end_line(self) -> None:
        if self._line:
            self._show("\n")
        self._line = ""

    def _problem(self, error: dict[str, Any]) -> None:
        words = str(error.get("message") or error.get("code") or "the server gave no reason")
        self.problems.append(words)
        if self.is_ready:
            self._end_line()
            self._warn(words)


def spans(turn: Turn) -> list[tuple[float | None, float | None]]:
    """Return from when to when each of `PARTS` took, in ms from the end of speech."""
    moments = [0.0, *(turn.timings.get(name) for name in PARTS)]
    return list(pairwise(moments))


def rows_of(turns: list[Turn]) -> list[list[str]]:
    """Return the latency of each answered turn and its parts, in ms, as rows of a table.

    The turn, until its end was detected, the recogniser, until the first word, until the first sound, all of it as the
    server counts it, and as it was here; what the server does not tell is a dash.
    """
    rows: list[list[str]] = []
    for number, turn in enumerate(turns, 1):
        if turn.first_sound_at is None or turn.speech_end_at is None:
            continue
        parts = [until - since if since is not None and until is not None else None for since, until in spans(turn)]
        total = turn.timings.get("first_audio")
        values = [*parts, total, (turn.first_sound_at - turn.speech_end_at) * 1000]
        rows.append([str(number), *("–" if value is None else f"{value:.0f}" for value in values)])
    return rows
