"""Lets a vLLM scheduler leave requests out of steps: what backpressure needs, and vLLM doesn't have.

vLLM runs every request that it holds until it ends. Its scheduler takes from two collections, `running` (those that
hold keys and values) and `waiting`; the model runner copes with a running request that a step leaves out, since a step
whose token budget is used up leaves some out as well. So for the length of one `schedule` call the suspended ones are
hidden:

- A suspended request in `running` keeps its keys and values. It is scheduled again when it is named again.
- It gives them up, by the scheduler's own preemption, when the memory or the places of the batch run short: then it
  waits aside, and computes again what the prefix cache has lost when it is named again.

The names used here are the same in vLLM 0.22 and 0.32; `Suspension` refuses a scheduler that lacks one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from omni_bus.errors import StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

NEEDED = (
    "schedule",
    "running",
    "waiting",
    "requests",
    "max_num_running_reqs",
    "kv_cache_manager",
    "_preempt_request",
)

FULL = 0.9
"""Share of the keys' and values' memory in use from which suspended requests give theirs up."""


class Suspension:
    """Stands between an engine core and its scheduler's `schedule`."""

    def __init__(self, scheduler: Any, *, keeps_kv: bool = True) -> None:
        if missing := [name for name in NEEDED if not hasattr(scheduler, name)]:
            raise StartFailed(f"this vLLM's scheduler has no {', '.join(missing)}: the adapter can't suspend requests")
        self._scheduler = scheduler
        self._keeps_kv = keeps_kv
        self._schedule: Callable[..., Any] = scheduler.schedule
        self._limit: int = scheduler.max_num_running_reqs
        self._named: Collection[str] = ()
        self._aside: dict[str, Any] = {}
        """Suspended requests that hold nothing."""
        self.num_preempted = 0
        """How often a suspended request gave its keys and values up."""
        self.num_scheduled = 0
        """Tokens of the last step."""
        scheduler.schedule = self._schedule_named

    @property
    def num_kept(self) -> int:
        """Suspended requests that still hold keys and values."""
        return sum(request.request_id not in self._named for request in self._scheduler.running)

    def name(self, requests: Collection[str]) -> None:
        """Say which requests (by vLLM's own ids) the steps from now on are for."""
        self._named = requests
        for id_ in [id_ for id_ in self._aside if id_ in requests]:
            self._scheduler.waiting.prepend_request(self._aside.pop(id_))

    def forget(self, request: str) -> None:
        """Put a request back where the scheduler finds it: it is about to be aborted."""
        if request in self._aside:
            self._scheduler.waiting.prepend_request(self._aside.pop(request))

    def _schedule_named(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._scheduler
        running = scheduler.running
        held = [request for request in running if request.request_id not in self._named]
        if not held and not self._aside:
            output = self._schedule(*args, **kwargs)
            self.num_scheduled = output.total_num_scheduled_tokens
            return output
        scheduler.running = [request for request in running if request.request_id in self._named]
        held = self._give_up(held)
        scheduler.max_num_running_reqs = self._limit - len(held)
        try:
            output = self._schedule(*args, **kwargs)
        finally:
            scheduler.max_num_running_reqs = self._limit
            scheduler.running.extend(held)
        self.num_scheduled = output.total_num_scheduled_tokens
        if held and not self.num_scheduled and self._is_anyone_left():
            # Nobody could run although somebody should: for want of memory that the suspended ones hold.
            scheduler.running = [request for request in scheduler.running if request not in held]
            scheduler.running.extend(self._preempt(held))
        return output

    def _is_anyone_left(self) -> bool:
        return any(id_ in self._scheduler.requests and id_ not in self._aside for id_ in self._named)

    def _give_up(self, held: list[Any]) -> list[Any]:
        """Preempt as many of these as the others need; return the rest."""
        if not self._keeps_kv:
            return self._preempt(held)
        scheduler = self._scheduler
        # A place of the batch for each named request, whether it runs already or waits.
        num_wanted = sum(id_ in scheduler.requests for id_ in self._named)
        num_places = max(0, self._limit - num_wanted)
        kept = held
        if len(held) > num_places:
            kept = held[:num_places] + self._preempt(held[num_places:])
        while kept and scheduler.kv_cache_manager.usage > FULL:
            *rest, last = kept
            if stays := self._preempt([last]):
                return rest + stays
            kept = rest
        return kept

    def _preempt(self, held: list[Any]) -> list[Any]:
        """Take memory and places from suspended requests; return those whose last step is still under way."""
        stays: list[Any] = []
        scheduler = self._scheduler
        for request in held:
            if request.num_output_placeholders:
                stays.append(request)
                continue
            scheduler._preempt_request(request, time.monotonic())  # noqa: SLF001 (no public way)
            scheduler.waiting.remove_request(request)
            self._aside[request.request_id] = request
            self.num_preempted += 1
        return stays
