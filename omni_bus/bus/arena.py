"""The sender's side of shared memory: payloads written once, lent to readers, counted until all gave them back.

What a reader views may outlive the chunk that brought it (an engine keeps an array), so slots are given back by
`Release` frames when the last view is gone, not by `Credit`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from omni_bus.bus.leases import Block, Leases
from omni_bus.bus.segment import BLOCK_BYTES, OwnSegment, address_of
from omni_bus.wire.codec import Reference
from omni_bus.wire.payloads import Blob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_bus.ids import Peer, Sender

_log = logging.getLogger(__name__)


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


class _Pin:
    """Sits on the exporter of memory that a producer writes; its end, in whatever thread, lets the slot go."""

    __slots__ = ("_offset", "_unpinned")

    def __init__(self, offset: int, unpinned: deque[int]) -> None:
        self._offset = offset
        self._unpinned = unpinned

    def __del__(self) -> None:
        self._unpinned.append(self._offset)


class Arena:
    """Lends copies of blobs to readers on this host.

    No reader may hold more than half of it, so one that never lets go costs the others nothing; it gets its blobs
    as message parts until it gives something back. Generations count up and are never used twice.

    `allocate` may be called in any thread: an engine makes its outputs on its own. One lock guards the books (0.15 us
    where nobody waits for it); nothing waits or runs foreign code while it is held. All else is for the loop's thread.

    Args:
        owner: the actor, as readers reach it.
        limits: `max_bytes` is rounded down to whole blocks.
    """

    def __init__(self, owner: Peer, limits: ArenaLimits) -> None:
        self.owner = owner
        self._max_bytes = max(limits.max_bytes // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
        self._leases = Leases(self._max_bytes, BLOCK_BYTES)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._segment: OwnSegment | None = None
        self._full: set[Sender] = set()
        self._last: tuple[weakref.ref[Blob], Block, Reference] | None = None
        self._made: dict[int, tuple[Block, Reference]] = {}
        self._unpinned: deque[int] = deque()

    @property
    def address(self) -> tuple[int, int]:
        """Process and descriptor under which readers find it; made now if it was not yet.

        Raises:
            OSError: the system gives no such memory.
        """
        with self._lock:
            return self._pid, self._own_segment().fd

    def allocate(self, num_bytes: int) -> Blob | None:
        """Return a blob of writable memory in the arena, which `lend` need not copy; None if there is no room.

        Write it, make the payload of it or of an array over all of it, send that, and write no more. The memory is
        used again when no view of it is left here and all readers gave it back, whether it was sent or not. What it
        holds at first is what an earlier user left there.

        Raises:
            OSError: the system gives no such memory.
        """
        with self._lock:
            self._reclaim()
            if self._is_closed or num_bytes < 1:
                return None
            segment = self._own_segment()
            block = self._leases.keep(num_bytes)
            if block is None:
                return None
            address = segment.enter(block.offset, num_bytes, block.generation)
            reference = Reference(self._pid, segment.fd, block.offset, num_bytes, block.generation)
            self._made[block.offset] = block, reference
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        memory.pin = _Pin(block.offset, self._unpinned)  # type: ignore[attr-defined]
        memory.segment = segment  # type: ignore[attr-defined] (which unmaps itself when nobody needs it)
        return Blob(memoryview(memory).cast("B"))

    def lend(self, blob: Blob, reader: Sender) -> Reference | None:
        """Copy a blob to where `reader` can view it; None if there is no room for that, or it is empty.

        The blob that was copied last is not copied again for other readers while one of them holds it.
        """
        with self._lock:
            if self._unpinned:
                self._reclaim()
            found = self._same_as_last(blob) or self._made_as(blob, reader) or self._write(blob, reader)
            if found is not None:
                self._leases.lend(found[0], reader)
                return found[1]
        if len(blob):
            self._refuse(reader, len(blob))
        return None

    def release(self, reader: Sender, generations: Iterable[int]) -> None:
        """Take back what a reader gives; what it doesn't hold is counted and ignored."""
        with self._lock:
            self._free(self._leases.release(reader, generations))
        self._full.discard(reader)

    def forget(self, reader: Sender) -> None:
        """Take back all that a reader holds: it is gone, and reads no more."""
        with self._lock:
            self._free(self._leases.forget(reader))
        self._full.discard(reader)

    def statistics(self) -> ArenaStatistics:
        """Return what is lent now and the counts since the start."""
        with self._lock:
            self._reclaim()
            counts = self._leases.counts()
        return ArenaStatistics(
            used_bytes=counts.used_bytes,
            slots=counts.blocks,
            written=counts.taken,
            lent=counts.lent,
            full=counts.full,
            released=counts.released,
            taken_back=counts.taken_back,
            stale=counts.stale,
        )

    def close(self) -> None:
        """Give up the memory; who views it keeps it. There is no more from now on."""
        with self._lock:
            self._is_closed = True
            self._made.clear()
            self._leases = Leases(self._max_bytes, BLOCK_BYTES)
            self._last = None
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    def _refuse(self, reader: Sender, length: int) -> None:
        if reader in self._full:
            return
        self._full.add(reader)
        held_bytes, used_bytes = self._leases.held_bytes(reader), self._leases.counts().used_bytes
        _log.warning(
            "no room for %d bytes in the arena: %s holds %d of %d, all hold %d (sent in messages until there is)",
            *(length, reader.actor, held_bytes, self._max_bytes, used_bytes),
        )

    # --- under the lock ---------------------------------------------------------------------------------------

    def _own_segment(self) -> OwnSegment:
        if self._segment is None:
            self._segment = OwnSegment(self.owner, self._max_bytes)
        return self._segment

    def _same_as_last(self, blob: Blob) -> tuple[Block, Reference] | None:
        if self._last is not None and self._last[0]() is blob and self._last[1].num_readers:
            return self._last[1:]
        return None

    def _made_as(self, blob: Blob, reader: Sender) -> tuple[Block, Reference] | None:
        """Return where a producer wrote this blob, if it did and the reader may hold one more."""
        if not self._made or self._segment is None:
            return None
        found = self._made.get(address_of(blob.view) - self._segment.address)
        if found is None or found[1].length != len(blob) or not self._leases.has_share(found[0], reader):
            return None
        return found

    def _reclaim(self) -> None:
        """Let go of what producers dropped."""
        while self._unpinned:
            made = self._made.pop(self._unpinned.popleft(), None)
            if made is not None:
                self._free(self._leases.drop(made[0].generation))

    def _write(self, blob: Blob, reader: Sender) -> tuple[Block, Reference] | None:
        length = len(blob)
        if not length:
            return None
        block = self._leases.take(length, reader)
        if block is None:
            return None
        segment = self._own_segment()
        segment.write(block.offset, blob.view, block.generation)
        reference = Reference(self._pid, segment.fd, block.offset, length, block.generation)
        self._last = (weakref.ref(blob), block, reference)
        return block, reference

    def _free(self, blocks: list[Block]) -> None:
        for block in blocks:
            if self._segment is not None:
                self._segment.erase(block.offset)
            self._leases.free(block)
