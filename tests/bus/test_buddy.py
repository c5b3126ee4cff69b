from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_bus.bus.buddy import Buddy

MIN = 16
TOTAL = 41 * MIN  # no power of two, so it begins as blocks of 32, 8 and 1


class BuddyMachine(RuleBasedStateMachine):
    """Against a model that knows which bytes are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.buddy = Buddy(TOTAL, MIN)
        self.taken: dict[int, int] = {}

    @rule(num_bytes=st.integers(1, TOTAL + MIN))
    def allocate(self, num_bytes: int) -> None:
        capacity = self.buddy.capacity_for(num_bytes)
        offset = self.buddy.allocate(num_bytes)
        if offset is None:
            fits = [at for at in range(0, TOTAL - capacity + 1, capacity) if self.is_free(at, capacity)]
            assert fits == []
            return
        assert capacity >= num_bytes
        assert offset % capacity == 0
        assert offset + capacity <= TOTAL
        assert self.is_free(offset, capacity)
        self.taken[offset] = capacity

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.taken:
            offset = data.draw(st.sampled_from(sorted(self.taken)))
            del self.taken[offset]
            self.buddy.free(offset)

    @rule(offset=st.integers(-MIN, TOTAL))
    def free_what_is_not_taken(self, offset: int) -> None:
        if offset not in self.taken:
            with pytest.raises(KeyError):
                self.buddy.free(offset)

    @invariant()
    def used_bytes_add_up(self) -> None:
        assert self.buddy.used_bytes == sum(self.taken.values())

    def is_free(self, offset: int, num_bytes: int) -> bool:
        return all(at + size <= offset or offset + num_bytes <= at for at, size in self.taken.items())

    def teardown(self) -> None:
        for offset in self.taken:
            self.buddy.free(offset)
        assert self.buddy.allocate(32 * MIN) == 0


TestBuddyMachine = BuddyMachine.TestCase


def test_lowest_free_address_is_taken_first() -> None:
    buddy = Buddy(1024, 16)

    assert [buddy.allocate(16) for _ in range(5)] == [0, 16, 32, 48, 64]


def test_block_just_freed_is_taken_again() -> None:
    buddy = Buddy(1024, 16)
    offsets = [buddy.allocate(16) for _ in range(4)]
    assert offsets == [0, 16, 32, 48]

    buddy.free(32)

    assert buddy.allocate(10) == 32


def test_bookkeeping_stays_bounded() -> None:
    buddy = Buddy(1 << 20, 16)
    for _ in range(20_000):
        offsets = [buddy.allocate(size) for size in (16, 64, 1 << 19, 16, 16, 16, 16, 16)]
        for offset in offsets:
            assert offset is not None
            buddy.free(offset)

    assert sum(map(len, buddy._lowest.values())) < 1000


@pytest.mark.parametrize(("num_bytes", "block"), [(0, 16), (100, 16), (96, 24), (16, 0)])
def test_sizes_that_do_not_fit_are_refused(num_bytes: int, block: int) -> None:
    with pytest.raises(ValueError, match=str(num_bytes if block == 16 else block)):
        Buddy(num_bytes, block)
