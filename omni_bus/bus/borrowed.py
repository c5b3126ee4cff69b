"""The receiver's side of shared memory: views of what others lent, and giving it back when nobody looks any more."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from omni_bus.bus.segment import ForeignSegment

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.ids import Peer, Sender
    from omni_bus.wire.codec import Reference
    from omni_bus.wire.frames import Release

MAX_GENERATIONS = 1000
"""Named in one `Release`: 9 KB at most."""

_arrays: dict[int, type[ctypes.Array[ctypes.c_ubyte]]] = {}
"""Array types by length's bits: making one takes 20 us, and there are only so many."""


class Lender(Protocol):
    """Memory of another actor that views lie in."""

    owner: Peer
    is_owner_live: bool

    def release(self, generations: tuple[int, ...]) -> Release:
        """Return the frame that gives these back."""
        ...


class BorrowedStatistics(NamedTuple):
    """Segments mapped, references viewed now; since the start: viewed, and given back."""

    segments: int
    views: int
    borrowed: int
    released: int


class _Lease:
    """Sits on the exporter of one view; when that goes, the slot can be given back. In whatever thread that happens."""

    __slots__ = ("_generation", "_return", "_segment")

    def __init__(
        self, segment: ForeignSegment, generation: int, give_back: Callable[[ForeignSegment, int], None]
    ) -> None:
        self._segment = segment
        self._generation = generation
        self._return = give_back

    def __del__(self) -> None:
        self._return(self._segment, self._generation)


class Borrowed:
    """What this actor views of others' arenas.

    A segment is mapped at the first reference to it and unmapped when its owner is forgotten and the last view is gone;
    views stay valid when the owner dies. Views may be dropped in any thread; the owner hears of it in the loop's next
    turn, of all that were dropped meanwhile in one frame.

    Args:
        send: sends a frame to the owner.

    Raises:
        RuntimeError: no running loop.
    """

    def __init__(self, send: Callable[[Peer, Release], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._send = send
        self._segments: dict[tuple[Sender, int, int], ForeignSegment] = {}
        self._returned: deque[tuple[Lender, int]] = deque()
        self._is_flush_due = False
        self._is_closed = False
        self._num_borrowed = 0
        self._num_returned = 0

    def open(self, sender: Sender, pid: int, fd: int) -> ForeignSegment:
        """Map a sender's segment, or return it as it is mapped.

        Raises:
            ValueError: it is not there, or not the sender's.
        """
        key = (sender, pid, fd)
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = ForeignSegment(sender, pid, fd)
        return segment

    def view(self, sender: Sender, reference: Reference) -> memoryview:
        """Return a read-only view of what a sender lent; it is the lease.

        Raises:
            ValueError: the reference means nothing.
        """
        segment = self._segments.get((sender, reference.pid, reference.fd))
        if segment is None:
            segment = self.open(sender, reference.pid, reference.fd)
        address = segment.address_of(reference)
        length = reference.length
        bits = (length - 1).bit_length()
        kind = _arrays.get(bits)
        if kind is None:
            kind = _arrays[bits] = ctypes.c_ubyte * (1 << bits)
        # The array is what all views of it keep alive, and through its attribute the lease and the mapping.
        array = kind.from_address(address)
        array.lease = _Lease(segment, reference.generation, self.give_back)  # type: ignore[attr-defined]
        self._num_borrowed += 1
        return memoryview(array).cast("B")[:length].toreadonly()

    def forget(self, sender: Sender) -> None:
        """Let go of a sender that is gone: it needs nothing back. Views of its memory stay valid."""
        for key in [key for key in self._segments if key[0] == sender]:
            self._segments.pop(key).is_owner_live = False

    def statistics(self) -> BorrowedStatistics:
        """Return what is mapped and viewed now, and the counts since the start."""
        return BorrowedStatistics(
            len(self._segments), self._num_borrowed - self._num_returned, self._num_borrowed, self._num_returned
        )

    def close(self) -> None:
        """Give nothing back any more; owners hear of this actor's end by other ways."""
        self._is_closed = True
        self._segments.clear()
        self._returned.clear()

    def give_back(self, segment: Lender, generation: int) -> None:
        """Tell the owner in the loop's next turn that a view is gone. From any thread."""
        if self._is_closed:
            return
        self._returned.append((segment, generation))
        if self._is_flush_due:
            return  # it takes what was appended before it cleared the mark
        self._is_flush_due = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._flush)
        else:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._is_closed:
            return
        by_segment: dict[int, tuple[Lender, list[int]]] = {}
        while self._returned:
            segment, generation = self._returned.popleft()
            self._num_returned += 1
            by_segment.setdefault(id(segment), (segment, []))[1].append(generation)
        for segment, generations in by_segment.values():
            if segment.is_owner_live:
                for i in range(0, len(generations), MAX_GENERATIONS):
                    self._send(segment.owner, segment.release(tuple(generations[i : i + MAX_GENERATIONS])))
