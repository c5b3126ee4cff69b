"""What ``/health`` says of rows that the coordinator gives."""

from __future__ import annotations

from typing import Any

import pytest

from gateways.health import ActorRows, report
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import Unavailable
from omni_bus.wire.frames import RouteEdge

EDGES = (
    RouteEdge("in", "messages", "llm", "prompt", "json", 8, 2**20),
    RouteEdge("llm", "text", "out", "text", "text", 8, 2**20),
)
PIPELINES = {"chat": Pipeline("chat", "chat", (), EDGES)}


def row(replica: int = 0, **fields: Any) -> dict[str, Any]:
    about = {"actor": f"llm.{replica}", "role": "stage", "stage": "llm", "replica": replica, "fraction": 0.0}
    return about | {"phase": "ready", "is_ready": True, "is_live": True, "elapsed_s": 2.5} | fields


SILENT = row(1, is_live=False, reason="does not answer (waited 1 s)")
AWAY = row(2, phase="backing off", is_ready=False, is_live=False, reason="SIGKILL")


def test_one_replica_that_serves_is_enough_and_the_others_are_told() -> None:
    told = report([row(), AWAY, SILENT], PIPELINES)

    assert (told["ready"], "reason" in told) == (True, False)
    replicas = told["stages"]["llm"]["replicas"]
    assert [(one["replica"], one.get("reason")) for one in replicas] == [
        (0, None),
        (1, "does not answer (waited 1 s)"),
        (2, "SIGKILL"),
    ]


def test_reason_says_of_each_replica_why_it_does_not_serve() -> None:
    loading = row(0, phase="weights", is_ready=False)

    told = report([loading, SILENT, AWAY], PIPELINES)

    assert told["reason"] == (
        "stage llm: replica 0 is in phase 'weights' (2.5 s), replica 1 does not answer (waited 1 s), "
        "replica 2 is in phase 'backing off' (2.5 s): SIGKILL"
    )


def test_unknown_stage_and_silent_coordinator_are_told() -> None:
    assert report([], PIPELINES)["reason"] == "stage llm has no replica"
    assert report(None, PIPELINES)["reason"] == "the coordinator does not answer"


class FakeClient:
    """A client whose coordinator is lost with the question."""

    async def admin(self, op: str) -> Any:
        raise Unavailable(f"the coordinator was lost before it answered '{op}'")


async def test_question_that_is_lost_with_the_coordinator_is_no_fault() -> None:
    assert await ActorRows(FakeClient()).rows() is None  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [None, [row()]])
def test_gateway_that_stops_says_so_whatever_the_stages_do(rows: Any) -> None:
    assert report(rows, PIPELINES, is_draining=True)["reason"] == "the server is stopping"
