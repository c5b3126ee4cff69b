"""Shares, order, and who makes room."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_bus.core.fairness import Applicant, FairQueue

NOBODY = frozenset[str]()
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0, "": 1.0}


def queue_of(*requests: str, priority: int = 0, max_requests: int = 1000) -> FairQueue:
    """Each request's caller is its first letter."""
    queue = FairQueue(max_requests, 1 << 30)
    for request in requests:
        queue.push(Applicant(request, request[0], priority, WEIGHTS.get(request[0], 1.0)))
    return queue


def all_of(queue: FairQueue, held=NOBODY) -> list[str]:
    order = []
    while (request := queue.pop(held.__contains__)) is not None:
        order.append(request)
    return order


def turns_of(queue: FairQueue, num_turns: int) -> list[str]:
    """The callers that have the next turns."""
    found = [queue.pop(NOBODY.__contains__) for _ in range(num_turns)]
    return [request[0] for request in found if request is not None]


# --- order --------------------------------------------------------------------------------------------------


def test_one_callers_requests_keep_their_order():
    assert all_of(queue_of("x1", "x2", "x3")) == ["x1", "x2", "x3"]


def test_equal_callers_take_turns_however_many_one_has():
    assert all_of(queue_of("x1", "x2", "x3", "x4", "y1", "y2")) == ["x1", "y1", "x2", "y2", "x3", "x4"]


def test_weights_are_the_shares_of_turns():
    queue = queue_of(*(f"{caller}{i}" for caller in "abc" for i in range(70)))

    assert Counter(turns_of(queue, 70)) == {"a": 10, "b": 20, "c": 40}


def test_higher_priority_goes_first_whoever_asks():
    queue = queue_of("x1", "y1")
    for request in ("x2", "x3"):
        queue.push(Applicant(request, "x", priority=5))
    queue.push(Applicant("z1", "z", priority=-1))

    assert all_of(queue) == ["x2", "x3", "x1", "y1", "z1"]


def test_idle_caller_gains_no_credit():
    queue = queue_of(*(f"x{i}" for i in range(100)))
    for _ in range(50):
        queue.pop(NOBODY.__contains__)
    for i in range(10):
        queue.push(Applicant(f"y{i}", "y"))

    assert Counter(turns_of(queue, 10)) == {"x": 5, "y": 5}, "fifty turns missed are not made up for"


def test_who_comes_one_by_one_pays_for_what_it_had():
    """A caller that never has two requests in line gets its share, not every other turn's head start."""
    queue = queue_of(*(f"x{i}" for i in range(100)), *(f"y{i}" for i in range(100)))
    queue.push(Applicant("z", "z"))
    turns = Counter()
    for i in range(90):
        request = queue.pop(NOBODY.__contains__)
        assert request is not None
        turns[request[0]] += 1
        if request[0] == "z":
            queue.push(Applicant(f"z{i}", "z"))

    assert turns == {"x": 30, "y": 30, "z": 30}


def test_giving_up_costs_a_caller_nothing():
    queue = queue_of("x1", "x2", "x3", "x4", "y1", "y2", "y3")
    assert queue.discard("x1")
    assert queue.discard("x2")
    assert not queue.discard("x2")

    assert all_of(queue) == ["x3", "y1", "x4", "y2", "y3"]


def test_held_caller_is_passed_over_until_released():
    queue = queue_of("x1", "x2", "y1")
    queue.push(Applicant("x0", "x", priority=1))

    assert all_of(queue, frozenset("x")) == ["y1"]
    assert queue.pop(NOBODY.__contains__) is None, "who is held comes back by `release` only"
    queue.release("x")
    assert all_of(queue) == ["x0", "x1", "x2"]


def test_time_while_held_counts_as_idle():
    queue = queue_of("x1", "x2", "x3", "x4", *(f"y{i}" for i in range(20)))
    for _ in range(10):
        queue.pop(frozenset("x").__contains__)
    queue.release("x")

    assert [request[0] for request in all_of(queue)[:6]] == ["x", "y", "x", "y", "x", "y"]


