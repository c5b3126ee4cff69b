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


def test_places_of_those_who_left_do_not_pile_up():
    scheduler = scheduler_of(1, 1, "held")
    scheduler.start()
    for number in range(1000):
        scheduler.add(f"r{number}", 0, None)
        scheduler.remove(f"r{number}")

    assert len(scheduler._waiting) <= 17


def test_request_added_again_waits_at_its_new_place():
    scheduler = scheduler_of(1, 1, "held", "a", "b")
    scheduler.start()
    scheduler.remove("a")
    scheduler.add("a", 0, None)
    scheduler.remove("held")

    assert scheduler.start() == ["b"]


def test_counts_follow_repeated_suspensions_and_removal():
    scheduler = scheduler_of(2, 2, "a", "b")
    scheduler.start()
    scheduler.suspend("a")
    scheduler.suspend("a")
    scheduler.suspend("b")
    assert scheduler.counts == Counts(0, 2, 2)

    scheduler.resume("a")
    scheduler.resume("a")
    scheduler.remove("b")
    assert scheduler.counts == Counts(0, 1, 0)


class CountingKeys(dict):
    """Counts how many entries somebody looks at one by one."""

    def __init__(self, items):
        super().__init__(items)
        self.num_walks = 0

    def items(self):
        self.num_walks += 1
        return super().items()

    def values(self):
        self.num_walks += 1
        return super().values()

    def __iter__(self):
        self.num_walks += 1
        return super().__iter__()


def test_starting_and_counting_never_walk_over_all_requests():
    scheduler = scheduler_of(4, 100, *(f"r{number}" for number in range(100)))
    entries = scheduler._entries = CountingKeys(scheduler._entries)

    for request in scheduler.start():
        scheduler.suspend(request)
        scheduler.start()
        scheduler.batch()
        scheduler.resume(request)
    assert scheduler.counts.resident == 5
    assert entries.num_walks == 0
