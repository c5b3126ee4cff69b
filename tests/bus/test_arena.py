from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_bus.bus.arena import Arena, ArenaLimits
from omni_bus.bus.borrowed import Borrowed
from omni_bus.bus.segment import _HEAD, BLOCK_BYTES, ForeignSegment, OwnSegment
from omni_bus.ids import Peer, Sender
from omni_bus.wire.codec import Reference
from omni_bus.wire.payloads import Blob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_bus.wire.frames import Release

ANN = Peer("ann.0", 1, "ipc:///nowhere/ann")
BOB, EVE = Sender("bob.0", 2), Sender("eve.0", 3)
TOTAL = 64 * BLOCK_BYTES


numbers = st.integers(-(2**63), 2**64 - 1)


class Reader:
    """A receiving end whose releases go to an arena at once."""

    def __init__(self, arena: Arena, me: Sender) -> None:
        self.me = me
        self.arena = arena
        self.releases: list[Release] = []
        self.borrowed = Borrowed(self.take)

    def take(self, peer: Peer, frame: Release) -> None:
        assert peer == ANN
        self.releases.append(frame)
        self.arena.release(self.me, frame.generations)

    def view(self, reference: Reference) -> memoryview:
        return self.borrowed.view(ANN.sender, reference)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(ANN, ArenaLimits(TOTAL))
    yield arena
    arena.close()


@pytest.fixture
async def bob(arena: Arena) -> Reader:
    return Reader(arena, BOB)


def lend(arena: Arena, data: bytes, reader: Sender = BOB) -> Reference:
    reference = arena.lend(Blob(data), reader)
    assert reference is not None
    return reference


async def test_reader_views_what_was_lent(arena: Arena, bob: Reader) -> None:
    data = os.urandom(3 * BLOCK_BYTES + 5)

    view = bob.view(lend(arena, data))

    assert view == data
    assert (view.readonly, view.format, view.ndim) == (True, "B", 1)


async def test_slot_is_free_when_the_last_view_is_gone(arena: Arena, bob: Reader) -> None:
    view = bob.view(lend(arena, b"x" * 40_000))
    array = np.frombuffer(view, np.uint16)[100:]
    del view
    await asyncio.sleep(0)
    assert arena.statistics().slots == 1

    del array
    await asyncio.sleep(0)

    assert arena.statistics().slots == 0
    assert bob.borrowed.statistics().views == 0


async def test_one_turn_gives_everything_back_in_one_frame(arena: Arena, bob: Reader) -> None:
    views = [bob.view(lend(arena, bytes([i]) * 100)) for i in range(20)]

    views.clear()
    await asyncio.sleep(0)

    assert [len(frame.generations) for frame in bob.releases] == [20]
    assert arena.statistics().used_bytes == 0


async def test_view_may_be_dropped_in_another_thread(arena: Arena, bob: Reader) -> None:
    views = [bob.view(lend(arena, b"x" * 100)) for _ in range(20)]

    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    await asyncio.sleep(0)

    assert arena.statistics().released == 20


async def test_writing_through_a_view_is_refused(arena: Arena, bob: Reader) -> None:
    view = bob.view(lend(arena, b"abc"))
    array = np.frombuffer(view, np.uint8)

    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


async def test_blob_for_two_readers_is_written_once(arena: Arena) -> None:
    bob, eve, blob = Reader(arena, BOB), Reader(arena, EVE), Blob(b"x" * 1000)
    references = [arena.lend(blob, reader) for reader in (BOB, EVE, BOB)]
    assert references[0] is not None
    assert references == [references[0]] * 3
    views = [bob.view(references[0]), eve.view(references[0]), bob.view(references[0])]
    assert arena.statistics().written == 1

    for slots in (1, 1, 0):
        views.pop()
        await asyncio.sleep(0)
        assert arena.statistics().slots == slots


def test_blob_is_written_again_once_its_slot_is_free(arena: Arena) -> None:
    blob = Blob(b"x")
    first = arena.lend(blob, BOB)
    assert first is not None
    arena.release(BOB, (first.generation,))

    second = arena.lend(blob, BOB)

    assert second is not None
    assert second.generation != first.generation


