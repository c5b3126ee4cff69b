from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.measures import METRICS
from omni_bus.bench.record import Record
from omni_bus.bench.summary import concurrency, distribution, max_concurrent, summarise, tokens_by_second


def record_of(index: int, sent_at: float, texts: list[float], ended_at: float, **fields) -> Record:
    told = {"output_tokens": len(texts), "tokens_from": "usage", "prompt_tokens": 10} | fields
    pieces = [(at, 4) for at in texts]
    return Record(index=index, intended_at=sent_at, sent_at=sent_at, ended_at=ended_at, texts=pieces, **told)


def records() -> list[Record]:
    """Two whole answers, two of one failure, one of another, one that was left; four seconds in all."""
    failed = [
        record_of(2, 1.0, [], 1.1, output_tokens=None, tokens_from="", failure="503 Busy", message="full"),
        record_of(3, 1.0, [1.2], 1.3, failure="503 Busy", message="fuller"),
        record_of(4, 1.0, [], 1.1, failure="timeout", message="late"),
    ]
    return [
        record_of(0, 0.0, [0.1, 0.3, 0.5], 0.6),
        record_of(1, 0.5, [0.9, 1.9], 2.0),
        *failed,
        record_of(5, 3.0, [3.5], 4.0, has_left=True),
    ]


def test_figures_of_a_phase() -> None:
    found = summarise(
        records(), label="load", names=["ttft", "tpot", "itl", "e2el"], percentiles=[50, 99], limits={"ttft": 200}
    )

    assert (found.num_requests, found.completed, found.failed, found.left) == (6, 2, 3, 1)
    assert {name: (one.count, one.message) for name, one in found.failures.items()} == {
        "503 Busy": (2, "full"),
        "timeout": (1, "late"),
    }
    assert found.duration_s == 4.0
    assert (found.input_tokens, found.output_tokens, found.tokens_from) == (20, 5, {"usage": 2})
    assert found.per_second(found.output_tokens) == 1.25
    assert found.good == 1
    assert found.times_from == {"client": 2}
    assert found.tokens_per_chunk == 1.0
    ttft, tpot, itl = (found.metrics[name] for name in ("ttft", "tpot", "itl"))
    assert (ttft.mean, ttft.median, ttft.min, ttft.max) == pytest.approx((250, 250, 100, 400))
    assert ttft.std == pytest.approx(150)
    assert ttft.percentiles[99] == pytest.approx(100 + 0.99 * 300)  # between neighbours, as numpy does by default
    assert tpot.mean == pytest.approx((200 + 1000) / 2)  # of requests
    assert (itl.count, itl.mean) == (3, pytest.approx((200 + 200 + 1000) / 3))  # of gaps


def test_phase_of_failures_only_has_no_figures() -> None:
    found = summarise(records()[2:5], label="load", names=list(METRICS), percentiles=[99], limits={})

    assert (found.completed, found.failed, found.metrics, found.good) == (0, 3, {}, None)
    assert (found.output_tokens, found.input_tokens, found.tokens_per_chunk) == (0, None, None)


def test_bundled_answers_are_counted_as_unmeasured() -> None:
    bundled = record_of(0, 0.0, [0.1], 0.2, output_tokens=4)
    found = summarise([bundled], label="load", names=["tpot", "ttft"], percentiles=[99], limits={"tpot": 1e9})

    assert (found.times_from, found.tokens_per_chunk, found.good) == ({"unmeasured": 1}, 4.0, 0)
    assert list(found.metrics) == ["ttft"]


def test_sound_is_added_up() -> None:
    spoken = [
        record_of(0, 0.0, [], 2.0, output_tokens=0, sounds=[(0.5, 1.0), (1.0, 1.0)]),
        record_of(1, 0.0, [], 4.0, output_tokens=0, sounds=[(0.5, 1.0), (3.0, 1.0)]),
    ]
    found = summarise(spoken, label="load", names=["audio_rtf"], percentiles=[99], limits={})

    assert (found.audio_s, found.num_gaps, found.continuous) == (4.0, 1, 1)
    assert found.metrics["audio_rtf"].mean == pytest.approx((1.0 / 2 + 3.0 / 2) / 2)


def test_concurrency_counts_what_is_under_way() -> None:
    found = records()

    assert concurrency(found[:2]) == [(0.0, 1), (0.5, 2), (0.6, 1), (2.0, 0)]
    assert max_concurrent(found) == 4


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 100)), max_size=30))
def test_concurrency_begins_and_ends_with_nothing(spans: list[tuple[float, float]]) -> None:
    found = concurrency([record_of(0, at, [], at + length) for at, length in spans])

    assert all(level >= 0 for _, level in found)
    assert not found or found[-1][1] == 0
    assert max((level for _, level in found), default=0) <= len(spans)


def test_tokens_of_bundles_are_spread_over_the_chunks() -> None:
    assert tokens_by_second([record_of(0, 0.0, [0.5, 2.5], 3.0, output_tokens=10)]) == [5.0, 0.0, 5.0]
    assert tokens_by_second([]) == []


def test_distribution_of_nothing_is_none() -> None:
    assert distribution([], [50]) is None
