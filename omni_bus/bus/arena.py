"""The sender's side of shared memory: payloads written once, lent to readers, counted until all gave them back.

What a reader views may outlive the chunk that brought it (an engine keeps an array), so slots are given back by
`Release` frames when the last view is gone, not by `Credit`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from omni_bus.bus.buddy import Buddy
from omni_bus.bus.segment import BLOCK_BYTES, OwnSegment, address_of
from omni_bus.wire.codec import Reference
from omni_bus.wire.payloads import Blob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_bus.ids import Peer, Sender

_log = logging.getLogger(__name__)

MIN_ARENA_BYTES = 1 << 20


class ArenaLimits(NamedTuple):
    """Bytes that one actor may lend at a time (0: no shared memory), and the length from which blobs are lent.

    `max_bytes` is address space; pages count as memory once they are written, lowest addresses first, and stay until
    the actor ends.

    `threshold_bytes` by measurement (two processes, one way, medians of 7 alternated rounds of 400; time and both
    processes' processor time per tensor, arena / message): 16 KiB 1.02 and 1.20, 32 KiB 0.96 and 1.12, 64 KiB 0.81 and
    0.97, 128 KiB 0.76 and 0.94, 8 MiB 0.2. Below 64 KiB the `Release` frames cost more than the copies that they save.
    """

    max_bytes: int = 256 << 20
    threshold_bytes: int = 64 << 10


DEFAULT_ARENA_LIMITS = ArenaLimits()


class ArenaStatistics(NamedTuple):
    """What is lent now and what happened since the start.

    Now: bytes and slots. Since the start: slots written, references lent, blobs that found no room; references given
    back, taken back from readers that are gone, and given back that were not lent (stale).
    """

    used_bytes: int
    slots: int
    written: int
    lent: int
    full: int
    released: int
    taken_back: int
    stale: int


class _Slot:
    __slots__ = ("capacity_bytes", "num_readers", "offset", "reference")

    def __init__(self, offset: int, capacity_bytes: int, reference: Reference) -> None:
        self.offset = offset
        self.capacity_bytes = capacity_bytes
        self.reference = reference
        self.num_readers = 0


class _Pin:
    """Sits on the exporter of memory that a producer writes; its end, in whatever thread, lets the slot go."""

    __slots__ = ("_generation", "_unpinned")

    def __init__(self, generation: int, unpinned: deque[int]) -> None:
        self._generation = generation
        self._unpinned = unpinned

    def __del__(self) -> None:
        self._unpinned.append(self._generation)


class _Reader:
    """What one reader holds: how often each generation, and the bytes of their slots."""

    __slots__ = ("held", "held_bytes", "is_full")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.held_bytes = 0
        self.is_full = False


class Arena:
    """Lends copies of blobs to readers on this host.

    No reader may hold more than half of it, so one that never lets go costs the others nothing; it gets its blobs
    as message parts until it gives something back. Generations count up and are never used twice.

    Not for use from several threads.

    Args:
        owner: the actor, as readers reach it.
        limits: `max_bytes` is rounded down to whole blocks.
    """

    def __init__(self, owner: Peer, limits: ArenaLimits) -> None:
        self.owner = owner
        self._max_bytes = max(limits.max_bytes // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
        self._buddy = Buddy(self._max_bytes, BLOCK_BYTES)
        self._pid = os.getpid()
        self._segment: OwnSegment | None = None
        self._slots: dict[int, _Slot] = {}
        self._readers: dict[Sender, _Reader] = {}
        self._last: tuple[weakref.ref[Blob], _Slot] | None = None
        self._made: dict[int, _Slot] = {}
        self._unpinned: deque[int] = deque()
        self._generation = 0
        self._num_lent = self._num_full = self._num_released = self._num_taken_back = self._num_stale = 0

    @property
    def address(self) -> tuple[int, int]:
        """Process and descriptor under which readers find it; made now if it was not yet.

        Raises:
            OSError: the system gives no such memory.
        """
        if self._segment is None:
            self._segment = OwnSegment(self.owner, self._max_bytes)
        return self._pid, self._segment.fd

    def allocate(self, num_bytes: int) -> Blob | None:
        """Return a blob of writable memory in the arena, which `lend` need not copy; None if there is no room.

        Write it, make the payload of it or of an array over all of it, send that, and write no more. The memory is
        used again when no view of it is left here and all readers gave it back.

        Raises:
            OSError: the system gives no such memory.
        """
        self._reclaim()
        offset = self._buddy.allocate(num_bytes) if num_bytes > 0 else None
        if offset is None:
            return None
        pid, fd = self.address
        assert self._segment is not None
        self._generation += 1
        address = self._segment.enter(offset, num_bytes, self._generation)
        reference = Reference(pid, fd, offset, num_bytes, self._generation)
        slot = _Slot(offset, self._buddy.capacity_for(num_bytes), reference)
        slot.num_readers = 1  # the producer itself
        self._slots[self._generation] = self._made[offset] = slot
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        memory.pin = _Pin(self._generation, self._unpinned)  # type: ignore[attr-defined]
        memory.segment = self._segment  # type: ignore[attr-defined] (which unmaps itself when nobody needs it)
        return Blob(memoryview(memory).cast("B"))

    def lend(self, blob: Blob, reader: Sender) -> Reference | None:
        """Copy a blob to where `reader` can view it; None if there is no room for that, or it is empty.

        The blob that was copied last is not copied again for other readers while one of them holds it.
        """
        if self._unpinned:
            self._reclaim()
        holder = self._readers.get(reader)
        if holder is None:
            holder = self._readers[reader] = _Reader()
        slot = self._same_as_last(blob) or self._made_as(blob, holder) or self._write(blob, holder, reader)
        if slot is None:
            return None
        generation = slot.reference.generation
        if generation not in holder.held:
            holder.held_bytes += slot.capacity_bytes
            slot.num_readers += 1
        holder.held[generation] = holder.held.get(generation, 0) + 1
        self._num_lent += 1
        return slot.reference

    def release(self, reader: Sender, generations: Iterable[int]) -> None:
        """Take back what a reader gives; what it doesn't hold is counted and ignored."""
        holder = self._readers.get(reader)
        for generation in generations:
            count = 0 if holder is None else holder.held.get(generation, 0)
            if holder is None or not count:
                self._num_stale += 1
                continue
            self._num_released += 1
            if count > 1:
                holder.held[generation] = count - 1
                continue
            del holder.held[generation]
            self._let_go(holder, generation)
            holder.is_full = False

    def forget(self, reader: Sender) -> None:
        """Take back all that a reader holds: it is gone, and reads no more."""
        holder = self._readers.pop(reader, None)
        if holder is None:
            return
        self._num_taken_back += sum(holder.held.values())
        for generation in holder.held:
            self._let_go(holder, generation)

    def statistics(self) -> ArenaStatistics:
        """Return what is lent now and the counts since the start."""
        self._reclaim()
        return ArenaStatistics(
            used_bytes=self._buddy.used_bytes,
            slots=len(self._slots),
            written=self._generation,
            lent=self._num_lent,
            full=self._num_full,
            released=self._num_released,
            taken_back=self._num_taken_back,
            stale=self._num_stale,
        )

    def close(self) -> None:
        """Give up the memory. Who views it keeps it."""
        self._slots.clear()
        self._made.clear()
        self._readers.clear()
        self._last = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _same_as_last(self, blob: Blob) -> _Slot | None:
        if self._last is not None and self._last[0]() is blob and self._last[1].num_readers:
            return self._last[1]
        return None

    def _made_as(self, blob: Blob, holder: _Reader) -> _Slot | None:
        """Return the slot that a producer wrote this blob into, if it did and the reader may hold one more."""
        if not self._made or self._segment is None:
            return None
        slot = self._made.get(address_of(blob.view) - self._segment.address)
        if slot is None or slot.reference.length != len(blob):
            return None
        return slot if holder.held_bytes + slot.capacity_bytes <= self._max_bytes // 2 else None

    def _reclaim(self) -> None:
        """Let go of what producers dropped."""
        while self._unpinned:
            slot = self._slots.get(self._unpinned.popleft())
            if slot is not None:
                self._made.pop(slot.offset, None)
                self._drop_reader(slot)

    def _write(self, blob: Blob, holder: _Reader, reader: Sender) -> _Slot | None:
        length = len(blob)
        if not length:
            return None
        capacity_bytes = self._buddy.capacity_for(length)
        offset = None
        if holder.held_bytes + capacity_bytes <= self._max_bytes // 2:
            offset = self._buddy.allocate(length)
        if offset is None:
            self._refuse(holder, reader, length)
            return None
        pid, fd = self.address
        assert self._segment is not None
        self._generation += 1
        self._segment.write(offset, blob.view, self._generation)
        slot = _Slot(offset, capacity_bytes, Reference(pid, fd, offset, length, self._generation))
        self._slots[self._generation] = slot
        self._last = (weakref.ref(blob), slot)
        return slot

    def _refuse(self, holder: _Reader, reader: Sender, length: int) -> None:
        self._num_full += 1
        if not holder.is_full:
            holder.is_full = True
            _log.warning(
                "no room for %d bytes in the arena: %s holds %d of %d, all hold %d (sent in messages until there is)",
                *(length, reader.actor, holder.held_bytes, self._max_bytes, self._buddy.used_bytes),
            )

    def _let_go(self, holder: _Reader, generation: int) -> None:
        slot = self._slots[generation]
        holder.held_bytes -= slot.capacity_bytes
        self._drop_reader(slot)

    def _drop_reader(self, slot: _Slot) -> None:
        slot.num_readers -= 1
        if not slot.num_readers:
            del self._slots[slot.reference.generation]
            if self._segment is not None:
                self._segment.erase(slot.offset)
            self._buddy.free(slot.offset)
