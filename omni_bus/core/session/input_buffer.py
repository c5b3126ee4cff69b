"""Sound of the user that no item has yet."""

from __future__ import annotations

RATE_HZ = 16_000
"""Sound inside a session: one channel of signed 16-bit samples at this rate, what recognisers and detectors take."""

BYTES_PER_MS = 32


class InputBuffer:
    """The end of all sound that was ever appended; positions are milliseconds from the beginning of the session."""

    def __init__(self) -> None:
        self._audio = bytearray()
        self._num_before = 0
        """Bytes that were appended and are not here any more."""

    def __len__(self) -> int:
        return len(self._audio)

    @property
    def start_ms(self) -> int:
        """Where the buffer begins."""
        return self._num_before // BYTES_PER_MS

    @property
    def end_ms(self) -> int:
        """How much sound was ever appended."""
        return (self._num_before + len(self._audio)) // BYTES_PER_MS

    def append(self, audio: bytes) -> None:
        """Take whole samples."""
        self._audio += audio

    def look(self, start_ms: int, end_ms: int) -> bytes:
        """Return a stretch, as far as it is here."""
        return bytes(self._audio[self._index(start_ms) : self._index(end_ms)])

    def take(self, start_ms: int, end_ms: int) -> bytes:
        """Return a stretch, as far as it is here, and forget it with all before it."""
        audio = self.look(start_ms, end_ms)
        self._forget(self._index(end_ms))
        return audio

    def take_all(self) -> bytes:
        """Return everything and forget it."""
        audio = bytes(self._audio)
        self._forget(len(audio))
        return audio

    def keep_last(self, num_ms: int) -> None:
        """Forget what is older."""
        self._forget(max(0, len(self._audio) - num_ms * BYTES_PER_MS))

    def _index(self, position_ms: int) -> int:
        return min(max(0, position_ms * BYTES_PER_MS - self._num_before), len(self._audio))

    def _forget(self, num_bytes: int) -> None:
        del self._audio[:num_bytes]
        self._num_before += num_bytes
