"""Buddy allocation: blocks of powers of two in one range of addresses, without touching the memory itself.

Free neighbours of one size that came from one block are joined again, so what is free stays usable for any size
(Knowlton 1965; Knuth, TAOCP 1, 2.5). The lowest free address is taken first, so that the fewest pages are ever touched.
Before that, a block of the right size that was freed a moment ago is: it is still in the processor's cache, and neither
joined nor split (2 instead of 20 us).
"""

from __future__ import annotations

import heapq

MAX_RECENT = 4
"""Blocks of one size that wait to be taken again before they are joined with their neighbours."""


class Buddy:
    """Allocates offsets in ``[0, num_bytes)``.

    Args:
        num_bytes: a multiple of `min_block_bytes`, not necessarily a power of two.
        min_block_bytes: the smallest block, a power of two.

    Raises:
        ValueError: sizes that don't fit together.
    """

    def __init__(self, num_bytes: int, min_block_bytes: int) -> None:
        if min_block_bytes < 1 or min_block_bytes & (min_block_bytes - 1):
            raise ValueError(f"min_block_bytes {min_block_bytes} is no power of two")
        if num_bytes < min_block_bytes or num_bytes % min_block_bytes:
            raise ValueError(f"{num_bytes} bytes are no positive multiple of {min_block_bytes}")
        self.num_bytes = num_bytes
        self.used_bytes = 0
        self._min_block_bytes = min_block_bytes
        self._used: dict[int, int] = {}
        # By size: the free offsets, and a heap of them that may hold some that are not free any more.
        self._free: dict[int, set[int]] = {}
        self._recent: dict[int, list[int]] = {}
        self._lowest: dict[int, list[int]] = {}
        size = min_block_bytes
        while size <= num_bytes:
            self._free[size] = set()
            self._recent[size] = []
            self._lowest[size] = []
            size *= 2
        offset = 0
        for size in reversed(self._free):  # the largest blocks come first, so each lies at a multiple of its size
            if num_bytes - offset >= size:
                self._put(offset, size)
                offset += size

    def capacity_for(self, num_bytes: int) -> int:
        """Return the size of the block that `num_bytes` would get."""
        return max(self._min_block_bytes, 1 << (num_bytes - 1).bit_length())

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of a block of at least `num_bytes`, or None if none is free."""
        size = self.capacity_for(num_bytes)
        recent = self._recent.get(size)
        if recent is None:
            return None
        offset = recent.pop() if recent else self._split(size)
        if offset is None:
            self._join_recent()
            offset = self._split(size)
        if offset is not None:
            self._used[offset] = size
            self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Give a block back.

        Raises:
            KeyError: there is none at `offset`.
        """
        size = self._used.pop(offset)
        self.used_bytes -= size
        recent = self._recent[size]
        recent.append(offset)
        if len(recent) > MAX_RECENT:
            self._join(recent.pop(0), size)

    def _split(self, wanted: int) -> int | None:
        """Take a free block, of a larger one if need be; None if there is none."""
        size = wanted
        while not self._free[size]:
            size *= 2
            if size not in self._free:
                return None
        offset = self._take(size)
        while size > wanted:
            size //= 2
            self._put(offset + size, size)
        return offset

    def _join_recent(self) -> None:
        for size, recent in self._recent.items():
            for offset in recent:
                self._join(offset, size)
            recent.clear()

    def _join(self, offset: int, size: int) -> None:
        """Put a block among the free ones, as part of the largest that it completes."""
        while (others := self._free.get(size)) is not None and (offset ^ size) in others:
            others.remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._put(offset, size)

    def _put(self, offset: int, size: int) -> None:
        free, lowest = self._free[size], self._lowest[size]
        free.add(offset)
        if len(lowest) > 2 * len(free) + 16:  # most were joined since: without this the heap grows for ever
            lowest[:] = free
            heapq.heapify(lowest)
        else:
            heapq.heappush(lowest, offset)

    def _take(self, size: int) -> int:
        free, lowest = self._free[size], self._lowest[size]
        while (offset := heapq.heappop(lowest)) not in free:
            pass  # was joined with its neighbour since
        free.remove(offset)
        return offset
