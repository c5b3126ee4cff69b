import pytest

from omni_bus.core.effects import Report, SetTimer, Stall
from omni_bus.core.watchdog import WATCH, Watchdog


@pytest.fixture
def dog() -> Watchdog:
    watchdog = Watchdog("llm", 10.0)
    watchdog.watch(100.0)
    return watchdog


def test_one_timer_serves_all_that_is_begun():
    watchdog = Watchdog("llm", 10.0)

    assert watchdog.watch(100.0) == [SetTimer(WATCH, 110.0)]
    assert watchdog.watch(101.0) == []


def test_timer_moves_on_to_the_oldest_debt(dog):
    assert dog.on_timer(107.0, 110.0, is_idle=False) == [SetTimer(WATCH, 117.0)]
    assert dog.watch(111.0) == []


def test_engine_that_owes_nothing_is_watched_while_it_holds_something(dog):
    assert dog.on_timer(None, 110.0, is_idle=False) == [SetTimer(WATCH, 120.0)]


def test_idle_engine_has_no_timer_until_it_gets_work(dog):
    assert dog.on_timer(None, 110.0, is_idle=True) == []
    assert dog.watch(200.0) == [SetTimer(WATCH, 210.0)]


def test_stall_is_told_once_with_how_long_it_has_lasted(dog):
    report, stall = dog.on_timer(100.0, 110.5, is_idle=False)

    assert report == Report("engine stalled", {"stage": "llm", "for_s": 10.5})
    assert stall == Stall(10.5)
    assert dog.watch(111.0) == []


def test_limit_of_zero_watches_nothing():
    assert Watchdog("llm", 0.0).watch(100.0) == []