def test_newcomer_of_a_held_caller_is_held_too():
    queue = queue_of("x1")
    assert queue.pop(frozenset("x").__contains__) is None
    assert queue.discard("x1")
    queue.push(Applicant("x2", "x"))

    assert queue.pop(frozenset("x").__contains__) is None
    queue.release("x")
    assert all_of(queue) == ["x2"]


def test_who_is_back_goes_ahead_of_its_priority_and_pays_nothing():
    queue = queue_of("x1", "y1", "x2", "y2", "x3", "y3")
    assert [queue.pop(NOBODY.__contains__) for _ in range(2)] == ["x1", "y1"]
    queue.push(Applicant("z", "z", priority=1))
    for request in ("y1", "x1", "x0"):
        queue.push(Applicant(request, request[0]), is_back=True)

    assert all_of(queue) == ["z", "y1", "x1", "x0", "x2", "y2", "x3", "y3"]


def test_who_is_back_waits_for_its_callers_own_limit_and_gives_way_to_nobody():
    queue = queue_of("y1", max_requests=2)
    for request in ("x1", "x2"):
        queue.push(Applicant(request, "x"), is_back=True)

    assert queue.outsider(Applicant("y2", "y")) is None
    assert queue.outsider(Applicant("z1", "z", priority=1)) == "y1"
    assert all_of(queue, frozenset("x")) == ["y1"]
    queue.release("x")
    assert all_of(queue) == ["x1", "x2"]
    assert not queue._levels


# --- room ---------------------------------------------------------------------------------------------------


def test_places_and_bytes_are_limited():
    queue = FairQueue(max_requests=2, max_bytes=100)
    queue.push(Applicant("x1", "x", num_bytes=60))

    assert queue.fits(Applicant("x2", "x", num_bytes=40))
    assert not queue.fits(Applicant("x2", "x", num_bytes=41))
    queue.push(Applicant("x2", "x", num_bytes=0))
    assert not queue.fits(Applicant("x3", "x", num_bytes=0))
    queue.discard("x1")
    assert queue.num_bytes == 0
    assert queue.fits(Applicant("x3", "x", num_bytes=100))


def test_caller_that_holds_most_gives_its_newest_place():
    queue = queue_of("x1", "x2", "x3", "y1", max_requests=4)

    assert queue.outsider(Applicant("z1", "z")) == "x3"
    assert queue.outsider(Applicant("y2", "y")) == "x3"
    assert queue.outsider(Applicant("x4", "x")) is None, "nobody makes room for itself"


def test_no_place_changes_hands_between_equals():
    queue = queue_of("x1", "x2", "y1", "y2", max_requests=4)

    for caller in "xy":
        assert queue.outsider(Applicant("n", caller)) is None
    assert queue_of("x1", "x2", "y1", max_requests=3).outsider(Applicant("y2", "y")) is None, "it would come back"


def test_weight_counts_for_places_too():
    queue = queue_of("a1", "a2", "c1", "c2", "c3", "c4", max_requests=6)

    assert queue.outsider(Applicant("c5", "c", weight=4.0)) == "a2"
    assert queue.outsider(Applicant("a3", "a", weight=1.0)) is None


def test_higher_priority_takes_a_place_of_the_lowest():
    queue = queue_of("x1", "x2", max_requests=3)
    queue.push(Applicant("y1", "y", priority=-1))

    assert queue.outsider(Applicant("x3", "x", priority=3)) == "y1"
    queue.discard("y1")
    queue.push(Applicant("x3", "x", priority=3))
    assert queue.outsider(Applicant("x4", "x", priority=3)) == "x2"
    assert queue.outsider(Applicant("y1", "y", priority=-1)) is None


