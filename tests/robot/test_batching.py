"""When a batch begins and who is in it, with a clock that is passed in."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.robot.batching import MARGIN_S, Batcher, Durations, Rhythm, Waiting


def waiting(robot: str, at: float, deadline: float | None = None, shape: Any = "s") -> Waiting[str]:
    return Waiting(robot, robot, shape, at, deadline)


def with_rhythm(period_s: float, robots: str, max_batch_size: int = 16, max_wait_s: float = 0.02) -> Batcher[str]:
    """A batcher that knows these robots, who all sent at -period and at 0."""
    batcher: Batcher[str] = Batcher(max_batch_size, max_wait_s)
    for at in (-period_s, 0.0):
        for robot in robots:
            batcher.add(waiting(robot, at))
        batcher.take()
    return batcher


def test_lone_robot_never_waits() -> None:
    batcher = with_rhythm(0.1, "a")
    assert batcher.due_at(0.1) is None

    batcher.add(waiting("a", 0.1))

    assert batcher.due_at(0.1) == 0.1


def test_robot_waits_for_another_that_is_expected_until_it_comes() -> None:
    batcher = with_rhythm(0.1, "ab")
    batcher.add(waiting("a", 0.1))
    due = batcher.due_at(0.1)
    assert due is not None
    assert math.isclose(due, 0.12)

    batcher.add(waiting("b", 0.105))

    assert batcher.due_at(0.105) == 0.105
    assert [each.robot for each in batcher.take()] == ["a", "b"]


def test_robot_that_waited_for_a_batch_waits_for_those_whom_it_answered() -> None:
    batcher = with_rhythm(0.1, "ab")
    batcher.add(waiting("a", 0.05))
    batcher.free(0.09)

    due = batcher.due_at(0.09)

    assert due is not None
    assert math.isclose(due, 0.11)  # b is expected at 0.1
    batcher.add(waiting("b", 0.095))
    assert batcher.due_at(0.095) == 0.095


def test_nobody_waits_for_a_robot_that_is_due_later_or_has_gone() -> None:
    batcher = with_rhythm(0.1, "ab")
    batcher.add(waiting("a", 0.05))
    assert batcher.due_at(0.05) == 0.05  # b is due in 50 ms

    batcher = with_rhythm(0.1, "ab")
    batcher.add(waiting("a", 0.13))
    assert batcher.due_at(0.13) == 0.13  # b should have come 30 ms ago

    batcher = with_rhythm(0.1, "ab")
    batcher.leave("b")
    batcher.add(waiting("a", 0.1))
    assert batcher.due_at(0.1) == 0.1


def test_full_batch_begins_at_once() -> None:
    batcher = with_rhythm(0.1, "abc", max_batch_size=2)
    batcher.add(waiting("a", 0.1))
    batcher.add(waiting("b", 0.1))

    assert batcher.due_at(0.1) == 0.1


def test_window_ends_in_time_for_the_nearest_deadline() -> None:
    batcher = with_rhythm(0.1, "abc")
    batcher.durations.add(3, 0.03)
    batcher.add(waiting("a", 0.1, deadline=1.0))
    batcher.add(waiting("b", 0.1, deadline=0.14))

    due = batcher.due_at(0.1)

    assert due is not None
    assert math.isclose(due, 0.14 - 0.03 - MARGIN_S)


def test_late_deadline_begins_at_once() -> None:
    batcher = with_rhythm(0.1, "ab")
    batcher.add(waiting("a", 0.1, deadline=0.09))

    assert batcher.due_at(0.1) == 0.1


def test_nearest_deadlines_go_first_then_who_came_first() -> None:
    batcher: Batcher[str] = Batcher(2, 0.0)
    for each in (waiting("a", 1.0), waiting("b", 2.0, 9.0), waiting("c", 3.0, 8.0), waiting("d", 0.5)):
        batcher.add(each)

    assert [each.robot for each in batcher.take()] == ["c", "b"]
    assert [each.robot for each in batcher.take()] == ["d", "a"]


def test_what_can_not_be_stacked_goes_in_another_batch() -> None:
    batcher: Batcher[str] = Batcher(8, 0.0)
    for i, shape in enumerate(["small", "large", "small"]):
        batcher.add(waiting(f"r{i}", i, shape=shape))

    assert [each.robot for each in batcher.take()] == ["r0", "r2"]
    assert [each.robot for each in batcher.take()] == ["r1"]


def test_robot_is_in_a_batch_once() -> None:
    batcher: Batcher[str] = Batcher(8, 0.0)
    first, second = waiting("a", 0.0), waiting("a", 1.0)
    batcher.add(first)
    batcher.add(second)

    assert batcher.take() == [first]
    batcher.drop(first)
    batcher.drop(second)
    assert len(batcher) == 0


def test_durations_are_those_of_the_next_larger_size_seen() -> None:
    durations = Durations()
    assert durations.expected_s(1) == 0.0
    durations.add(1, 0.01)
    durations.add(8, 0.04)

    assert durations.expected_s(1) == 0.01
    assert durations.expected_s(2) == 0.04
    assert durations.expected_s(99) == 0.04
    durations.add(8, 0.08)
    assert 0.04 < durations.expected_s(8) < 0.08


def test_rhythm_is_unknown_before_two_observations() -> None:
    rhythm = Rhythm()
    assert rhythm.due_at is None
    rhythm.arrive(1.0)
    assert rhythm.due_at is None
    rhythm.arrive(1.5)
    assert rhythm.due_at == 2.0


events = st.lists(
    st.tuples(
        st.sampled_from("abcdefg"),
        st.floats(0, 0.05),
        st.none() | st.floats(0, 0.1),
        st.sampled_from(["x", "y"]),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(events, st.integers(1, 5), st.floats(0, 0.05), st.floats(0, 0.03))
def test_whatever_comes_no_window_is_overstayed_and_nothing_is_lost(
    events: list[tuple[str, float, float | None, str]], size: int, wait_s: float, policy_s: float
) -> None:
    """A policy that takes `policy_s` serves every observation once, in stackable batches within the limits."""
    batcher: Batcher[int] = Batcher(size, wait_s)
    now = free_at = 0.0
    added: list[int] = []
    served: list[int] = []

    def run_until(until: float) -> None:
        nonlocal free_at
        at = max(now, free_at)
        while (due := batcher.due_at(at)) is not None and max(due, free_at) <= until:
            begin = max(due, free_at)
            batch = batcher.take()
            assert 1 <= len(batch) <= size
            assert len({each.shape for each in batch}) == 1
            assert len({each.robot for each in batch}) == len(batch)
            oldest = min(each.arrived_at for each in batch)
            assert begin <= max(at, max(free_at, oldest) + wait_s) + 1e-9
            served.extend(each.item for each in batch)
            batcher.durations.add(len(batch), policy_s)
            at = free_at = begin + policy_s
            batcher.free(free_at)

    for i, (robot, gap, deadline_s, shape) in enumerate(events):
        run_until(now + gap)
        now += gap
        added.append(i)
        batcher.add(Waiting(i, robot, shape, now, None if deadline_s is None else now + deadline_s))
    run_until(math.inf)

    assert sorted(served) == added
    assert len(batcher) == 0
