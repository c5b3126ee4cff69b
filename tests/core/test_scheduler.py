import pytest

from omni_bus.core.scheduler import Counts, Scheduler


def scheduler_of(width: int, max_resident: int, *requests: str) -> Scheduler:
    scheduler = Scheduler(width, max_resident)
    for request in requests:
        scheduler.add(request, 0, None)
    return scheduler


def test_slots_go_in_order_of_arrival():
    scheduler = scheduler_of(2, 2, "a", "b", "c")

    assert scheduler.start() == ["a", "b"]
    assert scheduler.start() == []
    scheduler.remove("a")
    assert scheduler.start() == ["c"]


def test_priority_then_deadline_then_arrival_decide():
    scheduler = Scheduler(1, 1)
    scheduler.add("late", 0, 9.0)
    scheduler.add("never", 0, None)
    scheduler.add("soon", 0, 1.0)
    scheduler.add("urgent", 5, None)

    order = []
    for _ in range(4):
        order += scheduler.start()
        scheduler.remove(order[-1])
    assert order == ["urgent", "soon", "late", "never"]


@pytest.mark.parametrize("pause", ["suspend", "starve"])
def test_request_that_waits_gives_its_place_to_another(pause):
    scheduler = scheduler_of(1, 2, "a", "b", "c")
    scheduler.start()
    getattr(scheduler, pause)("a")

    assert scheduler.start() == ["b"]
    assert scheduler.batch() == ("b",)
    scheduler.starve("b")
    assert scheduler.start() == [], "every slot is taken"
    assert scheduler.batch() == ()


def test_resumed_and_woken_requests_take_part_again():
    scheduler = scheduler_of(2, 2, "a", "b")
    scheduler.start()
    scheduler.suspend("a")
    scheduler.starve("b")

    scheduler.resume("a")
    assert scheduler.batch() == ("a",)
    scheduler.wake("b")
    assert set(scheduler.batch()) == {"a", "b"}


def test_suspended_request_stays_out_when_woken():
    scheduler = scheduler_of(1, 1, "a")
    scheduler.start()
    scheduler.suspend("a")
    scheduler.starve("a")
    scheduler.wake("a")

    assert scheduler.batch() == ()


def test_batches_share_steps_evenly_among_equals():
    scheduler = scheduler_of(1, 3, "a", "b", "c")
    for request in "abc":
        scheduler.start()
        scheduler.suspend(request)
    for request in "abc":
        scheduler.resume(request)

    assert sorted(scheduler.batch()[0] for _ in range(3)) == ["a", "b", "c"]


def test_batch_has_at_most_width_requests_of_highest_priority():
    scheduler = Scheduler(2, 4)
    for number, request in enumerate("abcd"):
        scheduler.add(request, number, None)
        scheduler.start()
        scheduler.suspend(request)
    for request in "abcd":
        scheduler.resume(request)

    assert set(scheduler.batch()) == {"c", "d"}


def test_counts_tell_waiting_resident_suspended():
    scheduler = scheduler_of(2, 2, "a", "b", "c")
    scheduler.start()
    scheduler.suspend("a")

    assert scheduler.counts == Counts(1, 2, 1)
    assert scheduler.is_resident("a")
    assert not scheduler.is_resident("c")
    assert not scheduler.is_resident("unknown")


def test_removing_twice_frees_one_slot():
    scheduler = scheduler_of(1, 1, "a", "b", "c")
    scheduler.start()
    scheduler.remove("a")
    scheduler.remove("a")

    assert scheduler.start() == ["b"]
    assert scheduler.start() == []


def test_unknown_requests_are_ignored():
    scheduler = scheduler_of(1, 1)
    scheduler.remove("x")
    scheduler.starve("x")

    assert scheduler.batch() == ()
