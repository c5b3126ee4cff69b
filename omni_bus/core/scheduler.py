"""Which requests run in the next engine step.

Requests hold a slot of the engine from their first step to their end. In each step run at most `width` of them, never a
suspended or starved one: a request that waits for credit keeps its slot but gives its place in the step to another.
"""

from __future__ import annotations

import heapq
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
    """Orders by priority (higher first), then deadline, then arrival; among equals, who ran longest ago goes first.

    A stage asks after every event, so nothing here looks at all requests: starting looks at those that start, a step at
    those that are ready, of which there are about `width`.
    """

    def __init__(self, width: int, max_resident: int) -> None:
        self._width = width
        self._max_resident = max(max_resident, width)
        self._entries: dict[RequestId, _Entry] = {}
        self._waiting: list[tuple[tuple[int, float, int], RequestId]] = []
        """A heap of those without a slot; who was removed stays in it until its turn."""
        self._ready: dict[RequestId, _Entry] = {}
        """Those with a slot that are neither suspended nor starved."""
        self._num_resident = 0
        self._num_suspended = 0
        self._num_added = 0
        self._num_plans = 0

    @property
    def counts(self) -> Counts:
        """How many requests wait for a slot, hold one, and are suspended."""
        return Counts(len(self._entries) - self._num_resident, self._num_resident, self._num_suspended)

    def add(self, request: RequestId, priority: int, deadline: float | None) -> None:
        """Let a request wait for a slot."""
        self._num_added += 1
        order = (-priority, deadline if deadline is not None else float("inf"), self._num_added)
        self._entries[request] = _Entry(order)
        heapq.heappush(self._waiting, (order, request))

    def remove(self, request: RequestId) -> None:
        """Forget a request and free its slot; unknown ones are ignored."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        self._ready.pop(request, None)
        self._num_suspended -= entry.is_suspended
        if entry.is_resident:
            self._num_resident -= 1
        elif len(self._waiting) > 2 * (len(self._entries) - self._num_resident) + 16:
            # Who gave up waiting must not outnumber those who do wait.
            self._waiting = [place for place in self._waiting if self._is_waiting(*place)]
            heapq.heapify(self._waiting)

    def suspend(self, request: RequestId) -> None:
        """Leave a request out of steps."""
        entry = self._entries[request]
        self._num_suspended += not entry.is_suspended
        entry.is_suspended = True
        self._ready.pop(request, None)

    def resume(self, request: RequestId) -> None:
        """Let it take part again."""
        entry = self._entries[request]
        self._num_suspended -= entry.is_suspended
        entry.is_suspended = False
        self._take_part(request, entry)

    def starve(self, request: RequestId) -> None:
        """Leave it out until `wake`: it has nothing to do."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.is_starved = True
            self._ready.pop(request, None)

    def wake(self, request: RequestId) -> None:
        """It has input again."""
        entry = self._entries[request]
        if entry.is_starved:
            entry.is_starved = False
            self._take_part(request, entry)

    def is_resident(self, request: RequestId) -> bool:
        """Whether the request holds a slot."""
        entry = self._entries.get(request)
        return entry is not None and entry.is_resident

    def start(self) -> list[RequestId]:
        """Give free slots to waiting requests, in order; return those that got one."""
        started: list[RequestId] = []
        # Who waits for credit or for input leaves its place in the step to another, up to `max_resident`.
        while self._waiting and self._num_resident < self._max_resident and len(self._ready) < self._width:
            order, request = heapq.heappop(self._waiting)
            if self._is_waiting(order, request):
                entry = self._entries[request]
                entry.is_resident = True
                self._num_resident += 1
                self._take_part(request, entry)
                started.append(request)
        return started

    def batch(self) -> tuple[RequestId, ...]:
        """Return the requests of the next step."""
        self._num_plans += 1
        chosen = self._ready
        if len(chosen) > self._width:
            # At most `max_resident` are ready.
            chosen = dict(heapq.nsmallest(self._width, chosen.items(), key=_turn))
        for entry in chosen.values():
            entry.last_step = self._num_plans
        return tuple(chosen)

    def _take_part(self, request: RequestId, entry: _Entry) -> None:
        if entry.is_resident and not entry.is_suspended and not entry.is_starved:
            self._ready[request] = entry

    def _is_waiting(self, order: tuple[int, float, int], request: RequestId) -> bool:
        """Whether a place in the heap is of a request that still waits, not of one that left or of its namesake."""
        entry = self._entries.get(request)
        return entry is not None and entry.order == order and not entry.is_resident


def _turn(item: tuple[RequestId, _Entry]) -> tuple[int, int, tuple[int, float, int]]:
    """By priority, then by who ran longest ago, then by deadline and arrival."""
    order = item[1].order
    return order[0], item[1].last_step, order