def test_full_arena_says_so_once_and_takes_no_more(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        references = [arena.lend(Blob(b"x" * 8 * BLOCK_BYTES), BOB) for _ in range(9)]

    assert [reference is not None for reference in references] == [True] * 4 + [False] * 5
    assert arena.statistics().full == 5
    holds = f"bob.0 holds {TOTAL // 2} of {TOTAL}, all hold {TOTAL // 2}"
    assert caplog.messages == [
        f"no room for {8 * BLOCK_BYTES} bytes in the arena: {holds} (sent in messages until there is)"
    ]


def test_reader_that_leaks_leaves_half_to_the_others(arena: Arena) -> None:
    while arena.lend(Blob(b"x" * BLOCK_BYTES), BOB):
        pass

    assert arena.lend(Blob(b"x" * 16 * BLOCK_BYTES), EVE) is not None


def test_what_a_lost_reader_held_is_taken_back(arena: Arena) -> None:
    blob = Blob(b"x" * 100)
    for reader in (BOB, BOB, EVE):
        arena.lend(blob, reader)
    lend(arena, b"y" * 100)

    arena.forget(BOB)
    assert (arena.statistics().slots, arena.statistics().taken_back) == (1, 3)
    arena.forget(EVE)

    assert (arena.statistics().slots, arena.statistics().used_bytes) == (0, 0)


def test_release_of_what_is_not_held_is_counted_and_ignored(arena: Arena) -> None:
    reference = lend(arena, b"x" * 100)

    arena.release(EVE, (reference.generation,))
    arena.release(BOB, (reference.generation + 1, 0, -1, 1 << 70))
    assert (arena.statistics().stale, arena.statistics().slots) == (5, 1)
    arena.release(BOB, (reference.generation, reference.generation))

    assert (arena.statistics().stale, arena.statistics().slots) == (6, 0)


async def test_reference_to_a_slot_that_is_free_again_is_refused(arena: Arena, bob: Reader) -> None:
    reference = lend(arena, b"x" * 100)
    arena.forget(BOB)
    with pytest.raises(ValueError, match="holds no 100 bytes of generation 1 at 0"):
        bob.view(reference)

    again = lend(arena, b"y" * 100)

    assert again.offset == reference.offset
    with pytest.raises(ValueError, match="generation 1 "):
        bob.view(reference)


@settings(max_examples=300)
@given(data=st.data())
def test_wrong_references_are_refused_whatever_they_say(data: st.DataObject) -> None:
    async def attempt() -> None:
        arena = Arena(ANN, ArenaLimits(TOTAL))
        bob = Reader(arena, BOB)
        right = [lend(arena, b"x" * 20_000), lend(arena, b"y" * 100)]
        near = numbers | st.integers(-2, 70_000) | st.sampled_from([TOTAL, TOTAL - 1])
        fields = {
            name: data.draw(st.just(getattr(right[0], name)) | near) for name in ("offset", "length", "generation")
        }
        wrong = msgspec.structs.replace(right[0], **fields)
        if wrong not in right:
            with pytest.raises(ValueError, match=r"arena"):
                bob.view(wrong)
        arena.close()

    asyncio.run(attempt())


@settings(max_examples=100)
@given(pid=numbers | st.just(os.getpid()), fd=numbers | st.integers(0, 30))
def test_descriptors_that_are_no_arena_are_refused(pid: int, fd: int) -> None:
    with pytest.raises(ValueError, match=r"arena|opened"):
        ForeignSegment(Sender("nobody.0", 4), pid, fd)


def test_arena_of_another_incarnation_is_refused() -> None:
    segment = OwnSegment(ANN, TOTAL)

    with pytest.raises(ValueError, match=r"is ann\.0's arena or a former one, not the sender's"):
        ForeignSegment(Sender("ann.0", 99), os.getpid(), segment.fd)
    segment.close()


def test_memory_that_could_be_cut_off_is_refused() -> None:
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, TOTAL)

    with pytest.raises(ValueError, match="is no sealed arena"):
        ForeignSegment(ANN.sender, os.getpid(), fd)
    os.close(fd)


def test_pipe_is_refused_without_waiting() -> None:
    read_fd, write_fd = os.pipe()

    with pytest.raises(ValueError, match="is no arena"):
        ForeignSegment(ANN.sender, os.getpid(), read_fd)
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize(
    ("field", "value"), [(0, b"omnibus\x63"), (1, 1 << 40), (2, 1 << 60), (2, 0), (3, 0xFFFFFFFF), (3, 0)]
)
def test_head_that_makes_no_sense_is_refused(field: int, value: Any) -> None:
    segment = OwnSegment(ANN, TOTAL)
    head: list[Any] = list(_HEAD.unpack_from(segment._memory, 0))
    head[field] = value
    _HEAD.pack_into(segment._memory, 0, *head)

    with pytest.raises(ValueError, match=r"is no arena of this version|names no owner"):
        ForeignSegment(ANN.sender, os.getpid(), segment.fd)
    segment.close()


