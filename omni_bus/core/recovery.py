"""What a lost actor means for a request: with which error it ends, and whether its client may safely try again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.errors import OmniBusError, RequestCancelled, StageLost

if TYPE_CHECKING:
    from omni_bus.core.membership import Actor
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.frames import Route


def error_for_lost(actor: Actor, route: Route, pipeline: Pipeline) -> OmniBusError | None:
    """Return the error that a request ends with when `actor` is lost; None if it does not concern the request.

    A retry is safe where none of the request's stages does work that must not be repeated.
    """
    if actor.sender == route.gateway.sender:
        return RequestCancelled("the client's gateway is gone")
    lost = [stage for stage, peer in route.stages.items() if peer.sender == actor.sender]
    return stage_lost(lost[0], route, pipeline) if lost else None


def stage_lost(stage: str, route: Route, pipeline: Pipeline) -> StageLost:
    """Return the error of a request whose replica of `stage` is gone."""
    return StageLost(
        f"stage '{stage}' (actor {route.stages[stage].actor}) was lost while it worked on the request",
        stage=stage,
        is_retry_safe=not pipeline.non_idempotent.intersection(route.stages),
    )
