"""``omni-bus status``: the running deployments of this user, and what the actors of one of them do."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from omni_bus.cli.visit import add_visit_arguments, visit
from omni_bus.errors import BadInput, Unavailable
from omni_bus.observe.exposition import labels_of
from omni_bus.runtime import rundir
from omni_bus.wire.metrics import Metric

ANSWER_S = 5.0
"""The coordinator waits a second for its actors; more than that is a fault."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    add_visit_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the state; return 0 if all actors are live, ready and neither drained nor asleep, else 1."""
    deployments = {} if args.connect is not None else rundir.running(rundir.root(os.environ))
    if args.connect is None and args.name is None and len(deployments) != 1:
        if args.json:
            print(json.dumps({name: {"process": about.pid} for name, about in deployments.items()}))
        for name, about in deployments.items() if not args.json else ():
            urls = " ".join(about.gateways.values())
            print(f"{name}: process {about.pid}, {about.config} {urls}")
        if not deployments:
            raise BadInput(rundir.NONE_RUNS, field="--name")
        return 0
    status, actors = uvloop.run(_ask(args))
    if args.json:
        print(json.dumps({**status, "actors": [_with_values(actor) for actor in actors]}))
    else:
        _print(status, actors)
    return 0 if all(_serves(actor) for actor in actors) else 1


async def _ask(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with visit(args) as (client, _):
        try:
            async with asyncio.timeout(ANSWER_S):
                # Only what is for programs has room for what the engines measure.
                actors = await client.admin("metrics" if args.json else "health")
                status = await client.admin("status")
        except TimeoutError:
            raise Unavailable(f"the coordinator does not answer (waited {ANSWER_S:g} s)") from None
    return status, actors


def _with_values(actor: dict[str, Any]) -> dict[str, Any]:
    """Write what an engine measures as one number for each name and labels; buckets of histograms are left out."""
    if "metrics" not in actor:
        return actor
    samples = [sample for metric in msgspec.convert(actor["metrics"], tuple[Metric, ...]) for sample in metric.samples]
    values = {sample.name + labels_of(sample.labels): sample.value for sample in samples if "le" not in sample.labels}
    return {**actor, "metrics": values}


def _print(status: dict[str, Any], actors: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    counted = ("active", "waiting", "suspended", "done", "failed", "cancelled")
    titles = ("active", "wait", "susp", "done", "failed", "canc")
    style: dict[str, Any] = {"box": None, "header_style": "dim", "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table("actor", "phase", "for", "answers", **style)
    for title in titles:
        table.add_column(title, justify="right")
    for actor in sorted(actors, key=lambda actor: (actor["role"], actor["actor"])):
        stats = actor.get("stats", {}) if actor["role"] == "stage" else {}
        trip = f"{actor['round_trip_s'] * 1000:.1f} ms" if actor["is_live"] else "NO"
        counts = (str(stats.get(name, "")) for name in counted)
        is_loading = not actor["is_ready"] and actor["fraction"]
        phase = f"{actor['phase']} {actor['fraction']:.0%}" if is_loading else actor["phase"]
        table.add_row(actor["actor"], phase, _duration(actor["elapsed_s"]), trip, *counts)
    console.print(table)
    for actor in actors:
        if reason := actor.get("reason"):
            console.print(f"{actor['actor']}: {reason}")
    for name, counts in status["pipelines"].items():
        console.print(
            f"pipeline {name}: {counts['in_flight']} of {counts['max_in_flight']} in flight, "
            f"{counts['queued']} of {counts['max_queued']} queued, "
            f"{_size(counts['queued_bytes'])} of {_size(counts['max_queued_bytes'])} with them"
        )
    for stage, (wanted, here) in _replicas(actors).items():
        if wanted != here:
            console.print(f"stage {stage}: {here} of {wanted} wanted replicas serve")
    if status["held"]:
        console.print(f"{status['held']} requests wait for a replica that restarts or sleeps")
    _print_callers(console, status["callers"], style)
    requests = status["requests"]
    console.print("requests: " + ", ".join(f"{count} {name}" for name, count in requests.items()))


def _serves(actor: dict[str, Any]) -> bool:
    is_kept = actor.get("is_drained") or actor.get("is_asleep")
    return bool(actor["is_live"] and actor["is_ready"] and not is_kept)


def _replicas(actors: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return how many replicas of each stage are wanted, and how many can be bound."""
    counts: dict[str, tuple[int, int]] = {}
    for actor in actors:
        if "wanted" in actor:
            counts[actor["stage"]] = (actor["wanted"], counts.get(actor["stage"], (0, 0))[1] + _serves(actor))
    return counts


def _print_callers(console: Console, rows: list[dict[str, Any]], style: dict[str, Any]) -> None:
    """Print what each caller uses; nothing where all requests came without a key and none was refused."""
    if all(not row["caller"] and not row["refused"] for row in rows):
        return
    table = Table("caller", "pipeline", **style)
    for title in ("in flight", "queued", "admitted", "refused"):
        table.add_column(title, justify="right")
    table.add_column("by")
    for row in rows:
        counts = (str(row[name]) for name in ("in_flight", "queued", "admitted", "refused"))
        why = ", ".join(f"{count} {code}" for code, count in row["refused_by"].items())
        table.add_row(row["caller"] or "(no key)", row["pipeline"], *counts, why)
    console.print(table)


def _size(num_bytes: int) -> str:
    """Write a number of bytes with the largest unit that it fills."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
