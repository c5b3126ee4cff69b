"""Where long sound is cut, and that no plan can make it wait for ever."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.speech_chunks import MAX_HELD_S, WINDOW_S, Chunker, chunks_of, read_segment
from adapters.speech_input import RATE_HZ
from omni_bus.errors import BadInput, InputTooLarge
from omni_bus.testing import ListedInputs
from omni_bus.wire.payloads import Audio, Blob, Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from adapters.speech_chunks import Chunk


def noise(seconds: float, level: float = 0.5) -> np.ndarray:
    return np.full(int(seconds * RATE_HZ), level, np.float32)


def taken(chunker: Chunker) -> list[Chunk]:
    chunks: list[Chunk] = []
    while (chunk := chunker.take()) is not None:
        chunks.append(chunk)
    return chunks


def times(chunks: list[Chunk]) -> list[tuple[float, float]]:
    return [(round(chunk.start_s, 2), round(chunk.end_s, 2)) for chunk in chunks]


def test_short_sound_is_one_chunk_once_it_has_ended() -> None:
    chunker = Chunker(has_plan=False)
    chunker.hear(noise(3))
    assert chunker.take() is None

    chunker.end_sound()

    assert times(taken(chunker)) == [(0, 3)]


def test_long_sound_is_cut_where_it_is_quiet() -> None:
    chunker = Chunker(has_plan=False)
    chunker.hear(np.concatenate([noise(24), noise(0.4, 0.0), noise(29)]))

    [first] = taken(chunker)
    chunker.end_sound()
    rest = taken(chunker)

    assert 24.0 < first.end_s < 24.4
    assert [first.end_s, *(chunk.end_s for chunk in rest)] == [chunk.start_s for chunk in rest] + [53.4]


def test_planned_neighbours_share_a_window_and_silence_is_left_out() -> None:
    chunker = Chunker(has_plan=True)
    chunker.hear(noise(100))
    for start, end in ((5, 12), (13, 20), (21, 34), (36, 40), (90, 95)):
        chunker.plan(start, end)
    assert times(taken(chunker)) == [(5, 34), (36, 40)]

    chunker.end_plan()
    chunker.end_sound()

    assert times(taken(chunker)) == [(90, 95)]


def test_segment_longer_than_a_window_is_parted() -> None:
    chunker = Chunker(has_plan=True)
    chunker.hear(noise(80))
    chunker.plan(2, 75)
    chunker.end_plan()
    chunker.end_sound()

    chunks = taken(chunker)

    assert chunks[0].start_s == 2
    assert chunks[-1].end_s == 75
    assert all(left.end_s == right.start_s for left, right in itertools.pairwise(chunks))
    assert all(chunk.end_s - chunk.start_s <= WINDOW_S for chunk in chunks)


def test_plan_ahead_of_the_sound_waits_for_it() -> None:
    chunker = Chunker(has_plan=True)
    chunker.plan(1, 4)
    chunker.end_plan()
    chunker.hear(noise(3))
    assert chunker.take() is None

    chunker.hear(noise(1.5))

    assert times(taken(chunker)) == [(1, 4)]


def test_plan_beyond_the_end_reads_what_is_there() -> None:
    chunker = Chunker(has_plan=True)
    chunker.hear(noise(3))
    chunker.plan(1, 3.2)
    chunker.plan(3.4, 3.6)
    chunker.end_sound()
    chunker.end_plan()

    assert times(taken(chunker)) == [(1, 3)]


def test_without_speech_nothing_is_read() -> None:
    chunker = Chunker(has_plan=True)
    chunker.hear(noise(3))
    chunker.end_sound()
    chunker.end_plan()

    assert taken(chunker) == []


def test_sound_that_nobody_plans_is_bounded() -> None:
    chunker = Chunker(has_plan=True)
    chunker.hear(np.broadcast_to(np.float32(0), (MAX_HELD_S * RATE_HZ,)))

    with pytest.raises(InputTooLarge, match=f"audio: {MAX_HELD_S} s without speech came"):
        chunker.hear(noise(0.1))


segments = st.lists(
    st.tuples(st.floats(0, 8), st.floats(0.05, 70)), max_size=12
)  # silence before each segment, and its length


@given(segments=segments, piece_s=st.floats(0.3, 40), lead=st.integers(0, 3))
def test_every_planned_sample_is_in_one_chunk(segments: list[tuple[float, float]], piece_s: float, lead: int) -> None:
    """In order, whole, in windows, however plan and sound come."""
    plan: list[tuple[float, float]] = []
    at = 0.0
    for silence, length in segments:
        plan.append((at + silence, at + silence + length))
        at += silence + length
    total = int((at + 1) * RATE_HZ)
    chunker, chunks, waiting = Chunker(has_plan=True), [], list(plan)
    for start in range(0, total, int(piece_s * RATE_HZ)):
        end = min(total, start + int(piece_s * RATE_HZ))
        chunker.hear(np.arange(start, end, dtype=np.float32))
        while waiting and waiting[0][1] * RATE_HZ < end - lead * RATE_HZ:
            chunker.plan(*waiting.pop(0))
        chunks += taken(chunker)
    chunker.end_sound()
    for segment in waiting:
        chunker.plan(*segment)
    chunker.end_plan()
    chunks += taken(chunker)

    assert all(0 < len(chunk.samples) <= WINDOW_S * RATE_HZ for chunk in chunks)
    assert all(left.end_s <= right.start_s for left, right in itertools.pairwise(chunks))
    assert all(chunk.samples[0] == np.float32(chunk.start) for chunk in chunks)
    for start, end in plan:
        covered = sum(
            max(0.0, min(end, chunk.end_s) - max(start, chunk.start_s)) for chunk in chunks if chunk.start_s < end
        )
        assert math.isclose(covered, end - start, abs_tol=2 / RATE_HZ)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"start": 1},
        {"start": "1", "end": 2},
        {"start": -1, "end": 2},
        {"start": 2, "end": 1},
        {"start": 0, "end": math.inf},
        {"start": math.nan, "end": 1},
        [],
    ],
)
def test_what_is_no_segment_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="segments: another json came"):
        read_segment(Json(value))


def test_another_kind_is_no_segment() -> None:
    with pytest.raises(BadInput, match="segments: another text came"):
        read_segment(Text(""))


def test_plan_out_of_order_is_refused() -> None:
    chunker = Chunker(has_plan=True)
    chunker.plan(1, 3)

    with pytest.raises(BadInput, match="segments: 2 to 4 s came after 3 s"):
        chunker.plan(2, 4)


async def test_plan_that_waits_for_later_sound_gets_it() -> None:
    """The recogniser goes on taking sound while the plan has nothing, and the plan while the sound has nothing."""
    heard = asyncio.Semaphore(0)

    async def sound() -> AsyncIterator[Audio]:
        for _ in range(50):
            yield Audio(RATE_HZ, 1, "s16", Blob(bytes(2 * RATE_HZ)))
            heard.release()

    async def plan() -> AsyncIterator[Json]:
        for _ in range(40):
            await heard.acquire()
        yield Json({"start": 1.0, "end": 2.0})

    inputs = ListedInputs({"audio": sound(), "segments": plan()})
    async with asyncio.timeout(30):
        chunks = [chunk async for chunk in chunks_of(inputs, has_plan=True)]

    assert times(chunks) == [(1, 2)]
