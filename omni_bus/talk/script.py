"""What is spoken when it comes from files: one after the other, each once the answer to the one before was heard."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from omni_bus.talk.piece import PIECE_BYTES, SILENCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_bus.talk.dialogue import Dialogue

PAUSE_S = 0.5
"""Between the end of an answer and the next word of the user."""


class Line(NamedTuple):
    """One file."""

    name: str
    sound: bytes
    """As in `playback`."""


class Script:
    """The lines in pieces of 20 ms, with silence around them: a microphone never stops either.

    Args:
        lines: in their order, none of them empty.
        dialogue: tells when an answer was heard, and is told what is spoken.
    """

    def __init__(self, lines: Iterable[Line], dialogue: Dialogue) -> None:
        self._lines = deque(lines)
        self._dialogue = dialogue
        self._rest = memoryview(b"")
        self._settled_at: float | None = None

    def piece(self, at: float) -> bytes | None:
        """Return what is spoken in the 20 ms from `at`, in seconds; None once all was spoken and answered."""
        if not self._rest:
            if not self._dialogue.is_settled(at):
                self._settled_at = None
                return SILENCE
            if not self._lines:
                return None
            if self._settled_at is None:
                self._settled_at = at
            if at - self._settled_at < PAUSE_S:
                return SILENCE
            name, sound = self._lines.popleft()
            self._rest = memoryview(sound)
            self._settled_at = None
            self._dialogue.begin(name)
        piece, self._rest = bytes(self._rest[:PIECE_BYTES]), self._rest[PIECE_BYTES:]
        if not self._rest:
            self._dialogue.end(at)
        return piece.ljust(PIECE_BYTES, b"\0")
