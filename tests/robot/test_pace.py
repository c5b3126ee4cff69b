from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.robot.pace import MAX_DENOISE_STEPS, NUM_REMEMBERED, SLACK_S, Pace


def pace_of(**measured: float) -> Pace:
    """A first step of 0.5 s and later ones of 0.1 s, of one row."""
    pace = Pace()
    pace.note(1, measured.get("first", 0.5), is_first=True)
    pace.note(1, measured.get("later", 0.1), is_first=False)
    return pace


def test_without_a_deadline_all_steps_are_made() -> None:
    assert pace_of().affordable(1, 0.0, None, is_first=True) == MAX_DENOISE_STEPS


def test_before_anything_was_measured_nothing_is_cut() -> None:
    assert Pace().affordable(1, 0.0, 1e-9, is_first=True) == MAX_DENOISE_STEPS


@pytest.mark.parametrize(
    ("deadline", "is_first", "steps"),
    [
        (1.0, False, 9),
        (1.0, True, 5),
        (0.16, False, 1),
        (0.0, False, 1),
        (-5.0, True, 1),
        (1e9, True, MAX_DENOISE_STEPS),
    ],
)
def test_what_fits_is_made_and_one_step_at_least(deadline: float, is_first: bool, steps: int) -> None:  # noqa: FBT001
    assert pace_of().affordable(1, 0.0, deadline, is_first=is_first) == steps


def test_slow_step_is_remembered_for_a_while() -> None:
    pace = pace_of()
    pace.note(1, 1.0, is_first=False)
    assert pace.affordable(1, 0.0, 2.0, is_first=False) == 1
    for _ in range(NUM_REMEMBERED):
        pace.note(1, 0.1, is_first=False)
    assert pace.affordable(1, 0.0, 2.0, is_first=False) == 19


def test_larger_batches_are_expected_to_take_longer_until_measured() -> None:
    pace = pace_of()
    assert pace.affordable(4, 0.0, 2.0, is_first=False) == 4
    pace.note(4, 0.1, is_first=False)
    assert pace.affordable(4, 0.0, 2.0, is_first=False) == 19


@given(
    first=st.floats(0.001, 1),
    later=st.floats(0.001, 1),
    left=st.floats(0.01, 100),
    wanted=st.integers(1, MAX_DENOISE_STEPS),
)
def test_steps_that_take_what_was_measured_end_in_time_or_are_one(
    first: float, later: float, left: float, wanted: int
) -> None:
    """A robot's loop, planned anew before each step as the policies do."""
    first += later
    pace = pace_of(first=first, later=later)
    now, num_left, num_made = 0.0, wanted, 0
    while num_left:
        num_left = min(num_left, pace.affordable(1, now, left, is_first=not num_made))
        now += later if num_made else first
        num_left, num_made = num_left - 1, num_made + 1

    assert num_made <= wanted
    assert num_made == 1 or now <= left - SLACK_S + 1e-9
    if num_made < wanted:  # not cut without need: another step and a half would have been late
        assert now + later * 1.5 > left - SLACK_S - 1e-9
