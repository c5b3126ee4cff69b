"""Sleep and wake over HTTP, by the routes and names of vLLM's server; the deployment's supervisor carries them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from gateways.fields import shown
from gateways.health import is_kept
from gateways.http import json_response
from gateways.openapi import Answer, Operation
from gateways.problems import Problem
from omni_bus.core.administration import stage_of
from omni_bus.runtime.control import BAD_ORDER, DONE, NOT_CLEAN, Sleep, Wake, give_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateways.origins import Origins
    from omni_bus.core.pipeline import Pipeline

MODES = ("abort", "wait")
LEVELS = ("1", "2")

_STAGE = {
    "type": "array",
    "items": {"type": "string"},
    "description": "STAGE or STAGE.REPLICA of the served pipelines; by default all their stages",
}


def _done(status: str, field: str, kind: str) -> dict[int, Answer]:
    fields = {"status": {"const": status}, field: {"type": kind}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {200: Answer(description="it is done", content={"application/json": schema})}


OPERATIONS = (
    Operation(
        method="post",
        path="/sleep",
        name="sleep",
        summary="Have engines give their memory back",
        queries={
            "level": {
                "enum": [1, 2],
                "default": 1,
                "description": "1 keeps the weights outside of accelerators, 2 keeps nothing",
            },
            "mode": {
                "enum": list(MODES),
                "default": "abort",
                "description": "abort ends running requests with an error, wait lets them end",
            },
            "stage": _STAGE,
        },
        answers=_done("sleeping", "level", "integer"),
        errors=(400, 403, 409, 503),
    ),
    Operation(
        method="post",
        path="/wake_up",
        name="wake_up",
        summary="Wake engines that sleep",
        queries={"stage": _STAGE},
        answers=_done("awake", "tags", "null"),
        errors=(400, 403, 409, 503),
    ),
    Operation(
        method="get",
        path="/is_sleeping",
        name="is_sleeping",
        summary="Whether a stage of a served pipeline has no replica that is awake",
        answers={
            200: Answer(
                description="whether it is so",
                content={
                    "application/json": {
                        "type": "object",
                        "properties": {"is_sleeping": {"type": "boolean"}},
                        "required": ["is_sleeping"],
                        "additionalProperties": False,
                    }
                },
            )
        },
        errors=(503,),
    ),
)


class SleepRoutes:
    """The three routes.

    Args:
        control: the supervisor's socket for orders.
        pipelines: whose stages are meant where a request names none.
        origins: the pages that may give orders.
    """

    def __init__(self, control: str, pipelines: Mapping[str, Pipeline], origins: Origins) -> None:
        self._control = control
        self._origins = origins
        self._stages = tuple(dict.fromkeys(stage for pipeline in pipelines.values() for stage in pipeline.stages))

    async def sleep(self, request: web.Request) -> web.Response:
        """``POST /sleep?level=1``."""
        self._origins.check_order(request)
        query = _read_query(request, ("level", "mode", "stage"))
        level, mode = query.get("level", ["1"])[-1], query.get("mode", ["abort"])[-1]
        if level not in LEVELS:
            raise Problem(400, f"level: {shown(level)} came (allowed: 1, 2)", param="level")
        if mode not in MODES:
            raise Problem(400, f"mode: {shown(mode)} came (allowed: {', '.join(MODES)})", param="mode")
        targets = self._targets(query)
        is_forced = mode == "abort"
        await self._give(Sleep(targets, int(level), 0.0 if is_forced else None, is_forced))
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: web.Request) -> web.Response:
        """``POST /wake_up``."""
        self._origins.check_order(request)
        query = _read_query(request, ("stage",))
        await self._give(Wake(self._targets(query)))
        return json_response({"status": "awake", "tags": None})

    def _targets(self, query: dict[str, list[str]]) -> tuple[str, ...]:
        """Return the stages and replicas that are meant; those of pipelines served elsewhere are not this gateway's.

        Raises:
            Problem: 400.
        """
        targets = tuple(query.get("stage", self._stages))
        for target in targets:
            if target not in self._stages and stage_of(target) not in self._stages:
                allowed = f"STAGE or STAGE.REPLICA, of {', '.join(self._stages)}"
                raise Problem(400, f"stage: {shown(target)} came (allowed: {allowed})", param="stage")
        return targets

    async def _give(self, order: Sleep | Wake) -> None:
        """Have an order carried out; ending running requests was asked for, and is no failure then.

        Raises:
            Problem: 400 for a mistake, 409 for what is not possible now.
            Unavailable: nobody is there to carry it out.
        """
        outcome = await give_order(self._control, order, lambda news: None)
        may_cut = isinstance(order, Sleep) and order.is_forced
        if outcome.code != DONE and not (may_cut and outcome.code == NOT_CLEAN):
            raise Problem(400 if outcome.code == BAD_ORDER else 409, outcome.message)

    def is_sleeping(self, rows: Iterable[dict[str, Any]]) -> web.Response:
        """``GET /is_sleeping``, from the coordinator's rows."""
        replicas: dict[str, list[dict[str, Any]]] = {stage: [] for stage in self._stages}
        for row in rows:
            if row.get("stage") in replicas:
                replicas[row["stage"]].append(row)
        asleep = any(
            any(row.get("is_asleep") for row in found) and all(is_kept(row) for row in found)
            for found in replicas.values()
        )
        return json_response({"is_sleeping": asleep})


def _read_query(request: web.Request, known: tuple[str, ...]) -> dict[str, list[str]]:
    """Return a query's values by name.

    Raises:
        Problem: 400, one is not known here (vLLM's ``tags`` is one of them: a stage wakes as a whole).
    """
    for name in request.query:
        if name not in known:
            raise Problem(400, f"{shown(name)}: not a field of this route (allowed: {', '.join(known)})", param=name)
    return {name: request.query.getall(name) for name in request.query}