def test_sealed_memory_keeps_its_size() -> None:
    segment = OwnSegment(ANN, TOTAL)

    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 100)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 10 * TOTAL)
    segment.close()


async def test_view_stays_valid_when_the_owner_is_gone(bob: Reader) -> None:
    arena = Arena(ANN, ArenaLimits(TOTAL))
    data = os.urandom(50_000)
    view = bob.view(lend(arena, data))

    arena.close()
    bob.borrowed.forget(ANN.sender)
    gc.collect()

    assert view == data
    del view
    await asyncio.sleep(0)
    assert bob.releases == []
    assert bob.borrowed.statistics() == (0, 0, 1, 1)


def test_memory_is_unmapped_with_its_last_view() -> None:
    def num_mappings() -> int:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum("memfd:omni-bus unmapped" in line for line in maps)

    async def look() -> None:
        peer = Peer("unmapped", 7, "ipc:///nowhere")
        arena = Arena(peer, ArenaLimits(TOTAL))
        borrowed = Borrowed(lambda _, __: None)
        view = borrowed.view(peer.sender, lend(arena, b"x" * 100))
        arena.close()
        borrowed.forget(peer.sender)
        assert num_mappings() == 1
        del view
        await asyncio.sleep(0)
        assert num_mappings() == 0

    asyncio.run(look())


async def test_memory_written_in_place_is_not_copied(arena: Arena, bob: Reader) -> None:
    blob = arena.allocate(40_000)
    assert blob is not None
    array = np.frombuffer(blob.view, np.uint16)
    array[:] = np.arange(20_000)

    reference = arena.lend(Blob(array.view(np.uint8).data), BOB)
    assert reference is not None
    view = bob.view(reference)
    array[0] = 77

    assert np.frombuffer(view, np.uint16)[0] == 77
    assert arena.statistics().slots == 1


@pytest.mark.parametrize("is_producer_first", [True, False])
async def test_memory_written_in_place_is_free_when_all_let_go(
    arena: Arena, bob: Reader, *, is_producer_first: bool
) -> None:
    blob = arena.allocate(100)
    assert blob is not None
    reference = arena.lend(blob, BOB)
    assert reference is not None
    held: list[Any] = [bob.view(reference), blob] if is_producer_first else [blob, bob.view(reference)]
    del blob

    for slots in (1, 0):
        held.pop()
        await asyncio.sleep(0)
        assert arena.statistics().slots == slots


def test_part_of_memory_written_in_place_is_copied(arena: Arena) -> None:
    blob = arena.allocate(100)
    assert blob is not None

    for part in (blob.view[1:], blob.view[:99]):
        reference = arena.lend(Blob(part), BOB)
        assert reference is not None
        assert (reference.generation, reference.length) != (1, 100)
    assert arena.statistics().slots == 3


