"""Against a scheduler that has of vLLM's what `Suspension` uses, with its rules; `test_vllm_text` runs the real one."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters.vllm_suspension import FULL, Suspension
from omni_bus.errors import StartFailed


class Waiting(deque[Any]):
    def prepend_request(self, request: Any) -> None:
        self.appendleft(request)

    def remove_request(self, request: Any) -> None:
        self.remove(request)


class Scheduler:
    """One block of memory for each request and each of its tokens; a step gives every running request a token."""

    def __init__(self, *, places: int = 2, blocks: int = 100) -> None:
        self.running: list[Any] = []
        self.waiting = Waiting()
        self.requests: dict[str, Any] = {}
        self.max_num_running_reqs = places
        self.blocks = blocks
        self.kv_cache_manager: Any = self
        self.ran: list[str] = []

    @property
    def num_used(self) -> int:
        return sum(request.num_blocks for request in self.requests.values())

    @property
    def usage(self) -> float:
        return self.num_used / self.blocks

    def add(self, id_: str) -> None:
        self.requests[id_] = request = SimpleNamespace(request_id=id_, num_blocks=0, num_output_placeholders=0)
        self.waiting.append(request)

    def finish(self, id_: str) -> None:
        request = self.requests.pop(id_)
        assert (request in self.running) != (request in self.waiting), "a request is where the scheduler finds it"
        (self.running if request in self.running else self.waiting).remove(request)

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        assert request not in self.running
        request.num_blocks = 0
        self.waiting.prepend_request(request)

    def schedule(self) -> Any:
        self.ran = []
        for request in list(self.running):
            self._run(request)
        while self.waiting and len(self.running) < self.max_num_running_reqs and self.num_used < self.blocks:
            request = self.waiting.popleft()
            self.running.append(request)
            self._run(request)
        assert len(self.running) <= self.max_num_running_reqs
        return SimpleNamespace(total_num_scheduled_tokens=len(self.ran))

    def _run(self, request: Any) -> None:
        if self.num_used < self.blocks:
            request.num_blocks += 1
            self.ran.append(request.request_id)


def scheduler_with(*ids: str, **kwargs: Any) -> Scheduler:
    scheduler = Scheduler(**kwargs)
    for id_ in ids:
        scheduler.add(id_)
    return scheduler


def step(scheduler: Scheduler, suspension: Suspension, *named: str) -> list[str]:
    suspension.name(frozenset(named))
    scheduler.schedule()
    return scheduler.ran


def test_scheduler_that_lacks_a_part_is_refused() -> None:
    scheduler = Scheduler()
    del scheduler.max_num_running_reqs
    with pytest.raises(StartFailed, match="max_num_running_reqs"):
        Suspension(scheduler)


def test_suspended_request_is_left_out_and_keeps_its_memory() -> None:
    scheduler = scheduler_with("a", "b")
    suspension = Suspension(scheduler)
    step(scheduler, suspension, "a", "b")

    assert step(scheduler, suspension, "b") == ["b"]
    assert scheduler.requests["a"].num_blocks == 1
    assert suspension.num_kept == 1
    assert step(scheduler, suspension, "a", "b") == ["b", "a"]
    assert suspension.num_preempted == 0


def test_suspended_request_makes_room_in_the_batch() -> None:
    scheduler = scheduler_with("a", "b", "c")
    suspension = Suspension(scheduler)
    step(scheduler, suspension, "a", "b")

    assert step(scheduler, suspension, "b", "c") == ["b", "c"]
    assert scheduler.requests["a"].num_blocks == 0
    assert suspension.num_preempted == 1
    assert step(scheduler, suspension, "a", "b") == ["b", "a"]


def test_suspended_request_gives_memory_up_before_it_is_short() -> None:
    scheduler = scheduler_with("a", "b", blocks=10)
    suspension = Suspension(scheduler)
    step(scheduler, suspension, "a", "b")
    for _ in range(8):
        step(scheduler, suspension, "b")
    assert scheduler.usage > FULL

    assert step(scheduler, suspension, "b") == ["b"]
    assert scheduler.requests["a"].num_blocks == 0


def test_nothing_is_kept_where_that_was_said() -> None:
    scheduler = scheduler_with("a", "b")
    suspension = Suspension(scheduler, keeps_kv=False)
    step(scheduler, suspension, "a", "b")
    step(scheduler, suspension, "b")

    assert scheduler.requests["a"].num_blocks == 0
    assert step(scheduler, suspension, "a", "b") == ["b", "a"]


def test_request_whose_step_is_under_way_is_not_preempted() -> None:
    """vLLM is a step ahead with asynchronous scheduling; its output must still find the request."""
    scheduler = scheduler_with("a", "b")
    suspension = Suspension(scheduler, keeps_kv=False)
    step(scheduler, suspension, "a", "b")
    scheduler.requests["a"].num_output_placeholders = 1
    step(scheduler, suspension, "b")
    assert scheduler.requests["a"].num_blocks == 1

    scheduler.requests["a"].num_output_placeholders = 0
    step(scheduler, suspension, "b")
    assert scheduler.requests["a"].num_blocks == 0


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_suspended_request_can_be_aborted(*, keeps_kv: bool) -> None:
    scheduler = scheduler_with("a", "b")
    suspension = Suspension(scheduler, keeps_kv=keeps_kv)
    step(scheduler, suspension, "a", "b")
    step(scheduler, suspension, "b")
    suspension.forget("a")
    scheduler.finish("a")

    assert scheduler.num_used == 2
    assert step(scheduler, suspension, "b") == ["b"]


class AnySchedule(RuleBasedStateMachine):
    """Whatever is added, named and aborted: who is named gets its turn, who isn't stays where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(places=3, blocks=24)
        self.suspension = Suspension(self.scheduler)
        self.num_added = 0

    @precondition(lambda self: len(self.scheduler.requests) < 6)
    @rule()
    def add(self) -> None:
        self.num_added += 1
        self.scheduler.add(str(self.num_added))

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        live = sorted(self.scheduler.requests)
        named = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=3, unique=True))
        fresh = {request.request_id for request in self.scheduler.waiting if request.num_blocks == 0}
        ran = step(self.scheduler, self.suspension, *named)
        # A new request that nobody named may take a free place once; from then on it is left out too.
        assert set(ran) <= {*named, *fresh}
        for id_ in named:
            if self.scheduler.requests[id_].num_blocks > 6:
                self.end(id_)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.scheduler.requests))))

    def end(self, id_: str) -> None:
        self.suspension.forget(id_)
        self.scheduler.finish(id_)

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def named_request_runs_in_the_end(self) -> None:
        named = min(self.scheduler.requests)
        assert any(named in step(self.scheduler, self.suspension, named) for _ in range(4))
        if self.scheduler.requests[named].num_blocks > 6:
            self.end(named)

    @invariant()
    def places_are_bounded(self) -> None:
        assert len(self.scheduler.running) <= 3
        assert self.scheduler.max_num_running_reqs == 3

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        held = [*self.scheduler.running, *self.scheduler.waiting, *self.suspension._aside.values()]
        assert sorted(request.request_id for request in held) == sorted(self.scheduler.requests)


test_any_schedule = AnySchedule.TestCase
