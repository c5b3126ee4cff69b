"""What one simulated schedule consists of, drawn from its seed: pipelines, engines, requests, delays, faults."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec
from msgspec.structs import replace

from omni_bus.core.pipeline import IN, OUT, Pipeline
from omni_bus.core.quota import Quota
from omni_bus.core.stage import EngineShape
from omni_bus.wire.frames import RouteEdge

Graph = tuple[tuple[str, str, str, str], ...]

GRAPHS: dict[str, Graph] = {
    "single": (("in", "prompt", "llm", "prompt"), ("llm", "text", "out", "text")),
    "chain": (
        ("in", "prompt", "llm", "prompt"),
        ("llm", "text", "talker", "text"),
        ("talker", "codes", "voice", "codes"),
        ("voice", "audio", "out", "audio"),
    ),
    "fan_out": (
        ("in", "prompt", "llm", "prompt"),
        ("llm", "text", "out", "text"),
        ("llm", "text", "voice", "text"),
        ("voice", "audio", "out", "audio"),
    ),
    "diamond": (
        ("in", "prompt", "llm", "prompt"),
        ("in", "image", "vision", "image"),
        ("llm", "text", "talker", "text"),
        ("llm", "text", "vision", "text"),
        ("talker", "codes", "voice", "codes"),
        ("vision", "hidden", "voice", "hidden"),
        ("voice", "audio", "out", "audio"),
    ),
}
"""Pipelines by name: (source, port, target, port)."""

MAX_REQUESTS = 4
"""In one schedule."""

FaultKind = Literal["kill_stage", "kill_gateway", "kill_coordinator", "stall", "break", "hang", "drain"]
Reader = Literal["fast", "slow", "stuck"]


class RequestPlan(msgspec.Struct):
    """One request as its application will run it; times are virtual seconds."""

    id: str
    pipeline: str
    outputs: tuple[str, ...]
    submit_at: float
    num_inputs: int
    reader: Reader
    priority: int
    timeout_s: float | None
    cancel_after_events: int | None
    """Cancelled once so many events of it were seen by the application; 0 right after the submit."""
    is_burst: bool
    """Sends all input at once, credit or not."""
    input_s: float
    """Mean time between inputs."""
    has_bad_params: bool
    key: str = ""
    input_bytes: int = 0
    tokens: int = 0
    prefix: tuple[int, ...] = ()
    session: str = ""


class FaultPlan(msgspec.Struct):
    """One fault, when the world has made so many steps."""

    kind: FaultKind
    at_step: int
    down_s: float | None
    """Until the restart, or the end of a stall; None: never comes back."""
    loses_frames: bool
    """Frames to a dead coordinator are lost; otherwise the next one gets them."""


class OperationPlan(msgspec.Struct):
    """One operation on a replica, at a virtual second or when the one before it is over.

    One that is `beside` waits only for those of its stage, or for all if it is to wake.
    """

    kind: Literal["restart", "drain", "scale_down", "sleep", "wake"]
    at_s: float
    stage: str
    replica: int
    timeout_s: float
    """How long running requests may take; of a drain, until it is undone."""
    is_forced: bool
    level: int = 0
    """Of sleep. Replica -1 means all of the stage; an order to wake is for all that sleep."""
    is_beside: bool = False


class StagePlan(msgspec.Struct):
    """One stage: how its engine is driven, and how many requests it takes."""

    shape: EngineShape
    replicas: int
    width: int
    max_resident: int
    while_asleep: Literal["refuse", "queue"] = "refuse"
    """What becomes of requests while all replicas sleep."""


class Scenario(msgspec.Struct):
    """All that a schedule is, apart from chance while it runs."""

    pipelines: dict[str, Pipeline]
    stages: dict[str, StagePlan]
    requests: list[list[RequestPlan]]
    """By gateway."""
    faults: list[FaultPlan]
    delay_s: float
    """Mean delay of a frame on a link."""
    step_s: float
    """Mean duration of an engine step."""
    failure_rate: float
    """Of requests in each engine."""
    heartbeat_s: float
    asks_health: bool
    has_supervisor: bool
    """Somebody sees processes end; else their heartbeats tell."""
    operations: list[OperationPlan] = []
    quotas: dict[str, Quota] = {}
    """Of callers; without any, all requests come from one."""


def _pipeline(name: str, rng: Random) -> Pipeline:
    edges = tuple(
        RouteEdge(
            *edge, "text", window_chunks=rng.choice((1, 1, 2, 3, 8)), window_bytes=rng.choice((64, 150, 400, 4096))
        )
        for edge in GRAPHS[name]
    )
    return Pipeline(
        name=name,
        serve_as=name,
        aliases=(),
        edges=edges,
        non_idempotent=frozenset({"voice"} if rng.random() < 0.3 else ()),
        max_in_flight=rng.choice((1, 2, 8)),
        max_queued=rng.choice((0, 1, 8)),
        timeout_s=rng.choice((None, None, 20.0)),
    )


def _request(name: str, pipeline: Pipeline, rng: Random) -> RequestPlan:
    outputs = tuple(port for port in pipeline.outputs if rng.random() < 0.5)
    roll = rng.random()
    reader: Reader = "fast" if roll < 0.6 else "slow" if roll < 0.9 else "stuck"
    cancel = rng.randrange(12) if rng.random() < 0.25 else None
    timeout_s = rng.choice((0.0, 0.05, 1.0)) if rng.random() < 0.15 else None
    if reader == "stuck" and timeout_s is None:
        timeout_s = 3.0
    return RequestPlan(
        id=name,
        pipeline=pipeline.name,
        outputs=outputs,
        submit_at=rng.random() * rng.choice((0.0, 0.05, 0.5)),
        num_inputs=rng.choice((0, 1, 1, 2, 4)),
        reader=reader,
        priority=rng.choice((0, 0, 1)),
        timeout_s=timeout_s,
        cancel_after_events=cancel,
        is_burst=rng.random() < 0.3,
        input_s=rng.choice((0.001, 0.001, 0.2)),
        has_bad_params=rng.random() < 0.03,
    )


def _fault(rng: Random) -> FaultPlan:
    kinds: tuple[FaultKind, ...] = ("kill_stage", "kill_gateway", "kill_coordinator", "stall", "break", "hang", "drain")
    kind = rng.choices(kinds, (6, 3, 6, 4, 5, 2, 0.5))[0]
    down_s: float | None = rng.choice((0.001, 0.05, 0.3, 1.0, 7.0))
    if kind in {"kill_stage", "kill_gateway"} and rng.random() < 0.2:
        down_s = None
    return FaultPlan(kind, rng.randrange(1, rng.choice((40, 250))), down_s, loses_frames=rng.random() < 0.5)


def _quota(rng: Random) -> Quota:
    return Quota(
        weight=rng.choice((0.5, 1.0, 4.0)),
        max_in_flight=rng.choice((None, 1, 1)),
        max_queued=rng.choice((None, 0, 1)),
        requests_per_minute=rng.choice((None, None, 60.0)),
        max_priority=rng.choice((None, None, 0)),
    )


def _give_callers(scenario: Scenario, rng: Random) -> None:
    """Part the requests among callers, some with limits of their own, and limit the input that waits."""
    scenario.quotas = {caller: _quota(rng) for caller in "ab"}
    for name, pipeline in scenario.pipelines.items():
        scenario.pipelines[name] = msgspec.structs.replace(pipeline, max_queued_bytes=rng.choice((0, 100, 1000)))
    for plans in scenario.requests:
        for plan in plans:
            plan.key = rng.choice(("", "a", "a", "b"))
            plan.input_bytes = rng.choice((0, 1, 60, 101))
            plan.tokens = rng.choice((0, 1, 1000))
            plan.prefix = tuple(range(rng.choice((0, 1, 3))))
            plan.session = rng.choice(("", "", "s", "t"))


def draw(rng: Random) -> Scenario:
    """Draw a scenario: small, since many small ones find more than a few large ones."""
    # Apart, so that what else a seed draws does not depend on it.
    apart = Random(rng.getstate()[1][3])
    scenario = _draw(rng)
    if apart.random() < 0.4:
        _give_callers(scenario, apart)
    return scenario


def _draw(rng: Random) -> Scenario:
    names = rng.sample(tuple(GRAPHS), k=2) if rng.random() < 0.15 else [rng.choice(tuple(GRAPHS))]
    pipelines = {name: _pipeline(name, rng) for name in names}
    is_branching = any(pipeline.is_branching for pipeline in pipelines.values())
    stages: dict[str, StagePlan] = {}
    for pipeline in pipelines.values():
        for stage in pipeline.stages:
            # Where requests need slots of several stages at once, in no common order, a slot for each must exist:
            # see `Pipeline.is_branching`.
            width = MAX_REQUESTS if is_branching else rng.choice((1, 2, 4))
            stages[stage] = StagePlan(
                shape=rng.choice(tuple(EngineShape)),
                replicas=2 if rng.random() < 0.15 else 1,
                width=width,
                max_resident=width + rng.choice((0, 2)),
            )
    num_gateways = 2 if rng.random() < 0.15 else 1
    requests: list[list[RequestPlan]] = [[] for _ in range(num_gateways)]
    for number in range(rng.randrange(1, MAX_REQUESTS + 1)):
        pipeline = pipelines[rng.choice(names)]
        rng.choice(requests).append(_request(f"r{number}", pipeline, rng))
    num_faults = rng.choice((0, 0, 1, 1, 2))
    return Scenario(
        pipelines=pipelines,
        stages=stages,
        requests=requests,
        faults=sorted((_fault(rng) for _ in range(num_faults)), key=lambda fault: fault.at_step),
        delay_s=rng.choice((0.0001, 0.001, 0.02)),
        step_s=rng.choice((0.0001, 0.001, 0.02)),
        failure_rate=rng.choice((0.0, 0.0, 0.1)),
        heartbeat_s=rng.choice((1.0, 0.1)),
        asks_health=rng.random() < 0.1,
        has_supervisor=rng.random() < 0.5,
    )


def draw_operations(scenario: Scenario, rng: Random) -> Scenario:
    """Add operations on stages to some scenarios."""
    if rng.random() < 0.7:
        return scenario
    names = sorted(scenario.stages)
    stages = dict(scenario.stages)
    operations: list[OperationPlan] = []
    at_s = 0.0
    for _ in range(rng.choice((1, 1, 2, 3))):
        at_s += rng.random() * rng.choice((0.02, 0.2, 1.0))
        stage = rng.choice(names)
        kind = rng.choice(("restart", "restart", "drain", "scale_down"))
        if kind != "restart" or rng.random() < 0.5:
            # Drained for good it would be missed, and one is always left.
            stages[stage] = replace(stages[stage], replicas=max(2, stages[stage].replicas))
        operations.append(
            OperationPlan(
                kind=kind,
                at_s=at_s,
                stage=stage,
                replica=rng.randrange(stages[stage].replicas),
                timeout_s=rng.choice((0.05, 1.0, 30.0)),
                is_forced=rng.random() < 0.2,
            )
        )
    num_scaled = {name: sum(o.kind == "scale_down" and o.stage == name for o in operations) for name in names}
    for name, count in num_scaled.items():
        stages[name] = replace(stages[name], replicas=stages[name].replicas + count)
    return replace(scenario, stages=stages, operations=operations)


def draw_rests(scenario: Scenario, rng: Random) -> Scenario:
    """Add orders to sleep to some scenarios, before and after other operations, and in the end one to wake."""
    if rng.random() < 0.8:
        return scenario
    names = sorted(scenario.stages)
    stages = {
        name: replace(plan, while_asleep=rng.choice(("refuse", "queue"))) for name, plan in scenario.stages.items()
    }
    latest_s = rng.choice((0.1, 0.5, 2.0))
    operations = list(scenario.operations)
    operations += [
        OperationPlan(
            kind="sleep",
            at_s=rng.random() * latest_s,
            stage=rng.choice(names),
            replica=rng.choice((-1, -1, 0)),
            timeout_s=rng.choice((0.05, 1.0, 30.0)),
            is_forced=rng.random() < 0.2,
            level=rng.choice((1, 2)),
        )
        for _ in range(rng.choice((1, 1, 2)))
    ]
    wake = OperationPlan("wake", 0.0, "", 0, timeout_s=0.0, is_forced=False)
    if rng.random() < 0.3:
        operations.append(replace(wake, at_s=rng.random() * latest_s))
    operations.sort(key=lambda operation: operation.at_s)
    last_s = max(latest_s, operations[-1].at_s) + rng.random() * rng.choice((0.1, 3.0))
    return replace(scenario, stages=stages, operations=[*operations, replace(wake, at_s=last_s)])


def draw_besides(scenario: Scenario, rng: Random) -> Scenario:
    """Let some operations begin while others are under way, as those on different stages may."""
    if len(scenario.operations) < 2 or rng.random() < 0.5:
        return scenario
    *others, last = scenario.operations  # the last one may be there to wake what the others put to sleep
    operations = [replace(plan, is_beside=plan.kind != "wake" and rng.random() < 0.6) for plan in others]
    return replace(scenario, operations=[*operations, last])


def sources(pipeline: Pipeline) -> dict[tuple[str, str], str]:
    """Return by (target, port) what feeds it, as ``source.port``."""
    return {(edge.target, edge.target_port): f"{edge.source}.{edge.source_port}" for edge in pipeline.edges}


__all__ = [
    "GRAPHS",
    "IN",
    "OUT",
    "FaultPlan",
    "OperationPlan",
    "RequestPlan",
    "Scenario",
    "StagePlan",
    "draw",
    "draw_besides",
    "draw_operations",
    "draw_rests",
    "sources",
]
