"""What the listener hears: sound of answers from its arrival to the ear, silence where there is none."""

from __future__ import annotations

from collections import deque

RATE_HZ = 24_000
"""Both ways; s16 little-endian, one channel: the default of OpenAI's events."""
PIECE_S = 0.02
PIECE_BYTES = int(RATE_HZ * PIECE_S) * 2
SILENCE = bytes(PIECE_BYTES)


def seconds_of(num_bytes: int) -> float:
    """Return how long so much sound is."""
    return num_bytes / (2 * RATE_HZ)


class Playback:
    """Sound that waits for the listener; its clock is what was taken, so gaps stay as they were heard."""

    def __init__(self) -> None:
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

    def put(self, item: str, sound: bytes) -> None:
        """Let sound of an item be heard after what came before it."""
        if sound and item != self._cut:
            self._waiting.append((item, memoryview(sound)))

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

    def cut(self) -> tuple[str, int] | None:
        """Stop what is being heard.

        Returns:
            The item and how much of it was heard, in ms; None if nothing waited.
        """
        if not self._waiting:
            return None
        self._cut = self._waiting[0][0]
        self._waiting.clear()
        heard_bytes = self._played_bytes if self._playing == self._cut else 0
        return self._cut, int(seconds_of(heard_bytes) * 1000)
