"""Averages of chunks and joints between them, against the papers' formulas written out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.robot.chunks import Ensemble, Sent, join, soft_mask


def rows(*values: float) -> Any:
    return np.asarray(values, np.float32)[:, None]


def test_first_chunk_passes_unchanged() -> None:
    assert Ensemble(0.1).add(0, rows(1, 2, 3)).ravel().tolist() == [1, 2, 3]


def test_each_row_is_averaged_with_what_was_said_of_its_step_before() -> None:
    ensemble = Ensemble(0.5)
    ensemble.add(0, rows(0, 10, 20, 30))
    found = ensemble.add(2, rows(40, 60, 80, 100)).ravel()

    newer = math.exp(-0.5)  # the oldest has weight 1
    assert np.allclose(found, [(20 + newer * 40) / (1 + newer), (30 + newer * 60) / (1 + newer), 80, 100])


def test_chunk_that_is_over_counts_no_more() -> None:
    ensemble = Ensemble(0.0)
    ensemble.add(0, rows(1, 1))

    assert ensemble.add(2, rows(5, 5)).ravel().tolist() == [5, 5]


def test_chunk_of_another_width_is_not_mixed_in() -> None:
    ensemble = Ensemble(0.0)
    ensemble.add(0, np.ones((4, 3), np.float32))

    assert ensemble.add(1, rows(7, 8)).ravel().tolist() == [7, 8]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12),
    st.floats(-1, 1),
)
def test_ensemble_is_the_weighted_mean_of_all_predictions(steps: list[tuple[int, int]], coefficient: float) -> None:
    ensemble = Ensemble(coefficient)
    said: list[tuple[int, Any]] = []
    step, value = 0, 0.0
    for gap, length in steps:
        step += gap
        chunk = np.arange(value, value + length, dtype=np.float64)[:, None]
        value += 10
        said.append((step, chunk))
        found = ensemble.add(step, chunk)
        for row in range(length):
            now = step + row
            # A chunk whose last row was passed once is gone, also for later steps: it has none.
            about = [each[now - start, 0] for start, each in said if start <= step and 0 <= now - start < len(each)]
            weights = [math.exp(-coefficient * i) for i in range(len(about))]
            expected = sum(w * x for w, x in zip(weights, about, strict=True)) / sum(weights)
            assert math.isclose(found[row, 0], expected, rel_tol=1e-9, abs_tol=1e-9)


def test_mask_holds_what_is_executed_and_lets_go_after_the_overlap() -> None:
    weights = soft_mask(horizon=10, delay=3, overlap=7)

    assert weights[:3].tolist() == [1, 1, 1]
    assert weights[7:].tolist() == [0, 0, 0]
    for i in range(3, 7):
        c = (7 - i) / (7 - 3 + 1)
        assert math.isclose(weights[i], c * (math.e**c - 1) / (math.e - 1))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 40))
def test_mask_falls_from_one_to_zero(horizon: int, delay: int, overlap: int) -> None:
    weights = soft_mask(horizon, delay, overlap)

    assert len(weights) == horizon
    assert all(0 <= weight <= 1 for weight in weights)
    assert all(left >= right for left, right in itertools.pairwise(weights))
    assert all(weight == 1 for weight in weights[: min(delay, overlap)])


def test_joined_chunk_begins_as_the_last_goes_on_and_ends_as_its_own() -> None:
    joined = join(rows(1, 1, 1, 1), rows(9, 9, 9, 9, 9, 9), 2).ravel()

    assert joined[:2].tolist() == [1, 1]
    assert 1 < joined[2] < joined[3] < 9
    assert joined[4:].tolist() == [9, 9]
    assert join(rows(1, 1, 1, 1), rows(9, 9), 5).ravel().tolist() == [1, 1]


def test_rows_left_of_what_was_sent() -> None:
    sent = Sent()
    assert sent.left_at(0) is None
    sent.keep(10, rows(1, 2, 3))

    left = sent.left_at(11)
    assert left is not None
    assert left.ravel().tolist() == [2, 3]
    assert sent.left_at(9) is None
    assert sent.left_at(13) is None