def test_bytes_are_held_too():
    queue = FairQueue(max_requests=10, max_bytes=100)
    queue.push(Applicant("x1", "x", num_bytes=90))

    assert queue.outsider(Applicant("y1", "y", num_bytes=50)) == "x1"
    assert queue.outsider(Applicant("y1", "y", num_bytes=95)) is None, "it would hold more"
    queue.push(Applicant("x2", "x", num_bytes=5))
    assert queue.outsider(Applicant("y1", "y", num_bytes=50)) is None, "one place would not be enough"


def test_queue_without_places_takes_nobody():
    queue = FairQueue(0, 0)

    assert not queue.fits(Applicant("x"))
    assert queue.outsider(Applicant("x")) is None


def test_queue_that_empties_holds_nothing():
    queue = FairQueue(100, 100)
    for number in range(10_000):
        queue.push(Applicant(f"r{number}", f"caller{number}", priority=number % 3))
        if number % 2:
            queue.pop((lambda _: False) if number % 5 else (lambda _: True))
        queue.discard(f"r{number}")
        queue.discard(f"r{number - 1}")

    for request in list(queue._flow_of):
        queue.discard(request)
    tables = (queue._flows, queue._flow_of, queue._levels, queue._held, queue._turns._tickets, queue._crowds._tickets)
    assert [len(table) for table in tables] == [0] * len(tables)
    assert queue.num_bytes == 0
    assert len(queue._turns._heap) < 50
    assert len(queue._crowds._heap) < 50


def test_finish_tags_of_many_callers_stay_bounded():
    queue = queue_of(*(f"x{i}" for i in range(900)))
    for number in range(20_000):
        queue.push(Applicant(f"r{number}", f"caller{number}"))
        queue.discard(f"r{number}") if number % 2 else queue.pop(NOBODY.__contains__)

    assert len(queue._levels[0].finished) <= 4096


# --- properties ---------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    weights=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10.0), min_size=2),
    num_turns=st.integers(1, 200),
)
def test_shares_follow_the_weights_within_one_request_each(weights, num_turns):
    """Goyal, Vin, Cheng, theorem 1: service by weight of two callers that both wait differs by one request of each."""
    queue = FairQueue(10_000, 0)
    for caller, weight in weights.items():
        for i in range(num_turns):
            queue.push(Applicant(f"{caller}{i}", caller, 0, weight))
    turns = Counter(dict.fromkeys(weights, 0))
    for _ in range(num_turns):
        request = queue.pop(NOBODY.__contains__)
        assert request is not None
        turns[request[0]] += 1
        for one in weights:
            for other in weights:
                apart = abs(turns[one] / weights[one] - turns[other] / weights[other])
                assert apart <= 1 / weights[one] + 1 / weights[other] + 1e-6


@settings(max_examples=200)
@given(
    arrivals=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), max_size=120),
    weights=st.fixed_dictionaries({caller: st.floats(0.1, 10.0) for caller in "abcd"}),
)
def test_nobody_starves_within_a_priority(arrivals, weights):
    """A request waits for those of its own line, and of others for about what their weight gives them meanwhile."""
    queue, turns, asked = FairQueue(10_000, 0), Counter(), {}
    for number, (caller, num_pops) in enumerate(arrivals):
        request = f"{caller}{number}"
        asked[request] = (queue.num_before(caller, 0), Counter(turns))
        queue.push(Applicant(request, caller, 0, weights[caller]))
        for _ in range(num_pops):
            if (popped := queue.pop(NOBODY.__contains__)) is not None:
                _assert_waited_fairly(popped, asked, turns, weights)
    while (popped := queue.pop(NOBODY.__contains__)) is not None:
        _assert_waited_fairly(popped, asked, turns, weights)
    assert turns.total() == len(arrivals), "everybody ran"


def _assert_waited_fairly(request, asked, turns, weights):
    caller = request[0]
    num_before, then = asked[request]
    for other in weights:
        if other != caller:
            assert turns[other] - then[other] <= (num_before + 1) * weights[other] / weights[caller] + 2 + 1e-6
    turns[caller] += 1


