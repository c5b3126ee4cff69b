"""What the listener hears of answers: sound from its arrival to the ear, silence where there is none."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Heard(NamedTuple):
    """How much of an answer was heard."""

    item_id: str
    played_ms: int


class PlaybackClock:
    """Sound that waits for the listener; its clock is what was taken, so gaps stay as they were heard.

    What waits is what the server sent ahead: our sessions keep that lead short, others send a whole answer at once.

    Args:
        rate_hz: samples a second: s16, one channel.
    """

    def __init__(self, rate_hz: int = 24_000) -> None:
        self.rate_hz = rate_hz
        self._waiting: deque[tuple[str, memoryview]] = deque()
        self._playing = ""
        self._played_bytes = 0
        """Of the item that is being played."""
        self._cut = ""
        """The item that was interrupted: what still comes of it is not heard."""

    @property
    def is_empty(self) -> bool:
        """Whether all that came was heard or cut off."""
        return not self._waiting

    @property
    def heard(self) -> Heard | None:
        """The answer that is, or was last, being heard, and how much of it; None before the first."""
        return Heard(self._playing, self._ms(self._played_bytes)) if self._playing else None

    def put(self, item_id: str, sound: bytes) -> None:
        """Let sound of an item be heard after what came before it."""
        if sound and item_id != self._cut:
            self._waiting.append((item_id, memoryview(sound)))

    def take(self, num_bytes: int) -> bytes:
        """Return the next sound, filled up with silence."""
        taken: list[memoryview] = []
        missing = num_bytes
        while missing and self._waiting:
            item, sound = self._waiting.popleft()
            piece, rest = sound[:missing], sound[missing:]
            if rest:
                self._waiting.appendleft((item, rest))
            if item != self._playing:
                self._playing, self._played_bytes = item, 0
            self._played_bytes += len(piece)
            missing -= len(piece)
            taken.append(piece)
        return b"".join(taken) + bytes(missing)

    def cut(self) -> Heard | None:
        """Stop what is being heard.

        Returns:
            The item and how much of it was heard; None if nothing waited.
        """
        if not self._waiting:
            return None
        self._cut = self._waiting[0][0]
        self._waiting.clear()
        heard_bytes = self._played_bytes if self._playing == self._cut else 0
        return Heard(self._cut, self._ms(heard_bytes))

    def _ms(self, num_bytes: int) -> int:
        return int(num_bytes / (2 * self.rate_hz) * 1000)
