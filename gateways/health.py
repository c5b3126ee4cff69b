"""Health as a load balancer wants it: a bounded round trip to every actor, and the truth about each stage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from omni_bus.errors import Unavailable
from omni_bus.gateway import STOPPING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline

ROUND_TIMEOUT_S = 1.5
"""The coordinator bounds its pings by one second; one that hasn't answered after this is gone. Whoever asks hears the
truth within two seconds."""

_STAGE_KEYS = (
    "replica",
    "phase",
    "fraction",
    "is_ready",
    "is_live",
    "is_drained",
    "is_asleep",
    "elapsed_s",
    "reason",
    "round_trip_s",
    "stats",
)
_GATEWAY_KEYS = ("is_ready", "is_live", "elapsed_s", "round_trip_s")


class ActorRows:
    """The coordinator's word on each actor, asked for once for all who ask at the same time.

    Args:
        client: the bus.
        operation: ``health``, or ``metrics``: the same rows, with what engines measure.
    """

    def __init__(self, client: BusClient, operation: str = "health") -> None:
        self._client = client
        self._operation = operation
        self._round: asyncio.Task[list[dict[str, Any]] | None] | None = None

    async def rows(self) -> list[dict[str, Any]] | None:
        """Return the coordinator's row for each actor; None when it does not answer."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._ask())
        return await asyncio.shield(self._round)

    async def _ask(self) -> list[dict[str, Any]] | None:
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                return await self._client.admin(self._operation)
        except (TimeoutError, Unavailable):  # it has been silent for long, or was lost with the question
            return None


def report(
    rows: list[dict[str, Any]] | None, pipelines: Mapping[str, Pipeline], *, is_draining: bool = False
) -> dict[str, Any]:
    """Return the answer of ``/health``.

    Args:
        rows: one for each actor, as the coordinator gives them; None when it did not answer.
        pipelines: what the gateway serves; each of their stages needs a replica that is live, ready and not drained.
        is_draining: the gateway takes no new requests.
    """
    names = dict.fromkeys(stage for pipeline in pipelines.values() for stage in pipeline.stages)
    stages: dict[str, dict[str, Any]] = {name: {"replicas": []} for name in names}
    gateways: dict[str, dict[str, Any]] = {}
    for row in rows or ():
        if row["role"] == "stage":
            stage = stages.setdefault(row["stage"], {"replicas": []})
            if "wanted" in row:
                stage["wanted"] = row["wanted"]
            stage["replicas"].append({key: row[key] for key in _STAGE_KEYS if key in row})
        elif row["role"] == "gateway":
            gateways[row["actor"]] = {key: row[key] for key in _GATEWAY_KEYS if key in row}
    for stage in stages.values():
        stage["replicas"].sort(key=lambda replica: replica["replica"])
    reason = STOPPING if is_draining else _reason(rows, names, stages)
    return {
        "status": "unhealthy" if reason else "healthy",
        "live": True,
        "ready": not reason,
        **({"reason": reason} if reason else {}),
        "stages": stages,
        "gateways": gateways,
    }


def is_kept(row: Mapping[str, Any]) -> bool:
    """Whether a replica gets nothing new because a person had it drained or put to sleep."""
    return bool(row.get("is_drained") or row.get("is_asleep"))


def _reason(rows: list[dict[str, Any]] | None, needed: Mapping[str, None], stages: dict[str, dict[str, Any]]) -> str:
    if rows is None:
        return "the coordinator does not answer"
    reasons = [_stage_reason(name, stages[name]["replicas"]) for name in needed]
    return "; ".join(reason for reason in reasons if reason)


def _stage_reason(name: str, replicas: list[dict[str, Any]]) -> str:
    if any(replica["is_live"] and replica["is_ready"] and not is_kept(replica) for replica in replicas):
        return ""
    if not replicas:
        return f"stage {name} has no replica"
    return f"stage {name}: {', '.join(_replica_words(replica) for replica in replicas)}"


def _replica_words(replica: dict[str, Any]) -> str:
    name, phase, reason = f"replica {replica['replica']}", replica["phase"], replica.get("reason", "")
    if phase == "ready":  # so it told last
        return f"{name} {reason}"
    if is_kept(replica) or replica["elapsed_s"] is None:
        return f"{name} is {phase}"
    return f"{name} is in phase '{phase}' ({replica['elapsed_s']} s)" + (f": {reason}" if reason else "")
