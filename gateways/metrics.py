"""``GET /metrics``: what this gateway counts, the coordinator's tables, and what each stage's engine measures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateways.health import is_kept
from gateways.http_counts import exposed_name, one
from gateways.load import ask_status
from gateways.openapi import Answer, Operation
from omni_bus.observe.exposition import CONTENT_TYPE, exposition
from omni_bus.wire.metrics import Metric, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateways.health import ActorRows
    from gateways.http_counts import HttpCounts
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.metrics import Kind

OPERATION = Operation(
    method="get",
    path="/metrics",
    name="metrics",
    summary="What is counted and measured here and in the stages, for Prometheus",
    answers={200: Answer(description="the text format", content={"text/plain": {"type": "string"}})},
)


async def metrics_response(
    client: BusClient, measures: ActorRows, pipelines: Mapping[str, Pipeline], counts: HttpCounts
) -> web.Response:
    """Ask the coordinator and its actors, and write all that is known; without it, what this process knows."""
    rows, status = await asyncio.gather(measures.rows(), ask_status(client))
    found = [
        *counts.metrics(client.name),
        one("omni_bus_coordinator_up", "gauge", "Whether the coordinator answers.", status is not None, {}),
        *(of_coordinator(status, pipelines) if status is not None else ()),
        *of_stages(rows or (), pipelines.values()),
    ]
    return web.Response(body=exposition(found).encode(), headers={"Content-Type": CONTENT_TYPE})


def of_coordinator(status: dict[str, Any], pipelines: Mapping[str, Pipeline]) -> list[Metric]:
    """Return what the coordinator counts, from its answer to ``status``: of all requests, and of these pipelines."""
    requests, frames = dict(status["requests"]), status["frames"]
    live, rerouted = requests.pop("live"), requests.pop("rerouted")
    found = [
        one("omni_bus_requests_live", "gauge", "Requests that have not ended.", live, {}),
        one("omni_bus_requests_held", "gauge", "Requests that wait for a replica.", status["held"], {}),
        _by("omni_bus_requests", "counter", "Requests that have ended.", "outcome", requests),
        one("omni_bus_requests_rerouted", "counter", "Requests that went on at another replica.", rerouted, {}),
        _by("omni_bus_frames_received", "counter", "Frames that reached the coordinator.", "frame", frames["received"]),
        _by("omni_bus_frames_sent", "counter", "Frames that the coordinator sent.", "frame", frames["sent"]),
    ]
    counts = {name: found for name, found in status["pipelines"].items() if name in pipelines}
    return found + [
        _by(f"omni_bus_pipeline_{key}", "gauge", words, "pipeline", {name: row[key] for name, row in counts.items()})
        for key, words in (
            ("in_flight", "Requests of a pipeline that run."),
            ("max_in_flight", "How many may run."),
            ("queued", "Requests of a pipeline that wait to run."),
            ("max_queued", "How many may wait."),
            ("queued_bytes", "Input that waits with them."),
        )
    ]


def of_stages(rows: Iterable[dict[str, Any]], pipelines: Iterable[Pipeline]) -> list[Metric]:
    """Return what replicas count and their engines measure, from the coordinator's answer to ``metrics``.

    Args:
        rows: one for each actor.
        pipelines: whose stages are told of; a stage's `model_name` is what the first that has it is served as.
    """
    models: dict[str, str] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            models.setdefault(stage, pipeline.serve_as)
    found: list[Metric] = []
    for row in rows:
        if row["role"] != "stage" or row["stage"] not in models:
            continue
        labels = {"model_name": models[row["stage"]], "stage": row["stage"], "replica": str(row["replica"])}
        serves = row["is_live"] and row["is_ready"] and not is_kept(row)
        found.append(one("omni_bus_stage_up", "gauge", "Whether the replica serves.", serves, labels))
        found += _of_stats(row.get("stats", {}), labels)
        found += [_labelled(metric, labels) for metric in msgspec.convert(row.get("metrics", ()), tuple[Metric, ...])]
    return found


def _of_stats(stats: dict[str, int], labels: dict[str, str]) -> list[Metric]:
    if not stats:
        return []
    states, outcomes = ("active", "waiting", "suspended"), ("done", "failed", "cancelled")
    now, ended = ({name: stats[name] for name in names} for names in (states, outcomes))
    return [
        _by("omni_bus_stage_requests_now", "gauge", "Requests in a replica.", "state", now, labels),
        _by("omni_bus_stage_requests", "counter", "Requests that a replica has ended.", "outcome", ended, labels),
        one("omni_bus_stage_steps", "counter", "Steps of a replica's engine.", stats["steps"], labels),
        one("omni_bus_stage_buffered_bytes", "gauge", "Output without credit.", stats["buffered_bytes"], labels),
    ]


def _labelled(metric: Metric, labels: dict[str, str]) -> Metric:
    samples = tuple(Sample(sample.name, sample.value, {**labels, **sample.labels}) for sample in metric.samples)
    return Metric(metric.name, metric.kind, metric.help, samples)


def _by(
    name: str, kind: Kind, words: str, label: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> Metric:
    exposed = exposed_name(name, kind)
    found = (Sample(exposed, float(value), {**(labels or {}), label: of}) for of, value in values.items())
    return Metric(name, kind, words, tuple(found))
