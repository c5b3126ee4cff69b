from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_bus.core import admission as admission_module
from omni_bus.core.admission import Admission, AdmissionCounts
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.quota import Quota
from omni_bus.errors import BadInput, DeadlineExceeded, OmniBusError, Overloaded, QuotaExceeded
from omni_bus.wire.frames import Submit


class Door:
    """An admission, and a clock."""

    def __init__(self, max_in_flight: int, max_queued: int, *, max_queued_bytes=1000, quotas=None):
        pipeline = Pipeline("p", "p", (), (), frozenset(), max_in_flight, max_queued, None, max_queued_bytes)
        self.admission = Admission(pipeline, quotas)
        self.now = 0.0

    def offer(self, request: str, *, timeout_s: float | None = None, **fields: Any):
        return self.admission.offer(Submit(request, "p", (), **fields), timeout_s, self.now)

    def runs(self, *requests: str, **fields: Any) -> list[bool]:
        return [self.offer(request, **fields).may_run for request in requests]

    def leave(self, *requests: str) -> list[str]:
        """Let requests go; return who runs instead."""
        for request in requests:
            self.admission.leave(request, self.now)
        admitted = []
        while (request := self.admission.next(self.now)) is not None:
            admitted.append(request)
        return admitted

    def row(self, caller: str) -> dict[str, Any]:
        (row,) = [row for row in self.admission.callers() if row["caller"] == caller]
        return row


# --- the pipeline's limits ----------------------------------------------------------------------------------


def test_requests_run_up_to_the_limit_then_wait():
    door = Door(2, 1)

    assert door.runs("a", "b") == [True, True]
    assert door.runs("c", input_bytes=7) == [False]
    assert door.admission.counts == AdmissionCounts(2, 2, 1, 1, 7, 1000)


def test_full_queue_refuses_at_once_and_says_so():
    door = Door(1, 0)
    door.offer("a")

    with pytest.raises(Overloaded, match=r"max_in_flight 1.*max_queued 0") as caught:
        door.offer("b")
    assert caught.value.is_retry_safe
    assert caught.value.retry_after_s > 0


def test_bytes_that_wait_are_limited():
    door = Door(1, 5)
    door.offer("a", input_bytes=5000)  # runs, so nothing of it is held
    door.offer("b", input_bytes=600)

    with pytest.raises(Overloaded, match=r"600 bytes of input \(max_queued_bytes 1000\)"):
        door.offer("c", input_bytes=401)
    assert door.runs("d", input_bytes=400) == [False]
    assert door.leave("b") == []
    assert door.admission.counts.queued_bytes == 400
    assert door.leave("a") == ["d"]
    assert door.admission.counts.queued_bytes == 0


def test_newcomer_does_not_overtake_the_queue():
    door = Door(1, 5)
    door.runs("a", "b")

    assert door.runs("c") == [False]
    assert door.leave("a") == ["b"]


def test_higher_priority_goes_first_then_arrival():
    door = Door(1, 5)
    for request, priority in [("a", 0), ("b", 0), ("c", 9), ("d", 9)]:
        door.offer(request, priority=priority)

    assert [door.leave(request) for request in "acdb"] == [["c"], ["d"], ["b"], []]


def test_who_gave_up_is_skipped():
    door = Door(1, 5)
    door.runs("a", "b", "c")
    door.leave("b")

    assert door.leave("a") == ["c"]
    assert door.leave("c") == []


def test_adopted_requests_count_whatever_the_limit():
    door = Door(1, 5, quotas={"x": Quota(max_in_flight=1)})
    door.admission.adopt("x", "x", 0.0)
    door.admission.adopt("y", "x", 0.0)

    assert door.runs("a") == [False]
    assert door.row("x")["in_flight"] == 2
    assert door.leave("x") == []
    assert door.leave("y") == ["a"]


def test_request_that_is_back_is_refused_by_nothing_and_goes_first():
    """It lost its place to a dead replica, and its predecessor still holds that when it comes."""
    door = Door(1, 1, quotas={"x": Quota(max_in_flight=1, max_queued=0, requests_per_minute=1, burst=1)})
    door.runs("x", key="x")
    door.runs("y", key="y")

    back = door.admission.offer(Submit("x.2", "p", (), key="x", input_bytes=5000), 0.001, door.now, is_back=True)

    assert back == (False, None)
    assert door.admission.counts.queued == 2
    assert door.leave("x") == ["x.2"]
    assert door.leave("x.2") == ["y"]


