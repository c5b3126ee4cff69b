from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from adapters.diffusion.batching import Waiting, choose

units = st.lists(
    st.builds(
        Waiting,
        request=st.uuids().map(str),
        key=st.sampled_from([None, "a", "b", "c"]),
        priority=st.integers(-2, 2),
        num_passed_over=st.integers(0, 12),
    ),
    max_size=12,
    unique_by=lambda unit: unit.request,
)
limits = st.fixed_dictionaries({"max_batch": st.integers(1, 6), "max_passed_over": st.integers(1, 10)})


@given(units, limits)
def test_a_batch_has_one_key_and_keeps_the_limit(waiting: list[Waiting], limits: dict[str, Any]) -> None:
    chosen = choose(waiting, **limits)
    by_request = {unit.request: unit for unit in waiting}
    keys = [by_request[request].key for request in chosen]

    assert bool(chosen) == bool(waiting)
    assert len(set(chosen)) == len(chosen) <= limits["max_batch"]
    assert len(chosen) <= 1 or (len(set(keys)) == 1 and keys[0] is not None)


@given(units, limits)
def test_a_batch_is_as_large_as_it_can_be(waiting: list[Waiting], limits: dict[str, Any]) -> None:
    chosen = choose(waiting, **limits)
    keys = {unit.request: unit.key for unit in waiting}

    if chosen and (key := keys[chosen[0]]) is not None:
        assert len(chosen) == min(limits["max_batch"], sum(other == key for other in keys.values()))


@given(units, limits)
def test_first_is_overdue_or_of_the_highest_priority(waiting: list[Waiting], limits: dict[str, Any]) -> None:
    chosen = choose(waiting, **limits)
    if not chosen:
        return
    first = next(unit for unit in waiting if unit.request == chosen[0])
    overdue = [unit for unit in waiting if unit.num_passed_over >= limits["max_passed_over"]]

    if overdue:
        assert first.num_passed_over == max(unit.num_passed_over for unit in overdue)
    else:
        assert first.priority == max(unit.priority for unit in waiting)


@given(units, limits)
def test_nobody_waits_longer_than_was_promised(waiting: list[Waiting], limits: dict[str, Any]) -> None:
    """Whoever runs has a new unit at once, which is the worst case for the others."""
    bound = limits["max_passed_over"] + len(waiting)
    ages = {unit.request: 0 for unit in waiting}
    for _ in range(3 * bound):
        now = [Waiting(unit.request, unit.key, unit.priority, ages[unit.request]) for unit in waiting]
        chosen = choose(now, **limits)
        ages = {request: 0 if request in chosen else age + 1 for request, age in ages.items()}
        assert all(age <= bound for age in ages.values())


def test_units_that_run_alone_go_before_a_batch_of_their_priority() -> None:
    waiting = [Waiting("a", "key"), Waiting("b", "key"), Waiting("new", None)]

    assert choose(waiting, max_batch=8, max_passed_over=10) == ["new"]
    assert choose([*waiting, Waiting("c", "key", priority=1)], max_batch=2, max_passed_over=10) == ["c", "a"]
