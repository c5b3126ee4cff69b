"""What a loss means for a request: with which error it ends, and whether its client may safely try again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.errors import LinkBroken, OmniBusError, RequestCancelled, StageLost

if TYPE_CHECKING:
    from collections.abc import Container

    from omni_bus.core.membership import Actor
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.frames import Broken, Route


def error_for_lost(actor: Actor, route: Route, pipeline: Pipeline) -> OmniBusError | None:
    """Return the error that a request ends with when `actor` is lost; None if it does not concern the request.

    A retry is safe where none of the request's stages does work that must not be repeated.
    """
    if actor.peer == route.gateway:
        return RequestCancelled("the client's gateway is gone")
    lost = [stage for stage, peer in route.stages.items() if peer == actor.peer]
    return stage_lost(lost[0], route, pipeline) if lost else None


def stage_lost(stage: str, route: Route, pipeline: Pipeline) -> StageLost:
    """Return the error of a request whose replica of `stage` is gone."""
    return StageLost(
        f"stage '{stage}' (actor {route.stages[stage].actor}) was lost while it worked on the request",
        stage=stage,
        is_retry_safe=is_retry_safe(route, pipeline),
    )


def error_for_broken(broken: Broken, route: Route, pending: Container[str], pipeline: Pipeline) -> LinkBroken | None:
    """Return the error that a request ends with when a connection broke; None if it does not concern the request.

    It does where the two ends share an edge and a stage among them is still at work: it may wait for frames that are
    lost. An edge carries chunks one way and credit the other.
    """
    ends = {broken.source.sender, broken.target.sender}
    for number, edge in enumerate(route.edges):
        at_work = edge.source if edge.source in pending else edge.target if edge.target in pending else ""
        if at_work and {route.source(number).sender, route.target(number).sender} == ends:
            return LinkBroken(
                f"the connection from {broken.source.actor} to {broken.target.actor} broke while stage '{at_work}' "
                "worked on the request",
                stage=at_work,
                is_retry_safe=is_retry_safe(route, pipeline),
            )
    return None


def is_retry_safe(route: Route, pipeline: Pipeline) -> bool:
    """Whether none of the request's stages does work that must not be repeated."""
    return not pipeline.non_idempotent.intersection(route.stages)
