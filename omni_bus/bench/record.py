"""What one request saw, as it happened: moments and amounts, no conclusions."""

from __future__ import annotations

import msgspec

EMPTY = "empty answer"
"""The failure of an answer in which nothing came."""

MAX_MESSAGE = 300
"""Characters that are kept of what a server said; some answer with a page."""


class StageTiming(msgspec.Struct, frozen=True):
    """What a server said about the token times of one stage, when asked with ``return_stage_metrics``."""

    num_tokens: int
    itls_s: tuple[float, ...] = ()
    """Gaps between tokens."""
    tpot_s: float | None = None


class Record(msgspec.Struct, kw_only=True):
    """One request; moments are seconds on one clock that begins with the run's phase."""

    index: int
    intended_at: float
    """When it was meant to be sent."""
    sent_at: float = 0.0
    ended_at: float = 0.0
    """When the last byte came, or it failed, or its client left."""
    texts: list[tuple[float, int]] = []
    """Each piece of text: when it came, and its characters."""
    sounds: list[tuple[float, float]] = []
    """Each piece of sound: when it came, and how many seconds of it."""
    answer: list[str] = []
    """The text, kept only where nothing else counts its tokens, or its words are compared."""
    pcm: list[bytes] = []
    """The sound as raw s16 samples, kept only where it is to be recognised."""
    rate_hz: int = 0
    """Of the raw samples."""
    channels: int = 1
    """Of the raw samples, interleaved."""
    heard_s: float | None = None
    """How many seconds of sound were sent, where that is known."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens_from: str = ""
    """What counted the output's tokens: ``usage``, ``tokenize`` or ``chunks``."""
    timing: StageTiming | None = None
    failure: str = ""
    """The failure's name; empty if there was none."""
    message: str = ""
    has_left: bool = False
    """Its client left before the end, as it was told to."""

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer came."""
        return not self.failure and not self.has_left

    def fail(self, name: str, message: str) -> None:
        """It ended badly; the first failure counts.

        Both come from a stranger and go to a terminal: see `one_line`.
        """
        if not self.failure:
            self.failure, self.message = one_line(name), one_line(message)


def one_line(text: str) -> str:
    """Return a stranger's text as one line of at most `MAX_MESSAGE` characters that can be printed."""
    found = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
    return found if len(found) <= MAX_MESSAGE else f"{found[:MAX_MESSAGE]}…"
