"""Who holds which block of a memory that its owner lends: pure bookkeeping, whatever the memory is.

A block is written once and lent to readers, each of which may hold it several times (once for each reference that it
was sent). When the last one gives it back, the block is *let go*: the owner may free it as soon as nobody reads it any
more. Generations count up and are never used twice, so that what is given back late, or made up, means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from omni_bus.bus.buddy import Buddy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_bus.ids import Sender


class LeaseCounts(NamedTuple):
    """Bytes and blocks in use now, and the counts since the start.

    In use is what is lent, or let go and not yet freed. Counted are blocks taken, leases given, requests that found no
    room, leases given back, taken back from readers that are gone, and given back without being held (stale).
    """

    used_bytes: int
    blocks: int
    taken: int
    lent: int
    full: int
    released: int
    taken_back: int
    stale: int


class Block:
    """A piece of the memory: where it begins, how long it is (a power of two of the smallest), its generation."""

    __slots__ = ("capacity_bytes", "generation", "num_readers", "offset")

    def __init__(self, offset: int, capacity_bytes: int, generation: int) -> None:
        self.offset = offset
        self.capacity_bytes = capacity_bytes
        self.generation = generation
        self.num_readers = 0


class _Reader:
    """What one reader holds: how often each generation, and the bytes of their blocks."""

    __slots__ = ("held", "held_bytes")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.held_bytes = 0


class Leases:
    """Blocks of a range ``[0, num_bytes)`` and their leases.

    No reader may hold more than half of it, so one that never lets go costs the others nothing.

    Args:
        num_bytes: a multiple of `min_block_bytes`.
        min_block_bytes: the smallest block, a power of two.

    Raises:
        ValueError: sizes that don't fit together.
    """

    def __init__(self, num_bytes: int, min_block_bytes: int) -> None:
        self._buddy = Buddy(num_bytes, min_block_bytes)
        self._max_share_bytes = num_bytes // 2
        self._blocks: dict[int, Block] = {}
        self._readers: dict[Sender, _Reader] = {}
        self._num_blocks_used = 0
        self._generation = 0
        self._num_lent = self._num_full = self._num_released = self._num_taken_back = self._num_stale = 0

    def take(self, num_bytes: int, reader: Sender) -> Block | None:
        """Return a free block that `reader` may be lent; None if there is none, or it holds too much already."""
        offset = None
        capacity_bytes = self._buddy.capacity_for(num_bytes)
        holder = self._readers.get(reader)
        if (0 if holder is None else holder.held_bytes) + capacity_bytes <= self._max_share_bytes:
            offset = self._buddy.allocate(num_bytes)
        if offset is None:
            self._num_full += 1
            return None
        self._generation += 1
        self._num_blocks_used += 1
        return Block(offset, capacity_bytes, self._generation)

    def keep(self, num_bytes: int) -> Block | None:
        """Return a free block that its owner holds itself until `drop`; None if there is none."""
        offset = self._buddy.allocate(num_bytes)
        if offset is None:
            return None
        self._generation += 1
        self._num_blocks_used += 1
        block = self._blocks[self._generation] = Block(offset, self._buddy.capacity_for(num_bytes), self._generation)
        block.num_readers = 1
        return block

    def drop(self, generation: int) -> list[Block]:
        """Give back what the owner kept; return the block if it is let go by that."""
        let_go: list[Block] = []
        self._leave(self._blocks[generation], let_go)
        return let_go

    def has_share(self, block: Block, reader: Sender) -> bool:
        """Whether `reader` may be lent a block that others hold."""
        return self.held_bytes(reader) + block.capacity_bytes <= self._max_share_bytes

    def lend(self, block: Block, reader: Sender) -> None:
        """Give `reader` a lease, its first or another one, of a block that was not let go."""
        holder = self._readers.get(reader)
        if holder is None:
            holder = self._readers[reader] = _Reader()
        generation = block.generation
        if generation not in holder.held:
            holder.held[generation] = 0
            holder.held_bytes += block.capacity_bytes
            block.num_readers += 1
        holder.held[generation] += 1
        self._blocks[generation] = block
        self._num_lent += 1

    def release(self, reader: Sender, generations: Iterable[int]) -> list[Block]:
        """Take leases back that a reader gives, one for each time a generation is named; return the blocks let go.

        What it doesn't hold is counted and ignored.
        """
        let_go: list[Block] = []
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
            self._let_go(holder, generation, let_go)
        return let_go

    def forget(self, reader: Sender) -> list[Block]:
        """Take back all that a reader holds, since it is gone; return the blocks let go."""
        let_go: list[Block] = []
        holder = self._readers.pop(reader, None)
        if holder is not None:
            self._num_taken_back += sum(holder.held.values())
            for generation in holder.held:
                self._let_go(holder, generation, let_go)
        return let_go

    def free(self, block: Block) -> None:
        """Make the memory of a block available: one that was let go, or that was never lent."""
        self._num_blocks_used -= 1
        self._buddy.free(block.offset)

    def held_bytes(self, reader: Sender) -> int:
        """Return what a reader holds."""
        holder = self._readers.get(reader)
        return 0 if holder is None else holder.held_bytes

    def counts(self) -> LeaseCounts:
        """Return what is in use now and the counts since the start."""
        return LeaseCounts(
            used_bytes=self._buddy.used_bytes,
            blocks=self._num_blocks_used,
            taken=self._generation,
            lent=self._num_lent,
            full=self._num_full,
            released=self._num_released,
            taken_back=self._num_taken_back,
            stale=self._num_stale,
        )

    def _let_go(self, holder: _Reader, generation: int, let_go: list[Block]) -> None:
        block = self._blocks[generation]
        holder.held_bytes -= block.capacity_bytes
        self._leave(block, let_go)

    def _leave(self, block: Block, let_go: list[Block]) -> None:
        block.num_readers -= 1
        if not block.num_readers:
            del self._blocks[block.generation]
            let_go.append(block)