class Machine(RuleBasedStateMachine):
    """Against a queue that is obvious: lists, searched from end to end."""

    def __init__(self):
        super().__init__()
        self.queue = FairQueue(6, 100)
        self.waiting: list[Applicant] = []
        self.back: list[Applicant] = []
        self.held: set[str] = set()
        self.number = 0

    @rule(caller=st.sampled_from("abc"), priority=st.integers(-1, 1), num_bytes=st.sampled_from([0, 10, 40, 101]))
    def come(self, caller, priority, num_bytes):
        self.number += 1
        newcomer = Applicant(f"{caller}{self.number}", caller, priority, WEIGHTS[caller], num_bytes)
        fits = len(self.waiting) < 6 and sum(one.num_bytes for one in self.waiting) + num_bytes <= 100
        assert self.queue.fits(newcomer) == fits
        if not fits:
            outsider = self.queue.outsider(newcomer)
            if outsider is None:
                return
            (victim,) = [one for one in self.waiting if one.request == outsider]
            here = [one for one in self.waiting if one not in self.back]
            assert victim.priority == min(one.priority for one in here)
            assert victim == [one for one in here if one[1:3] == victim[1:3]][-1], "not its flow's newest"
            assert newcomer.priority > victim.priority or newcomer.caller != victim.caller
            self.queue.discard(outsider)
            self.waiting.remove(victim)
            assert self.queue.fits(newcomer) or self.back
        self.queue.push(newcomer)
        self.waiting.append(newcomer)

    @rule(caller=st.sampled_from("abc"), priority=st.integers(-1, 1))
    def come_back(self, caller, priority):
        """Whoever is back is the oldest of its flow; limits are not asked."""
        self.number += 1
        one = Applicant(f"{caller}{self.number}", caller, priority, WEIGHTS[caller], 1)
        self.queue.push(one, is_back=True)
        self.back.append(one)
        self.waiting.append(one)

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def give_up(self, data):
        one = data.draw(st.sampled_from(self.waiting))
        assert self.queue.discard(one.request)
        self.waiting.remove(one)

    @rule()
    def pop(self):
        request = self.queue.pop(self.held.__contains__)
        free = [one for one in self.waiting if one.caller not in self.held]
        if not free:
            assert request is None
            return
        (popped,) = [one for one in free if one.request == request]
        assert popped.priority == max(one.priority for one in free)
        back = [one for one in free if one in self.back and one.priority == popped.priority]
        assert not back or popped in back
        here = back or free
        assert popped == next(one for one in here if one[1:3] == popped[1:3]), "not its flow's oldest"
        self.waiting.remove(popped)

    @rule(caller=st.sampled_from("abc"))
    def hold(self, caller):
        self.held.add(caller)

    @rule(caller=st.sampled_from("abc"))
    def release(self, caller):
        self.held.discard(caller)
        self.queue.release(caller)

    @invariant()
    def counts_agree(self):
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_bytes == sum(one.num_bytes for one in self.waiting)
        assert all(one.request in self.queue for one in self.waiting)
        assert {level: found.num_flows for level, found in self.queue._levels.items()} == Counter(
            priority for priority, _, _ in {(one.priority, one.caller, one in self.back) for one in self.waiting}
        )

    @invariant()
    def no_tag_is_behind_its_time(self):
        for flow in self.queue._flows.values():
            is_held = flow.key in self.queue._held.get(flow.caller, {})
            assert flow.is_back or is_held or flow.start >= self.queue._levels[flow.priority].time


TestFairQueue = Machine.TestCase
TestFairQueue.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("num_callers", [1, 10, 1000])
def test_memory_is_that_of_who_waits(num_callers):
    queue = FairQueue(1000, 0)
    for number in range(50_000):
        queue.push(Applicant(f"r{number}", f"caller{number % num_callers}"))
        if number >= 500:
            queue.discard(f"r{number - 500}")

    assert len(queue) == 500
    assert len(queue._turns._heap) <= 2 * 500 + 17
    assert len(queue._crowds._heap) <= 2 * 500 + 17