def test_giving_up_over_and_over_holds_no_memory():
    door = Door(1, 5)
    door.offer("running")
    for number in range(10_000):
        door.offer(f"r{number}", key=f"caller{number}")
        door.leave(f"r{number}")

    assert door.admission.counts.queued == 0
    assert len(door.admission._accounts) <= admission_module.MAX_ACCOUNTS
    assert len(door.admission._queue._turns._heap) < 50


# --- callers ------------------------------------------------------------------------------------------------


def test_callers_take_turns_by_weight():
    door = Door(1, 100, quotas={"gold": Quota(weight=3)})
    door.offer("first")
    for i in range(12):
        door.offer(f"g{i}", key="gold")
        door.offer(f"o{i}", key="other")

    order, running = "", "first"
    for _ in range(12):
        (running,) = door.leave(running)
        order += running[0]
    assert Counter(order) == {"g": 9, "o": 3}


def test_full_queue_makes_room_for_who_holds_less():
    door = Door(1, 4)
    door.offer("running")
    door.runs("a1", "a2", "a3", "a4", key="a")

    offer = door.offer("b1", key="b")
    assert (offer.may_run, offer.pushed_out) == (False, "a4")
    assert "busy" in door.admission.overloaded().message
    assert door.row("a")["refused_by"] == {"overloaded": 1}
    with pytest.raises(Overloaded):
        door.offer("a5", key="a")
    assert (door.row("a")["queued"], door.row("b")["queued"]) == (3, 1)


def test_caller_at_its_limit_waits_while_others_pass():
    door = Door(3, 5, quotas={"x": Quota(max_in_flight=1)})
    assert door.runs("x1", "x2", key="x") == [True, False]

    assert door.runs("y1", "y2", key="y") == [True, True]
    assert door.runs("y3", key="y") == [False]
    assert door.leave("y1") == ["y3"], "a place that is free is not kept for who may not have it"
    assert door.leave("x1") == ["x2"]


def test_callers_own_queue_limit_is_its_fault():
    door = Door(4, 5, quotas={"x": Quota(max_in_flight=1, max_queued=1), "y": Quota(max_queued=0)})
    door.runs("x1", "x2", key="x")

    with pytest.raises(
        QuotaExceeded, match=r"1 of its requests run \(max_in_flight 1\) and 1 wait \(max_queued 1\)"
    ) as caught:
        door.offer("x3", key="x")
    assert caught.value.is_retry_safe
    assert caught.value.retry_after_s > 0
    assert door.runs("y1", "y2", "y3", key="y") == [True, True, True]
    with pytest.raises(QuotaExceeded, match="max_queued 0"):
        door.offer("y4", key="y")


def test_full_queue_is_whose_fault_it_is():
    """With room in the pipeline only the caller's own limit is in the way; without, the pipeline's is too."""
    door = Door(2, 0, quotas={"x": Quota(max_in_flight=1)})
    door.offer("x1", key="x")
    with pytest.raises(QuotaExceeded):
        door.offer("x2", key="x")

    door.offer("y1", key="y")
    with pytest.raises(Overloaded):
        door.offer("x2", key="x")


def test_rate_is_refused_with_the_time_to_wait():
    door = Door(100, 0, quotas={"x": Quota(requests_per_minute=30, burst=2)})
    assert door.runs("x1", "x2", key="x") == [True, True]

    with pytest.raises(QuotaExceeded, match=r"requests_per_minute 30.*in 2 s") as caught:
        door.offer("x3", key="x")
    assert caught.value.retry_after_s == pytest.approx(2.0)
    assert door.runs("y", key="y") == [True]
    door.now = 2.0
    assert door.runs("x3", key="x") == [True]


def test_refused_request_takes_nothing_of_the_rate():
    door = Door(1, 0, quotas={"x": Quota(requests_per_minute=60, burst=1)})
    door.offer("running")
    for _ in range(3):
        with pytest.raises(Overloaded):
            door.offer("x1", key="x")
    door.leave("running")

    assert door.runs("x1", key="x") == [True]


def test_priority_above_a_callers_limit_is_refused_by_name():
    door = Door(1, 5, quotas={"x": Quota(max_priority=2)})
    door.offer("running")

    with pytest.raises(BadInput, match=r"at most 2, which HTTP writes as -2") as caught:
        door.offer("x1", key="x", priority=3)
    assert caught.value.field == "priority"
    assert door.runs("x1", key="x", priority=2) == [False]
    assert door.runs("y1", key="y", priority=3) == [False], "who has no limit has none"


