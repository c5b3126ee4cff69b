"""Who is next among callers that wait, and who makes room when too many do.

Higher priority goes first, always: there is no ageing, as in vLLM's priority scheduling, so a low priority may wait for
as long as higher ones keep coming. Within a priority it is start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng,
"Start-time Fair Queuing", SIGCOMM 1996): each flow has a start tag, the smallest goes first, a request moves its flow's
tag on by 1 / weight, and the virtual time is the tag of who went last. A flow that begins to wait starts at the virtual
time, so a caller gains nothing by having been idle. Only the first request of a flow needs a tag: those that give up
behind it cost their caller nothing.

A full queue would undo this at its door, where whoever comes most often gets in. So the flow that holds most of the
queue for its weight gives its newest place to a newcomer that holds less (longest queue drop: B. Suter et al., "Buffer
Management Schemes for Supporting TCP in Gigabit Routers with Per-flow Queueing", IEEE JSAC 17(6), 1999).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from omni_bus.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_FINISHED = 4096
"""Finish tags that a level remembers of flows which don't wait: more than callers with a name."""

_FlowKey: TypeAlias = tuple[int, str, bool]
"""Priority, caller, whether its requests are back."""


class Applicant(NamedTuple):
    """One request that wants to run."""

    request: RequestId
    caller: str = ""
    priority: int = 0
    weight: float = 1.0
    num_bytes: int = 0


class _Flow:
    """One caller's waiting requests at one priority, the oldest first.

    Those that are back form a flow of their own, which is ahead of all others and pays nothing.
    """

    def __init__(self, newcomer: Applicant, start: float, *, is_back: bool) -> None:
        self.caller = newcomer.caller
        self.priority = newcomer.priority
        self.is_back = is_back
        self.weight = math.inf if is_back else newcomer.weight
        self.start = -math.inf if is_back else start
        self.waiting: OrderedDict[RequestId, int] = OrderedDict()
        self.num_bytes = 0

    @property
    def key(self) -> _FlowKey:
        """What parts it from other flows."""
        return (self.priority, self.caller, self.is_back)


class _Level:
    """One priority's virtual time; while nothing waits at it, there is none."""

    def __init__(self) -> None:
        self.time = 0.0
        self.num_flows = 0
        self.finished: dict[str, float] = {}
        """By caller that waits no more, the tag that its next request begins with."""

    def remember(self, caller: str, tag: float) -> None:
        """Keep the tag of a flow that ends; it counts as long as it is ahead of the virtual time."""
        if len(self.finished) >= _MAX_FINISHED:
            self.finished = {name: ahead for name, ahead in self.finished.items() if ahead > self.time}
        if tag > self.time and len(self.finished) < _MAX_FINISHED:
            self.finished[caller] = tag


