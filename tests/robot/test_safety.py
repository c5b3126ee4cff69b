"""What is refused instead of served or sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adapters.robot.safety import Freshness, RateLimit, check_actions, check_finite, number_at
from omni_bus.errors import BadInput, QuotaExceeded, StageFailed


def test_rate_allows_a_burst_and_then_its_pace() -> None:
    rate = RateLimit(10.0, burst=2)
    rate.spend(0.0)
    rate.spend(0.0)
    with pytest.raises(QuotaExceeded, match="faster than 10 a second") as refused:
        rate.spend(0.0)
    assert refused.value.retry_after_s == pytest.approx(0.1)

    rate.spend(0.1)
    with pytest.raises(QuotaExceeded):
        rate.spend(0.15)
    rate.spend(10.0)
    rate.spend(10.0)
    with pytest.raises(QuotaExceeded):
        rate.spend(10.0)


def test_numbers_must_grow() -> None:
    freshness = Freshness("n", "", None)
    freshness.check({"n": 3}, 0.0)
    freshness.check({"n": np.int64(4)}, 0.0)
    freshness.check({"n": np.array([6])}, 0.0)

    for stale in (6, 5):
        with pytest.raises(BadInput, match=f"a stale observation, number {stale} came after 6"):
            freshness.check({"n": stale}, 0.0)
    with pytest.raises(BadInput, match="n: nothing came"):
        freshness.check({}, 0.0)


def test_old_observations_are_stale() -> None:
    freshness = Freshness("", "at", 0.5)
    freshness.check({"at": 100.0}, 100.4)

    with pytest.raises(BadInput, match=r"at: a stale observation, 0.600 s old .allowed: at most 0.5 s"):
        freshness.check({"at": 100.0}, 100.6)


@pytest.mark.parametrize("value", ["x", None, True, float("nan"), np.zeros(2), np.array(["a"])])
def test_number_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match=r"n: a .* came"):
        number_at({"n": value}, "n")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"state": np.array([1, np.nan], np.float32)}, "state"),
        ({"state": np.array([np.inf])}, "state"),
        ({"a": {"b": [1.0, float("nan")]}}, "a.b"),
        ({"a": np.float16("nan")}, "a"),
    ],
)
def test_nan_is_refused_by_its_key(values: Any, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_finite(values)
    assert refused.value.field == field


def test_finite_values_of_every_type_pass() -> None:
    check_finite({"a": np.zeros(3), "b": "nan", "c": [1, None, b"x"], "d": np.array(["x"]), "e": np.zeros(0)})


OK = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("actions", "low", "high", "why"),
    [
        ({}, (), (), "shape none"),
        ({"actions": np.zeros(3)}, (), (), r"shape \(3,\)"),
        ({"actions": OK, "more": np.array([np.nan])}, (), (), "NaN or infinity in 'more': not sent"),
        ({"actions": OK - 2}, (-1.0,), (), "-2 for dimension 0 of step 0, below -1: not sent"),
        ({"actions": OK + np.array([0, 0, 5])}, (), (9, 9, 4), "5 for dimension 2 of step 0, above 4"),
        ({"actions": OK}, (0.0, 0.0), (), "3 dimensions, their limits 2"),
    ],
)
def test_actions_that_no_robot_should_execute_are_not_sent(actions: Any, low: Any, high: Any, why: str) -> None:
    with pytest.raises(StageFailed, match=why):
        check_actions(actions, low, high)
    check_actions({"actions": OK, "more": np.arange(4)}, (0.0,), (0.0, 1.0, 2.0))
