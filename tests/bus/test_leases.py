from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_bus.bus.leases import Block, Leases
from omni_bus.ids import Sender

ANN, BOB = Sender("ann.0", 1), Sender("bob.0", 2)
BLOCK = 16
SIZE = 32 * BLOCK


def taken(leases: Leases, num_bytes: int, reader: Sender = ANN) -> Block:
    block = leases.take(num_bytes, reader)
    assert block is not None
    leases.lend(block, reader)
    return block


def test_block_is_let_go_when_its_last_reader_gives_it_back() -> None:
    leases = Leases(SIZE, BLOCK)
    block = taken(leases, 20)
    leases.lend(block, BOB)

    assert leases.release(ANN, [block.generation]) == []
    assert leases.release(BOB, [block.generation]) == [block]


def test_reader_gives_back_each_reference() -> None:
    leases = Leases(SIZE, BLOCK)
    block = taken(leases, 20)
    leases.lend(block, ANN)

    assert leases.release(ANN, [block.generation]) == []
    assert leases.release(ANN, [block.generation]) == [block]


@pytest.mark.parametrize("generation", [-1, 0, 2, 1 << 63])
def test_generation_that_is_not_held_is_counted_and_ignored(generation: int) -> None:
    leases = Leases(SIZE, BLOCK)
    taken(leases, 20)

    assert leases.release(ANN, [generation]) == []
    assert leases.release(BOB, [1]) == []
    assert (leases.counts().stale, leases.counts().blocks) == (2, 1)


def test_memory_stays_taken_until_it_is_freed() -> None:
    leases = Leases(SIZE, BLOCK)
    block = taken(leases, BLOCK)
    leases.release(ANN, [block.generation])

    assert leases.counts().used_bytes == BLOCK
    leases.free(block)
    assert leases.counts().used_bytes == 0
    assert taken(leases, BLOCK).generation == block.generation + 1


def test_no_reader_holds_more_than_half() -> None:
    leases = Leases(SIZE, BLOCK)
    first = taken(leases, SIZE // 2)

    assert leases.take(1, ANN) is None
    assert leases.take(1, BOB) is not None
    leases.release(ANN, [first.generation])
    assert leases.take(1, ANN) is not None
    assert leases.counts().full == 1


def test_forgotten_reader_holds_nothing() -> None:
    leases = Leases(SIZE, BLOCK)
    shared, own = taken(leases, 1), taken(leases, 1)
    leases.lend(shared, BOB)

    assert leases.forget(ANN) == [own]
    assert leases.held_bytes(ANN) == 0
    assert leases.release(ANN, [shared.generation]) == []
    assert (leases.counts().taken_back, leases.counts().stale) == (2, 1)


def test_kept_block_outlives_its_readers() -> None:
    leases = Leases(SIZE, BLOCK)
    block = leases.keep(SIZE)
    assert block is not None
    leases.lend(block, ANN)

    assert not leases.has_share(block, BOB)
    assert leases.release(ANN, [block.generation]) == []
    assert leases.keep(1) is None
    assert leases.drop(block.generation) == [block]


def test_dropped_block_outlives_its_owner_with_its_readers() -> None:
    leases = Leases(SIZE, BLOCK)
    block = leases.keep(BLOCK)
    assert block is not None
    leases.lend(block, ANN)

    assert leases.drop(block.generation) == []
    assert leases.forget(ANN) == [block]


class Lending(RuleBasedStateMachine):
    """Against a model that only counts: who holds what, and that no two blocks overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(SIZE, BLOCK)
        self.blocks: dict[int, Block] = {}
        self.sizes: dict[int, int] = {}
        self.held: Counter[tuple[Sender, int]] = Counter()
        self.let_go: list[Block] = []
        self.kept: set[int] = set()

    @rule(num_bytes=st.integers(1, SIZE))
    def keep(self, num_bytes: int) -> None:
        block = self.leases.keep(num_bytes)
        if block is not None:
            assert block.generation not in self.sizes
            self.blocks[block.generation] = block
            self.sizes[block.generation] = num_bytes
            self.kept.add(block.generation)

    @precondition(lambda self: self.kept)
    @rule()
    def drop(self) -> None:
        generation = self.kept.pop()
        self._expect(self.leases.drop(generation))

    @rule(num_bytes=st.integers(1, SIZE), reader=st.sampled_from([ANN, BOB]))
    def take_and_lend(self, num_bytes: int, reader: Sender) -> None:
        block = self.leases.take(num_bytes, reader)
        if block is not None:
            assert block.generation not in self.sizes
            self.leases.lend(block, reader)
            self.blocks[block.generation] = block
            self.sizes[block.generation] = num_bytes
            self.held[reader, block.generation] += 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), reader=st.sampled_from([ANN, BOB]))
    def lend_again(self, data: Any, reader: Sender) -> None:
        generation = data.draw(st.sampled_from(sorted(self.blocks)))
        self.leases.lend(self.blocks[generation], reader)
        self.held[reader, generation] += 1

    @rule(generation=st.integers(-1, 20), reader=st.sampled_from([ANN, BOB]))
    def release(self, generation: int, reader: Sender) -> None:
        was_held = self.held[reader, generation] > 0
        if was_held:
            self.held[reader, generation] -= 1
        self._expect(self.leases.release(reader, [generation]))

    @rule(reader=st.sampled_from([ANN, BOB]))
    def forget(self, reader: Sender) -> None:
        for key in self.held:
            if key[0] == reader:
                self.held[key] = 0
        self._expect(self.leases.forget(reader))

    @precondition(lambda self: self.let_go)
    @rule()
    def free(self) -> None:
        self.leases.free(self.let_go.pop())

    def _expect(self, let_go: list[Block]) -> None:
        held = {g for (_, g), count in self.held.items() if count} | self.kept
        unheld = self.blocks.keys() - held
        assert {block.generation for block in let_go} == unheld
        for generation in unheld:
            self.let_go.append(self.blocks.pop(generation))

    @invariant()
    def blocks_do_not_overlap(self) -> None:
        spans = sorted((b.offset, b.capacity_bytes, b.generation) for b in [*self.blocks.values(), *self.let_go])
        end = 0
        for offset, capacity_bytes, generation in spans:
            assert offset >= end
            assert capacity_bytes >= self.sizes[generation]
            end = offset + capacity_bytes
        assert end <= SIZE

    @invariant()
    def counts_fit(self) -> None:
        counts = self.leases.counts()
        live = [*self.blocks.values(), *self.let_go]
        assert counts.blocks == len(live)
        assert counts.used_bytes == sum(block.capacity_bytes for block in live)
        assert counts.lent - counts.released - counts.taken_back == sum(self.held.values())


TestLending = Lending.TestCase