def test_rows_tell_what_each_caller_does():
    door = Door(1, 1, quotas={"x": Quota(max_queued=1)})
    door.runs("x1", "x2", key="x")
    with pytest.raises(QuotaExceeded):
        door.offer("x3", key="x")

    assert door.admission.callers() == [
        {
            "caller": "x",
            "pipeline": "p",
            "in_flight": 1,
            "queued": 1,
            "admitted": 1,
            "refused": 1,
            "refused_by": {"quota_exceeded": 1},
        }
    ]


def test_named_callers_are_never_forgotten(monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_ACCOUNTS", 4)
    door = Door(1, 0, quotas={"x": Quota(requests_per_minute=1)})
    door.offer("x1", key="x")
    door.leave("x1")
    for number in range(20):
        door.offer(f"r{number}", key=f"caller{number}")
        door.leave(f"r{number}")

    assert len(door.admission._accounts) <= 5
    with pytest.raises(QuotaExceeded):
        door.offer("x2", key="x")


# --- deadlines ----------------------------------------------------------------------------------------------


def busy_door(**fields: Any) -> Door:
    """Two at once, the shortest lately took 2 s, four wait."""
    door = Door(2, 10, **fields)
    door.runs("a", "b")
    door.now = 2.0
    door.leave("a")
    door.now = 5.0
    door.leave("b")
    door.runs("c", "d", "w1", "w2", "w3", "w4")
    return door


def test_deadline_that_cannot_be_met_is_refused_at_once():
    door = busy_door()

    with pytest.raises(DeadlineExceeded, match=r"limit of 3.9 s .* at least 4 s before its turn"):
        door.offer("late", timeout_s=3.9)
    assert door.runs("late", timeout_s=4.1) == [False]


def test_only_those_surely_before_it_count():
    """Another caller's turn comes before the line of the first, so its deadline may be met."""
    door = busy_door()

    assert door.runs("other", key="other", timeout_s=0.1) == [False]
    assert door.runs("urgent", priority=1, timeout_s=0.1) == [False]


def test_callers_own_limit_makes_more_rounds():
    door = busy_door(quotas={"x": Quota(max_in_flight=1)})
    door.runs("x1", "x2", key="x")

    with pytest.raises(DeadlineExceeded):
        door.offer("x3", key="x", timeout_s=3.9)
    assert door.runs("x3", key="x", timeout_s=4.1) == [False]


def test_nothing_is_foretold_without_experience():
    door = Door(1, 10)
    door.runs("a", "b", "c", "d")

    assert door.runs("e", timeout_s=0.001) == [False]


def test_experience_is_of_the_last_requests_only():
    door = Door(1, 100)
    door.offer("quick")
    door.leave("quick")
    for number in range(admission_module.NUM_RECENT):
        door.offer(f"r{number}")
        door.now += 3.0
        door.leave(f"r{number}")
    door.runs("a", "b", "c")

    with pytest.raises(DeadlineExceeded):
        door.offer("d", timeout_s=5.0)


# --- everything at once -------------------------------------------------------------------------------------

QUOTAS = {
    "small": Quota(weight=0.5, max_in_flight=1, max_queued=1),
    "gold": Quota(weight=4.0, max_in_flight=2, max_priority=1),
    "rated": Quota(requests_per_minute=60, burst=2),
}


class AdmissionMachine(RuleBasedStateMachine):
    """Callers, quotas and deadlines as they come: no limit is passed, nobody is lost, everybody ends."""

    def __init__(self):
        super().__init__()
        self.door = Door(3, 4, max_queued_bytes=100, quotas=QUOTAS)
        self.number = 0
        self.running: dict[str, str] = {}
        self.waiting: dict[str, tuple[str, float | None, int]] = {}
        self.adopted: set[str] = set()
        self.started: list[tuple[float, str]] = []
        self.refused: Counter[tuple[str, str]] = Counter()

    def admit(self, requests: list[str]) -> None:
        for request in requests:
            self.running[request] = self.waiting.pop(request)[0]

    @rule(
        caller=st.sampled_from(["", "other", *QUOTAS]),
        priority=st.integers(-1, 2),
        timeout_s=st.none() | st.floats(0.001, 5.0),
        num_bytes=st.sampled_from([0, 1, 60, 101]),
    )
    def come(self, caller, priority, timeout_s, num_bytes):
        self.number += 1
        request = f"r{self.number}"
        before = self.door.admission.counts
        fields: dict[str, Any] = {"key": caller, "priority": priority, "input_bytes": num_bytes}
        try:
            offer = self.door.offer(request, timeout_s=timeout_s, **fields)
        except OmniBusError as error:
            self.refused[caller, error.code] += 1
            assert self.door.admission.counts == before
            self._assert_reason(error, caller, priority, timeout_s, num_bytes)
            return
        if caller == "rated":
            self.started.append((self.door.now, request))
        if offer.pushed_out is not None:
            loser, _, _ = self.waiting.pop(offer.pushed_out)
            self.refused[loser, "overloaded"] += 1
        if offer.may_run:
            self.running[request] = caller
        else:
            self.waiting[request] = (caller, None if timeout_s is None else self.door.now + timeout_s, num_bytes)

    def _assert_reason(self, error, caller, priority, timeout_s, num_bytes):
        """Each refusal is for a limit that was really reached."""
        quota = QUOTAS.get(caller, Quota())
        mine = [place for place in self.waiting.values() if place[0] == caller]
        if isinstance(error, BadInput):
            assert quota.max_priority is not None
            assert priority > quota.max_priority
        elif isinstance(error, DeadlineExceeded):
            assert timeout_s is not None
            assert mine
        elif isinstance(error, QuotaExceeded):
            is_held = quota.max_in_flight is not None and self.num_running(caller) >= quota.max_in_flight
            is_full = quota.max_queued is not None and len(mine) >= quota.max_queued
            assert caller == "rated" or is_held or is_full
        else:
            assert isinstance(error, Overloaded)
            waiting_bytes = sum(place[2] for place in self.waiting.values())
            assert len(self.waiting) >= 4 or waiting_bytes + num_bytes > 100

    def num_running(self, caller: str) -> int:
        return sum(one == caller for one in self.running.values())

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def end(self, data):
        request = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request]
        self.adopted.discard(request)
        self.admit(self.door.leave(request))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def give_up(self, data):
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request]
        self.admit(self.door.leave(request))

    @rule(caller=st.sampled_from(["", "small", "gold"]))
    def adopt(self, caller):
        self.number += 1
        request = f"r{self.number}"
        self.door.admission.adopt(request, caller, self.door.now)
        self.running[request] = caller
        self.adopted.add(request)

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds):
        """Deadlines of those that wait end them, as the coordinator's timers do."""
        self.door.now += seconds
        for request, (_, deadline, _) in list(self.waiting.items()):
            if deadline is not None and deadline <= self.door.now and request in self.waiting:
                del self.waiting[request]
                self.admit(self.door.leave(request))

    @invariant()
    def counts_are_those_of_the_requests(self):
        counts = self.door.admission.counts
        assert (counts.in_flight, counts.queued) == (len(self.running), len(self.waiting))
        assert counts.queued_bytes == sum(place[2] for place in self.waiting.values())
        for row in self.door.admission.callers():
            caller = row["caller"]
            assert row["in_flight"] == self.num_running(caller)
            assert row["queued"] == sum(place[0] == caller for place in self.waiting.values())
            assert row["refused_by"] == {code: n for (who, code), n in self.refused.items() if who == caller}

    @invariant()
    def no_limit_is_passed(self):
        counts = self.door.admission.counts
        assert counts.in_flight <= 3 + len(self.adopted)
        assert counts.queued <= 4
        assert counts.queued_bytes <= 100
        for caller, quota in QUOTAS.items():
            num_adopted = sum(self.running[request] == caller for request in self.adopted)
            if quota.max_in_flight is not None:
                assert self.num_running(caller) <= quota.max_in_flight + num_adopted
            if quota.max_queued is not None:
                assert sum(place[0] == caller for place in self.waiting.values()) <= quota.max_queued
        for i, (first, _) in enumerate(self.started):
            for j in range(i, len(self.started)):
                assert j - i + 1 <= 2 + (self.started[j][0] - first) + 1e-6

    @invariant()
    def nobody_waits_who_may_run(self):
        if len(self.running) < 3:
            for caller, _, _ in self.waiting.values():
                limit = QUOTAS.get(caller, Quota()).max_in_flight
                assert limit is not None
                assert self.num_running(caller) >= limit

    def teardown(self):
        """When everything that runs ends, so does everything that waits, in as many steps as there are requests."""
        for _ in range(len(self.running) + len(self.waiting)):
            if not self.running:
                break
            request = next(iter(self.running))
            del self.running[request]
            self.admit(self.door.leave(request))
        assert not self.running
        assert not self.waiting
        assert not self.door.admission._queue._levels


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
