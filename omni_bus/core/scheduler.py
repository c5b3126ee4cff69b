"""Which requests run in the next engine step.

Requests hold a slot of the engine from their first step to their end. In each step run at most `width` of them, never a
suspended or starved one: a request that waits for credit keeps its slot but gives its place in the step to another.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from omni_bus.ids import RequestId


class Counts(NamedTuple):
    """Requests by state."""

    waiting: int
    resident: int
    suspended: int


class _Entry(msgspec.Struct):
    order: tuple[int, float, int]
    is_resident: bool = False
    is_suspended: bool = False
    is_starved: bool = False
    last_step: int = 0


class Scheduler:
    """Orders by priority (higher first), then deadline, then arrival; among equals, who ran longest ago goes first."""

    def __init__(self, width: int, max_resident: int) -> None:
        self._width = width
        self._max_resident = max(max_resident, width)
        self._entries: dict[RequestId, _Entry] = {}
        self._num_resident = 0
        self._num_added = 0
        self._num_plans = 0

    @property
    def counts(self) -> Counts:
        """How many requests wait for a slot, hold one, and are suspended."""
        suspended = sum(1 for entry in self._entries.values() if entry.is_suspended)
        return Counts(len(self._entries) - self._num_resident, self._num_resident, suspended)

    def add(self, request: RequestId, priority: int, deadline: float | None) -> None:
        """Let a request wait for a slot."""
        self._num_added += 1
        order = (-priority, deadline if deadline is not None else float("inf"), self._num_added)
        self._entries[request] = _Entry(order)

    def remove(self, request: RequestId) -> None:
        """Forget a request and free its slot; unknown ones are ignored."""
        entry = self._entries.pop(request, None)
        if entry is not None and entry.is_resident:
            self._num_resident -= 1

    def suspend(self, request: RequestId) -> None:
        """Leave a request out of steps."""
        self._entries[request].is_suspended = True

    def resume(self, request: RequestId) -> None:
        """Let it take part again."""
        self._entries[request].is_suspended = False

    def starve(self, request: RequestId) -> None:
        """Leave it out until `wake`: it has nothing to do."""
        if request in self._entries:
            self._entries[request].is_starved = True

    def wake(self, request: RequestId) -> None:
        """It has input again."""
        self._entries[request].is_starved = False

    def is_resident(self, request: RequestId) -> bool:
        """Whether the request holds a slot."""
        entry = self._entries.get(request)
        return entry is not None and entry.is_resident

    def start(self) -> list[RequestId]:
        """Give free slots to waiting requests, in order; return those that got one."""
        free = self._max_resident - self._num_resident
        if free <= 0:
            return []
        waiting = sorted((e.order, r) for r, e in self._entries.items() if not e.is_resident)
        # Who waits for credit or for input leaves its place in the step to another, up to `max_resident`.
        running = sum(1 for e in self._entries.values() if e.is_resident and not (e.is_suspended or e.is_starved))
        started = [request for _, request in waiting[: min(free, max(0, self._width - running))]]
        for request in started:
            self._entries[request].is_resident = True
        self._num_resident += len(started)
        return started

    def batch(self) -> tuple[RequestId, ...]:
        """Return the requests of the next step."""
        self._num_plans += 1
        ready = [
            (entry.order[0], entry.last_step, entry.order, request)
            for request, entry in self._entries.items()
            if entry.is_resident and not entry.is_suspended and not entry.is_starved
        ]
        if len(ready) > self._width:
            ready.sort()
            del ready[self._width :]
        chosen = tuple(request for _, _, _, request in ready)
        for request in chosen:
            self._entries[request].last_step = self._num_plans
        return chosen
