"""Flow control of one edge of one request: how much its sender may have under way.

The receiver grants a window of chunks and bytes from the beginning and moves it on as it consumes. Grants are totals
since the beginning, so a repeated one is harmless. A chunk is charged at most half the window, so that one larger than
the window can pass; the receiver keeps back less than half of the window, so a sender with nothing under way can always
send. Under way are at most `window_bytes` of charge, that is never more than two oversized chunks.
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

    __slots__ = ("bytes", "chunks")

    def __init__(self, chunks: int, num_bytes: int) -> None:
        self.chunks = chunks
        self.bytes = num_bytes

    def charge(self, size: int) -> int:
        """Return what a chunk of `size` bytes costs."""
        return min(size, max(1, self.bytes // 2))


class SendCredit:
    """The sender's end: spends what was granted."""

    __slots__ = ("_granted", "_spent_bytes", "_spent_chunks", "_window")

    def __init__(self, window: Window) -> None:
        self._window = window
        self._granted = Grant(window.chunks, window.bytes)
        self._spent_chunks = 0
        self._spent_bytes = 0

    @property
    def left(self) -> Grant:
        """Chunks and bytes that may still be sent; never negative."""
        return Grant(self._granted.chunks - self._spent_chunks, self._granted.bytes - self._spent_bytes)

    def can_spend(self, size: int) -> bool:
        """Whether a chunk of `size` bytes may go now."""
        left = self.left
        return left.chunks >= 1 and left.bytes >= self._window.charge(size)

    def spend(self, size: int) -> None:
        """Account for a chunk that is sent; only after `can_spend`."""
        self._spent_chunks += 1
        self._spent_bytes += self._window.charge(size)

    def grant(self, grant: Grant) -> None:
        """Take a grant from the receiver; an old one changes nothing.

        Raises:
            BadFrame: it grants more than the window beyond what was sent.
        """
        if (
            grant.chunks > self._spent_chunks + self._window.chunks
            or grant.bytes > self._spent_bytes + self._window.bytes
        ):
            raise BadFrame(f"credit up to {grant} is beyond the window after {self._spent_chunks} chunks")
        self._granted = Grant(max(self._granted.chunks, grant.chunks), max(self._granted.bytes, grant.bytes))


class ReceiveCredit:
    """The receiver's end: checks what arrives, and grants again what was consumed, in batches of half a window."""

    __slots__ = ("_consumed", "_granted", "_received", "_window")

    def __init__(self, window: Window) -> None:
        self._window = window
        self._granted = Grant(window.chunks, window.bytes)
        self._received = Grant(0, 0)
        self._consumed = Grant(0, 0)

    @property
    def buffered(self) -> Grant:
        """Chunks and charged bytes that came and were not consumed."""
        return Grant(self._received.chunks - self._consumed.chunks, self._received.bytes - self._consumed.bytes)

    def receive(self, size: int) -> None:
        """Account for a chunk that arrived.

        Raises:
            BadFrame: the sender had no credit for it.
        """
        received = Grant(self._received.chunks + 1, self._received.bytes + self._window.charge(size))
        if received.chunks > self._granted.chunks or received.bytes > self._granted.bytes:
            raise BadFrame(f"{received} came where {self._granted} was granted")
        self._received = received

    def consume(self, size: int) -> Grant | None:
        """Account for a received chunk that was used; return a grant when it is time to send one."""
        self._consumed = Grant(self._consumed.chunks + 1, self._consumed.bytes + self._window.charge(size))
        due = Grant(self._consumed.chunks + self._window.chunks, self._consumed.bytes + self._window.bytes)
        is_due = (
            due.chunks - self._granted.chunks >= max(1, self._window.chunks // 2)
            or due.bytes - self._granted.bytes >= max(1, self._window.bytes // 2)
        )  # fmt: skip
        if not is_due:
            return None
        self._granted = due
        return due

    def consume_all(self) -> Grant | None:
        """Account for every received chunk; return a grant if that moves the window."""
        self._consumed = self._received
        due = Grant(self._consumed.chunks + self._window.chunks, self._consumed.bytes + self._window.bytes)
        if due == self._granted:
            return None
        self._granted = due
        return due
