from __future__ import annotations

import pytest

from omni_bus.core.restart import FIRST_DELAY_S, MAX_DELAY_S, SECOND_DELAY_S, WINDOW_S, RestartPolicy


def test_first_restart_comes_soon_and_then_the_delay_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy(max_restarts=10)

    delays = [policy.on_death(float(i), jitter=0.5) for i in range(10)]

    assert delays[:4] == [FIRST_DELAY_S, SECOND_DELAY_S, 2 * SECOND_DELAY_S, 4 * SECOND_DELAY_S]
    assert delays[-1] == MAX_DELAY_S


def test_delay_has_the_limit_that_it_is_given_however_often_a_process_dies() -> None:
    policy = RestartPolicy(max_restarts=1_000_000, max_delay_s=1.0)

    assert {policy.on_death(float(i) / 10, jitter=0.5) for i in range(5000)} == {0.1, 0.5, 1.0}


@pytest.mark.parametrize(("jitter", "factor"), [(0.0, 0.75), (0.5, 1.0), (0.999, 1.2495)])
def test_jitter_spreads_over_half_the_delay(jitter: float, factor: float) -> None:
    assert RestartPolicy(1).on_death(0.0, jitter) == pytest.approx(FIRST_DELAY_S * factor)


def test_used_up_budget_restarts_no_more() -> None:
    policy = RestartPolicy(max_restarts=2)

    assert [policy.on_death(float(i), 0.5) is None for i in range(4)] == [False, False, True, True]


def test_no_budget_never_restarts() -> None:
    assert RestartPolicy(max_restarts=0).on_death(0.0, 0.5) is None


def test_old_deaths_are_forgotten() -> None:
    policy = RestartPolicy(max_restarts=1)
    policy.on_death(0.0, 0.5)

    assert policy.on_death(WINDOW_S, 0.5) is None
    assert policy.on_death(WINDOW_S + 1, 0.5) == FIRST_DELAY_S
