"""Flow control of one edge of one request: how much its sender may have under way.

The receiver grants a window of chunks and bytes from the beginning and moves it on as it consumes. Grants are totals
since the beginning, so a repeated one is harmless. A chunk is charged at most half the window, so that one larger than
the window can pass; the receiver keeps back less than half of the window, so a sender with nothing under way can always
send. Under way are at most `window_bytes` of charge, that is never more than two oversized chunks.

Both ends run for every chunk, so they count in plain integers and build a `Grant` only where one is sent or asked for.
"""

from __future__ import annotations

from typing import NamedTuple

from omni_bus.errors import BadFrame


class Grant(NamedTuple):
    """Totals that the sender may reach."""

    chunks: int
    bytes: int


class Window:
    """What both ends know of an edge's window."""

    __slots__ = ("bytes", "chunks", "max_charge")

    def __init__(self, chunks: int, num_bytes: int) -> None:
        self.chunks = chunks
        self.bytes = num_bytes
        self.max_charge = max(1, num_bytes // 2)

    def charge(self, size: int) -> int:
        """Return what a chunk of `size` bytes costs."""
        return min(size, self.max_charge)


class SendCredit:
    """The sender's end: spends what was granted."""

    __slots__ = ("_left_bytes", "_left_chunks", "_max_charge", "_spent_bytes", "_spent_chunks", "_window")

    def __init__(self, window: Window) -> None:
        self._window = window
        self._max_charge = window.max_charge
        self._left_chunks = window.chunks
        self._left_bytes = window.bytes
        self._spent_chunks = 0
        self._spent_bytes = 0

    @property
    def left(self) -> Grant:
        """Chunks and bytes that may still be sent; never negative."""
        return Grant(self._left_chunks, self._left_bytes)

    def can_spend(self, size: int) -> bool:
        """Whether a chunk of `size` bytes may go now."""
        return self._left_chunks >= 1 and self._left_bytes >= min(size, self._max_charge)

    def spend(self, size: int) -> bool:
        """Account for a chunk of `size` bytes that is sent; False, and nothing, if it may not go now."""
        charge = min(size, self._max_charge)
        if not self._left_chunks or self._left_bytes < charge:
            return False
        self._left_chunks -= 1
        self._left_bytes -= charge
        self._spent_chunks += 1
        self._spent_bytes += charge
        return True

    def grant(self, grant: Grant) -> None:
        """Take a grant from the receiver; an old one changes nothing.

        Raises:
            BadFrame: it grants more than the window beyond what was sent.
        """
        left_chunks, left_bytes = grant.chunks - self._spent_chunks, grant.bytes - self._spent_bytes
        if left_chunks > self._window.chunks or left_bytes > self._window.bytes:
            raise BadFrame(f"credit up to {grant} is beyond the window after {self._spent_chunks} chunks")
        self._left_chunks = max(self._left_chunks, left_chunks)
        self._left_bytes = max(self._left_bytes, left_bytes)


class ReceiveCredit:
    """The receiver's end: checks what arrives, and grants again what was consumed, in batches of half a window."""

    __slots__ = (
        "_batch_bytes",
        "_batch_chunks",
        "_buffered_bytes",
        "_buffered_chunks",
        "_kept_bytes",
        "_kept_chunks",
        "_max_charge",
        "_received_bytes",
        "_received_chunks",
        "_window",
    )

    def __init__(self, window: Window) -> None:
        self._window = window
        self._max_charge = window.max_charge
        self._batch_chunks = max(1, window.chunks // 2)
        self._batch_bytes = max(1, window.bytes // 2)
        self._received_chunks = self._received_bytes = 0
        # Came and was not consumed; and was consumed and not granted again. Both are out of the sender's reach.
        self._buffered_chunks = self._buffered_bytes = 0
        self._kept_chunks = self._kept_bytes = 0

    @property
    def buffered(self) -> Grant:
        """Chunks and charged bytes that came and were not consumed."""
        return Grant(self._buffered_chunks, self._buffered_bytes)

    @property
    def num_buffered(self) -> int:
        """Chunks that came and were not consumed."""
        return self._buffered_chunks

    def receive(self, size: int) -> None:
        """Account for a chunk that arrived.

        Raises:
            BadFrame: the sender had no credit for it.
        """
        charge = min(size, self._max_charge)
        held_chunks = self._buffered_chunks + self._kept_chunks + 1
        held_bytes = self._buffered_bytes + self._kept_bytes + charge
        if held_chunks > self._window.chunks or held_bytes > self._window.bytes:
            received = Grant(self._received_chunks + 1, self._received_bytes + charge)
            raise BadFrame(f"{received} came where {self._granted()} was granted")
        self._received_chunks += 1
        self._received_bytes += charge
        self._buffered_chunks += 1
        self._buffered_bytes += charge

    def consume(self, size: int) -> Grant | None:
        """Account for a received chunk that was used; return a grant when it is time to send one."""
        charge = min(size, self._max_charge)
        self._buffered_chunks -= 1
        self._buffered_bytes -= charge
        self._kept_chunks += 1
        self._kept_bytes += charge
        if self._kept_chunks < self._batch_chunks and self._kept_bytes < self._batch_bytes:
            return None
        self._kept_chunks = self._kept_bytes = 0
        return self._granted()

    def consume_all(self) -> Grant | None:
        """Account for every received chunk; return a grant if that moves the window."""
        if not (self._buffered_chunks or self._buffered_bytes or self._kept_chunks or self._kept_bytes):
            return None
        self._buffered_chunks = self._buffered_bytes = 0
        self._kept_chunks = self._kept_bytes = 0
        return self._granted()

    def _granted(self) -> Grant:
        """What the sender may reach: the window beyond what is out of its reach."""
        return Grant(
            self._received_chunks - self._buffered_chunks - self._kept_chunks + self._window.chunks,
            self._received_bytes - self._buffered_bytes - self._kept_bytes + self._window.bytes,
        )
