"""What a lost actor means for a request: the error that it ends with, or a successor over replicas that live.

The coordinator never sees whether a request has put anything out. It puts up a successor for each that may run twice;
the client, which does know, takes it or cancels it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from omni_bus.core.effects import SetTimer
from omni_bus.core.pipeline import IN, OUT
from omni_bus.core.request import Request, State
from omni_bus.errors import OmniBusError, RequestCancelled, StageLost, from_info
from omni_bus.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.core.absence import Absences
    from omni_bus.core.effects import Common
    from omni_bus.core.membership import Actor
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.frames import Route, RouteEdge

MAX_WAIT_S = 10.0
"""A request waits so long for a replica of a stage that lost its last one: a process is back within seconds unless it
loads a large model, and then its client had better know."""

_SUFFIX = ".2"


def origin(request: RequestId) -> RequestId:
    """Return the request of which this one is the successor; itself if it is none."""
    return request.removesuffix(_SUFFIX)


def error_for_lost(actor: Actor, route: Route, pipeline: Pipeline) -> OmniBusError | None:
    """Return the error that a request ends with when `actor` is lost; None if it does not concern the request."""
    if actor.sender == route.gateway.sender:
        return RequestCancelled("the client's gateway is gone")
    lost = [stage for stage, peer in route.stages.items() if peer.sender == actor.sender]
    return stage_lost(lost[0], route, pipeline) if lost else None


def stage_lost(stage: str, route: Route, pipeline: Pipeline) -> StageLost:
    """Return the error of a request whose replica of `stage` is gone."""
    return StageLost(
        f"stage '{stage}' (actor {route.stages[stage].actor}) was lost while it worked on the request",
        stage=stage,
        is_retry_safe=is_retry_safe(route, pipeline),
    )


def is_retry_safe(route: Route, pipeline: Pipeline) -> bool:
    """Whether none of the request's stages does work that must not be repeated."""
    return not pipeline.non_idempotent.intersection(route.stages)


def needed_stages(edges: Iterable[RouteEdge]) -> list[str]:
    """Return every stage that the edges touch, by name."""
    return sorted({name for edge in edges for name in (edge.source, edge.target)} - {IN, OUT})


def successor_of(entry: Request, error: OmniBusError) -> tuple[RequestId, Request] | None:
    """Return what a running request that ends with `error` goes on as; None if it may not run again.

    That is: it lost a replica, for the first time, and none of its stages does work that must not be repeated. It keeps
    its priority and what is left of its time; its id says whose successor it is.
    """
    route = entry.route
    if entry.state is not State.RUNNING or route is None or route.is_retry or entry.has_client_left:
        return None
    if not isinstance(error, StageLost) or not error.is_retry_safe:
        return None
    request = entry.submit.request + _SUFFIX
    successor = Request(
        submit=msgspec.structs.replace(entry.submit, request=request),
        client=entry.client,
        pipeline=entry.pipeline,
        edges=entry.edges,
        received_at=entry.received_at,
        deadline=entry.deadline,
        state=State.RECOVERING,
        cause=error.to_info(),
    )
    return request, successor


class Recovery:
    """Requests that wait, in order and not for long, for a replica of a stage that has lost its last one.

    Args:
        missing: a stage that these edges touch which has no replica that may be bound or is coming back, if there is
            one. For a stage whose replica is coming back, nobody waits here: that may take long, and blames nobody.
        absences: which stages have no hope.
    """

    def __init__(self, missing: Callable[[Iterable[RouteEdge]], str | None], absences: Absences) -> None:
        self._missing = missing
        self._absences = absences
        self._waiting: dict[RequestId, Request] = {}

    def wait(self, request: RequestId, entry: Request, now: float) -> list[Common]:
        """Have a request wait, or go on waiting: until `recover_by`, however often a replica comes and goes."""
        if entry.recover_by is None:
            entry.recover_by = now + MAX_WAIT_S
        self._waiting[request] = entry
        return [SetTimer(("recover", request), entry.recover_by)]

    def may_wait(self, entry: Request, stage: str, now: float) -> bool:
        """Whether it has time left, and the stage a chance."""
        has_time = entry.recover_by is None or now < entry.recover_by
        return has_time and not self._absences.is_degraded(stage) and not self._absences.is_asleep(stage)

    def is_ready(self, entry: Request) -> bool:
        """Whether each of its stages has a replica, or one that is coming back."""
        return self._missing(entry.edges) is None

    def leave(self, request: RequestId) -> None:
        """Forget a request; unknown ones are ignored."""
        self._waiting.pop(request, None)

    def take_ready(self) -> list[tuple[RequestId, Request]]:
        """Take those that are ready."""
        ready = [(request, entry) for request, entry in self._waiting.items() if self.is_ready(entry)]
        for request, _ in ready:
            del self._waiting[request]
        return ready

    def hopeless(self, now: float) -> list[tuple[RequestId, OmniBusError]]:
        """Return those that wait for a stage which does not come back, and the error of each."""
        found: list[tuple[RequestId, OmniBusError]] = []
        for request, entry in self._waiting.items():
            stage = next((stage for stage in needed_stages(entry.edges) if self._absences.is_degraded(stage)), None)
            if stage is not None:
                found.append((request, self._absences.unavailable(stage, now)))
        return found

    def error_after_wait(self, request: RequestId, now: float) -> OmniBusError | None:
        """Return what a request that waited in vain ends with: the loss behind it if it is a successor."""
        entry = self._waiting.get(request)
        missing = None if entry is None else self._missing(entry.edges)
        if entry is None or missing is None:
            return None
        if entry.cause is None:
            return self._absences.unavailable(missing, now)
        error = from_info(entry.cause)
        error.message += f", and none came in its place within {MAX_WAIT_S:g} s"
        return error
