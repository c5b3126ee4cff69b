"""Buddy allocation: blocks of powers of two in one range of addresses, without touching the memory itself.

Free neighbours of one size that came from one block are joined again at once, so what is free stays usable for any size
(Knowlton 1965; Knuth, TAOCP 1, 2.5). The lowest free address is taken first: what was used a moment ago and is still
in a cache, and the fewest pages ever touched.
"""

from __future__ import annotations

import heapq


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
        self._lowest: dict[int, list[int]] = {}
        size = min_block_bytes
        while size <= num_bytes:
            self._free[size] = set()
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
        wanted = size = self.capacity_for(num_bytes)
        while size not in self._free or not self._free[size]:
            size *= 2
            if size > self.num_bytes:
                return None
        offset = self._take(size)
        while size > wanted:
            size //= 2
            self._put(offset + size, size)
        self._used[offset] = wanted
        self.used_bytes += wanted
        return offset

    def free(self, offset: int) -> None:
        """Give a block back.

        Raises:
            KeyError: there is none at `offset`.
        """
        size = self._used.pop(offset)
        self.used_bytes -= size
        while (other := self._free.get(size)) is not None and (offset ^ size) in other:
            other.remove(offset ^ size)
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
