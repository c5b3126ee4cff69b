"""How many requests of one pipeline run, how many wait, and who is next."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from omni_bus.errors import Overloaded
from omni_bus.ids import RequestId

RETRY_AFTER_S = 1.0
"""What a refused caller is told to wait: about one short request."""


class AdmissionCounts(NamedTuple):
    """Of one pipeline."""

    in_flight: int
    max_in_flight: int
    queued: int
    max_queued: int


class Admission:
    """The limits and the queue of one pipeline; higher priority first, then in order of arrival."""

    def __init__(self, pipeline: str, max_in_flight: int, max_queued: int) -> None:
        self._pipeline = pipeline
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._in_flight: set[RequestId] = set()
        self._queued: set[RequestId] = set()
        self._heap: list[tuple[int, bool, int, RequestId]] = []
        self._num_arrived = 0

    @property
    def counts(self) -> AdmissionCounts:
        """Where the limits stand."""
        return AdmissionCounts(len(self._in_flight), self._max_in_flight, len(self._queued), self._max_queued)

    def offer(self, request: RequestId, priority: int, *, is_back: bool = False) -> bool:
        """Take a request: True if it may run now, False if it waits.

        Args:
            request: whose turn it may be.
            priority: higher goes first.
            is_back: it had a place before and lost it through no fault of its own. It goes ahead of others of its
                priority, and a full queue does not refuse it.

        Raises:
            Overloaded: the queue is full.
        """
        if len(self._in_flight) < self._max_in_flight and not self._queued:
            self._in_flight.add(request)
            return True
        if len(self._queued) >= self._max_queued and not is_back:
            raise Overloaded(
                f"pipeline '{self._pipeline}' is busy: {len(self._in_flight)} requests run (max_in_flight "
                f"{self._max_in_flight}) and {len(self._queued)} wait (max_queued {self._max_queued})",
                is_retry_safe=True,
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_arrived += 1
        self._queued.add(request)
        heapq.heappush(self._heap, (-priority, not is_back, self._num_arrived, request))
        return False

    def adopt(self, request: RequestId) -> None:
        """Count a request that runs already, whatever the limit."""
        self._in_flight.add(request)

    def leave(self, request: RequestId) -> None:
        """Forget a request that ended or gave up waiting."""
        self._in_flight.discard(request)
        self._queued.discard(request)
        # Whoever gave up waiting stays in the heap until its turn; it must not outgrow those who do wait.
        if len(self._heap) > 2 * len(self._queued) + 16:
            self._heap = [place for place in self._heap if place[-1] in self._queued]
            heapq.heapify(self._heap)

    def next(self) -> RequestId | None:
        """Take the next waiting request that may run now."""
        while self._heap and len(self._in_flight) < self._max_in_flight:
            request = heapq.heappop(self._heap)[-1]
            if request in self._queued:
                self._queued.discard(request)
                self._in_flight.add(request)
                return request
        if not self._queued:
            self._heap.clear()
        return None