class _Order:
    """Flows by a key that changes: a heap in which what was overtaken stays until its turn."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, float], int, _Flow]] = []
        self._tickets: dict[_Flow, int] = {}
        self._num_tickets = 0

    def put(self, flow: _Flow, key: tuple[float, float]) -> None:
        """Place a flow, or place it anew; among equal keys, who was placed first is first."""
        self._num_tickets += 1
        self._tickets[flow] = self._num_tickets
        heapq.heappush(self._heap, (key, self._num_tickets, flow))
        if len(self._heap) > 2 * len(self._tickets) + 16:
            self._heap = [place for place in self._heap if self._tickets.get(place[2]) == place[1]]
            heapq.heapify(self._heap)

    def drop(self, flow: _Flow) -> None:
        """Take a flow out; harmless if it is not in."""
        self._tickets.pop(flow, None)

    def first(self) -> _Flow | None:
        """Return the first flow, which stays."""
        while self._heap:
            _, ticket, flow = self._heap[0]
            if self._tickets.get(flow) == ticket:
                return flow
            heapq.heappop(self._heap)
        return None


class FairQueue:
    """Waiting requests; every operation takes time of the logarithm of their number (amortised).

    Args:
        max_requests: so many may wait.
        max_bytes: so much input may wait with them.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._flows: dict[_FlowKey, _Flow] = {}
        self._flow_of: dict[RequestId, _Flow] = {}
        self._levels: dict[int, _Level] = {}
        self._turns = _Order()
        self._crowds = _Order()
        self._held: dict[str, dict[_FlowKey, _Flow]] = {}
        """Flows of callers that were at their own limit when their turn came, by caller."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._flow_of)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._flow_of

    def num_before(self, caller: str, priority: int) -> int:
        """Return how many waiting requests are sure to go before a newcomer: those of its own flow."""
        flow = self._flows.get((priority, caller, False))
        return 0 if flow is None else len(flow.waiting)

    def fits(self, newcomer: Applicant) -> bool:
        """Whether there is room for one more."""
        return len(self) < self._max_requests and self.num_bytes + newcomer.num_bytes <= self._max_bytes

    def push(self, newcomer: Applicant, *, is_back: bool = False) -> None:
        """Let a request wait.

        Args:
            newcomer: `fits` has said that there is room.
            is_back: it had its turn and lost its place through no fault of its own: it goes ahead of its priority, pays
                nothing, gives way to nobody, and no limit holds for it.
        """
        flow = self._flows.get((newcomer.priority, newcomer.caller, is_back))
        if flow is None:
            level = self._levels.setdefault(newcomer.priority, _Level())
            level.num_flows += 1
            flow = _Flow(newcomer, max(level.time, level.finished.get(newcomer.caller, 0.0)), is_back=is_back)
            self._flows[flow.key] = flow
            self._turns.put(flow, (-flow.priority, flow.start))
        flow.waiting[newcomer.request] = newcomer.num_bytes
        flow.num_bytes += newcomer.num_bytes
        self.num_bytes += newcomer.num_bytes
        self._flow_of[newcomer.request] = flow
        self._put_crowd(flow)

    def pop(self, is_held: Callable[[str], bool]) -> RequestId | None:
        """Take the request whose turn it is; None if nobody waits but callers that are held by limits of their own."""
        flow = self._first(is_held)
        if flow is None:
            return None
        request = next(iter(flow.waiting))
        level = self._levels[flow.priority]
        level.time = max(level.time, flow.start)
        flow.start += 1.0 / flow.weight
        self._turns.put(flow, (-flow.priority, flow.start))
        self.discard(request)
        return request

    def has_next(self, is_held: Callable[[str], bool]) -> bool:
        """Whether `pop` would find somebody."""
        return self._first(is_held) is not None

    def _first(self, is_held: Callable[[str], bool]) -> _Flow | None:
        while (flow := self._turns.first()) is not None and is_held(flow.caller):
            self._turns.drop(flow)
            self._held.setdefault(flow.caller, {})[flow.key] = flow
        return flow

    def release(self, caller: str) -> None:
        """Let a caller compete again that is below its own limit; the time it was held counts as idle."""
        for flow in self._held.pop(caller, {}).values():
            if not flow.is_back:
                flow.start = max(flow.start, self._levels[flow.priority].time)
            self._turns.put(flow, (-flow.priority, flow.start))

    def discard(self, request: RequestId) -> bool:
        """Take a request out, wherever it stands; False if it does not wait."""
        flow = self._flow_of.pop(request, None)
        if flow is None:
            return False
        num_bytes = flow.waiting.pop(request)
        flow.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        if flow.waiting:
            self._put_crowd(flow)
        else:
            self._end(flow)
        return True

    def _put_crowd(self, flow: _Flow) -> None:
        if not flow.is_back:
            self._crowds.put(flow, (flow.priority, -self._share(flow)))

    def _end(self, flow: _Flow) -> None:
        """Nothing of a flow waits any more."""
        del self._flows[flow.key]
        self._turns.drop(flow)
        self._crowds.drop(flow)
        held = self._held.get(flow.caller)
        if held is not None:
            held.pop(flow.key, None)
            if not held:
                del self._held[flow.caller]
        level = self._levels[flow.priority]
        level.num_flows -= 1
        if level.num_flows:
            level.remember(flow.caller, flow.start)
        else:  # the end of a busy period: nobody is ahead of anybody
            del self._levels[flow.priority]

    def outsider(self, newcomer: Applicant) -> RequestId | None:
        """Return who should give its place to a newcomer that does not fit; None if the newcomer is the one to refuse.

        It is the newest of the flow that holds most for its weight, at the lowest priority; and only for a newcomer of
        a higher priority, or whose flow holds less, itself included.
        """
        flow = self._crowds.first()
        if flow is None or newcomer.priority < flow.priority:
            return None
        if newcomer.priority == flow.priority and self._share_with(newcomer) >= self._share(flow):
            return None
        request, num_bytes = next(reversed(flow.waiting.items()))
        return request if self.num_bytes - num_bytes + newcomer.num_bytes <= self._max_bytes else None

    def _share(self, flow: _Flow) -> float:
        """Return how much of the queue a flow holds for its weight, of places or of bytes, whichever is more."""
        return self._share_of(len(flow.waiting), flow.num_bytes, flow.weight)

    def _share_with(self, newcomer: Applicant) -> float:
        flow = self._flows.get((newcomer.priority, newcomer.caller, False))
        num_waiting, num_bytes = (0, 0) if flow is None else (len(flow.waiting), flow.num_bytes)
        return self._share_of(num_waiting + 1, num_bytes + newcomer.num_bytes, newcomer.weight)

    def _share_of(self, num_waiting: int, num_bytes: int, weight: float) -> float:
        return max(num_waiting / max(1, self._max_requests), num_bytes / max(1, self._max_bytes)) / weight