def test_no_room_to_write_in_place_is_said(arena: Arena) -> None:
    held = [arena.allocate(TOTAL // 4) for _ in range(5)]

    assert [blob is None for blob in held] == [False] * 4 + [True]
    assert arena.allocate(0) is None
    held.clear()
    assert arena.allocate(TOTAL) is not None


def test_memory_written_in_place_outlives_the_arena() -> None:
    arena = Arena(ANN, ArenaLimits(TOTAL))
    blob = arena.allocate(100)
    assert blob is not None

    arena.close()
    del arena
    gc.collect()
    blob.view[:] = b"x" * 100

    assert blob == Blob(b"x" * 100)


def test_closed_arena_gives_no_more() -> None:
    arena = Arena(ANN, ArenaLimits(TOTAL))
    kept = arena.allocate(100)

    arena.close()

    assert arena.allocate(100) is None
    del kept
    assert arena.statistics().slots == 0


def test_memory_written_in_place_goes_to_two_readers_and_twice_to_one(arena: Arena) -> None:
    blob = arena.allocate(BLOCK_BYTES)
    assert blob is not None
    references = [arena.lend(blob, reader) for reader in (BOB, EVE, BOB)]
    assert references[0] is not None
    assert references == [references[0]] * 3
    assert arena.statistics().written == 1
    generation = references[0].generation
    del blob

    for reader, slots in ((BOB, 1), (EVE, 1), (BOB, 0)):
        arena.release(reader, (generation,))
        assert arena.statistics().slots == slots


def test_threads_that_make_and_drop_leave_the_books_right() -> None:
    """Engines allocate while the loop lends and takes back; one wrong turn corrupts the allocator or a payload."""
    arena = Arena(ANN, ArenaLimits(TOTAL))
    segment = ForeignSegment(ANN.sender, *arena.address)
    interval = sys.getswitchinterval()
    handed: SimpleQueue[Blob | None] = SimpleQueue()
    raised: list[BaseException] = []

    def make(seed: int) -> None:
        dice = random.Random(seed)
        kept: list[Blob] = []
        try:
            for i in range(3000):
                blob = arena.allocate(dice.choice([100, BLOCK_BYTES, 3 * BLOCK_BYTES]))
                if blob is None:
                    kept.clear()
                    continue
                blob.view[:2] = bytes([seed, i % 256])
                (kept.append if dice.random() < 0.5 else handed.put)(blob)
                if len(kept) > 4:
                    assert {kept.pop(0).view[0] for _ in range(4)} == {seed}, "somebody else wrote here"
        except BaseException as error:  # noqa: BLE001 (told below)
            raised.append(error)
        handed.put(None)

    threads = [threading.Thread(target=make, args=(seed,)) for seed in (1, 2, 3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        num_ended = 0
        while num_ended < len(threads):
            blob = handed.get()
            if blob is None:
                num_ended += 1
                continue
            reference = arena.lend(blob, BOB)
            if reference is not None:
                expected = bytes(blob.view[:2])
                del blob
                begin = segment.address_of(reference) - segment._address
                assert segment._head[begin : begin + 2] == expected
                arena.release(BOB, (reference.generation,))
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    blob = None

    assert raised == []
    statistics = arena.statistics()
    assert (statistics.slots, statistics.used_bytes, statistics.stale) == (0, 0, 0)
    whole = arena.allocate(TOTAL)
    assert whole is not None, "what is free was joined again"
    arena.close()


class LeaseMachine(RuleBasedStateMachine):
    """An arena and two readers: what is viewed is what was sent, and what nobody holds is free."""

    @initialize()
    def open(self) -> None:
        self.arena = Arena(ANN, ArenaLimits(16 * BLOCK_BYTES))
        self.held: list[tuple[Sender, Reference, bytes]] = []
        self.segment = ForeignSegment(ANN.sender, *self.arena.address)
        self.num = 0

    @rule(length=st.integers(1, 5 * BLOCK_BYTES), readers=st.lists(st.sampled_from([BOB, EVE]), min_size=1, max_size=3))
    def send(self, length: int, readers: list[Sender]) -> None:
        self.num += 1
        data = self.num.to_bytes(4, "little") * (length // 4 + 1)
        blob = Blob(data[:length])
        for reader in readers:
            reference = self.arena.lend(blob, reader)
            if reference is not None:
                self.held.append((reader, reference, data[:length]))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            reader, reference, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.arena.release(reader, (reference.generation,))

    @rule(reader=st.sampled_from([BOB, EVE]))
    def lose(self, reader: Sender) -> None:
        self.arena.forget(reader)
        self.held = [held for held in self.held if held[0] != reader]

    @rule(reader=st.sampled_from([BOB, EVE]), generation=st.integers(-1, 50))
    def release_what_is_not_held(self, reader: Sender, generation: int) -> None:
        if not any(held[0] == reader and held[1].generation == generation for held in self.held):
            self.arena.release(reader, (generation,))

    @invariant()
    def held_is_intact(self) -> None:
        for _, reference, data in getattr(self, "held", ()):
            start = self.segment.address_of(reference) - self.segment._address
            assert self.segment._head[start : start + reference.length] == data

    @invariant()
    def only_held_is_used(self) -> None:
        if hasattr(self, "held"):
            generations = {held[1].generation for held in self.held}
            statistics = self.arena.statistics()
            assert statistics.slots == len(generations)
            assert statistics.lent == len(self.held) + statistics.released + statistics.taken_back
            assert (statistics.used_bytes == 0) == (not self.held)

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()


TestLeaseMachine = LeaseMachine.TestCase
