"""Pipelines as graphs: from edges as text to `Pipeline`s, with every reason to refuse them.

An edge is ``source.port -> target.port``; ``in`` and ``out`` stand for the client. An edge's payload kind is what the
source emits, and the target must accept that; ``in`` takes the kind that its target accepts.

Where an edge can't be read or names an unknown stage, the checks of the whole graph (unreachable, dead end, port not
fed) are left out for that pipeline: they would only repeat the same mistake in other words.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from omni_bus.config.layer import Path, Problem
from omni_bus.config.schema import GatewayConfig, PipelineConfig, StageConfig
from omni_bus.core.pipeline import IN, OUT, Pipeline
from omni_bus.engine import Engine
from omni_bus.errors import did_you_mean, unknown_name
from omni_bus.wire.frames import RouteEdge

EDGE_FORM = '"source.port -> target.port", with "in" and "out" for the client\'s side'

WINDOW = 8
"""Chunks that an edge's receiver grants ahead, where the pipeline does not say how many."""

WINDOWS = {"text": 16}
"""The same for kinds whose chunks are small and many. A grant comes back every half of a window and costs both ends
nearly as much as a token does, with 8 a tenth of all that they do. With 32, a thousand streams that outrun their reader
have so many chunks under way that each costs more (`scripts/results/profile.md`)."""

_NAME = r"([A-Za-z0-9_-]+)"
_EDGE = re.compile(rf"\s*{_NAME}\.{_NAME}\s*->\s*{_NAME}\.{_NAME}\s*")
_GOOD_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Adapters = Mapping[str, type[Engine] | None]
"""Each stage's adapter class; None for one that could not be found, whose ports are then not checked."""


class Edge(msgspec.Struct, frozen=True):
    """One edge as it was written."""

    source: str
    source_port: str
    target: str
    target_port: str

    def __str__(self) -> str:
        return f"{self.source}.{self.source_port} -> {self.target}.{self.target_port}"


class Graph(msgspec.Struct):
    """What came of a deployment's pipelines."""

    pipelines: dict[str, Pipeline] = {}
    """The faultless ones."""
    served: dict[str, tuple[str, ...]] = {}
    """The pipelines of each gateway."""
    problems: list[Problem] = []


def build(
    adapters: Adapters,
    pipelines: Mapping[str, PipelineConfig | None],
    gateways: Mapping[str, GatewayConfig | None],
    protocols: Mapping[str, type[Any] | None],
) -> Graph:
    """Build and check all pipelines.

    Args:
        adapters: each stage's adapter class.
        pipelines: each pipeline's table; None for one that could not be understood.
        gateways: each gateway's table; None for one that could not be understood.
        protocols: each gateway's class, which has ``can_serve(pipeline) -> bool``.
    """
    graph = Graph()
    graph.problems += _name_problems({"stages": adapters, "pipelines": pipelines, "gateways": gateways})
    if not adapters:
        graph.problems.append(Problem(("stages",), "no stages; add a table [stages.NAME] with its adapter"))
    if not pipelines:
        graph.problems.append(Problem(("pipelines",), "no pipelines; add a table [pipelines.NAME] with its edges"))
    used: set[str] = set()
    is_whole = True
    for name, config in pipelines.items():
        if config is None:
            is_whole = False
            continue
        draft = _PipelineDraft(name, config, adapters)
        draft.check()
        graph.problems += draft.problems
        used |= draft.stages
        is_whole = is_whole and draft.is_whole
        if not draft.problems and draft.is_typed:
            graph.pipelines[name] = draft.pipeline()
    if is_whole and pipelines:
        unused = (stage for stage in adapters if stage not in used)
        graph.problems += [Problem(("stages", stage), f"stage '{stage}' is in no pipeline") for stage in unused]
    graph.problems += _model_name_problems(pipelines)
    _serve(graph, pipelines, gateways, protocols)
    graph.problems += _port_problems(gateways)
    return graph


def slot_problems(
    pipelines: Mapping[str, Pipeline], stages: Mapping[str, StageConfig | None], adapters: Adapters
) -> Iterator[Problem]:
    """Refuse pipelines that branch and admit more requests than their stages can hold: see `Pipeline.is_branching`.

    Args:
        pipelines: the faultless ones.
        stages: each stage's table, its options checked already; None for one that could not be understood.
        adapters: each stage's adapter class.
    """
    for name, pipeline in pipelines.items():
        for stage in pipeline.stages if pipeline.is_branching else ():
            config, adapter = stages.get(stage), adapters.get(stage)
            if config is None or adapter is None:
                continue
            held = config.replicas * adapter.num_slots(msgspec.convert(config.options, adapter.Options))
            users = [other for other in pipelines.values() if stage in other.stages]
            wanted = sum(other.max_in_flight for other in users)
            if wanted > held:
                yield Problem(
                    ("pipelines", name),
                    "it branches, so every request in flight needs a slot in each stage, else two can wait for each "
                    f"other for ever: stage '{stage}' holds {held}, max_in_flight of "
                    f"{', '.join(user.name for user in users)} is {wanted} (allowed: at most {held} in all)",
                )


def with_voices(
    pipelines: Mapping[str, Pipeline], stages: Mapping[str, StageConfig], adapters: Mapping[str, type[Engine]]
) -> dict[str, Pipeline]:
    """Return the pipelines of a faultless deployment with the voices that their stages speak with."""
    voices = {
        name: adapters[name].voices(msgspec.convert(stage.options, adapters[name].Options))
        for name, stage in stages.items()
    }
    return {
        name: msgspec.structs.replace(
            pipeline, voices=tuple(sorted({voice for stage in pipeline.stages for voice in voices[stage]}))
        )
        for name, pipeline in pipelines.items()
    }


def warnings(stages: Mapping[str, StageConfig], num_cores: int) -> list[str]:
    """Return what will work, but badly: threads that were asked for beyond the cores that there are."""
    asked = {name: stage.replicas * stage.threads for name, stage in stages.items() if stage.threads is not None}
    total = sum(asked.values())
    if total <= num_cores:
        return []
    parts = ", ".join(f"{name} {threads}" for name, threads in asked.items())
    return [f"stages ask for {total} threads on {num_cores} cores ({parts}): they will slow each other down"]


def _name_problems(sections: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
    for section, names in sections.items():
        for name in names:
            if not _GOOD_NAME.fullmatch(name):
                message = f"'{name}' is no name; allowed: 1 to 64 letters, digits, '_' or '-'"
                yield Problem((section, name), message)
            elif section == "stages" and name in (IN, OUT):
                yield Problem((section, name), f"'{name}' is no stage name: it is the client's side of a pipeline")


def parse_edge(text: str) -> Edge | str:
    """Read ``source.port -> target.port``; return the reason where it can't be read."""
    match = _EDGE.fullmatch(text)
    if match is None:
        return f"'{text}' is no edge; the form is {EDGE_FORM}"
    edge = Edge(*match.groups())
    if edge.source == OUT:
        return f"'{text}' comes from 'out', where a pipeline ends; the form is {EDGE_FORM}"
    if edge.target == IN:
        return f"'{text}' leads to 'in', where a pipeline begins; the form is {EDGE_FORM}"
    if edge.source == IN and edge.target == OUT:
        return f"'{text}' passes no stage"
    return edge


def params_of(adapter: type[Engine]) -> dict[str, Any]:
    """Return the JSON Schema of each parameter that a request may set; nothing for types that have none."""
    try:
        _, found = msgspec.json.schema_components([adapter.Params])
    except TypeError:
        return {}
    return found[adapter.Params.__name__]["properties"]


class _PipelineDraft:
    """One pipeline on its way to being checked."""

    def __init__(self, name: str, config: PipelineConfig, adapters: Adapters) -> None:
        self._name = name
        self._config = config
        self._adapters = adapters
        self._path: Path = ("pipelines", name)
        self._edges: dict[int, Edge] = {}
        self.problems: list[Problem] = []
        self.is_whole = True
        """Whether every edge could be read and names known stages."""

    @property
    def stages(self) -> set[str]:
        """Known stages that the edges name."""
        return {name for edge in self._edges.values() for name in (edge.source, edge.target)} - {IN, OUT}

    @property
    def is_typed(self) -> bool:
        """Whether the ports of all stages are known."""
        return self.is_whole and all(self._adapters[stage] is not None for stage in self.stages)

    def check(self) -> None:
        """Find every problem."""
        if not self._config.edges:
            self._add((*self._path, "edges"), f"no edges; add some, each {EDGE_FORM}")
            return
        self._read_edges()
        self._check_ports()
        self._check_fan_in()
        self._check_input_kinds()
        self._check_cycles()
        if not self.is_whole:
            return
        if not any(edge.target == OUT for edge in self._edges.values()):
            self._add((*self._path, "edges"), "no final output: no edge leads to 'out'")
        if not any(edge.source == IN for edge in self._edges.values()):
            self._add((*self._path, "edges"), "no input: no edge comes from 'in'")
        self._check_reach()
        self._check_fed()

    def pipeline(self) -> Pipeline:
        """Return the checked pipeline."""
        config = self._config
        stages = sorted(self.stages)
        return Pipeline(
            name=self._name,
            serve_as=config.serve_as or self._name,
            aliases=config.aliases,
            edges=tuple(
                RouteEdge(
                    source=edge.source,
                    source_port=edge.source_port,
                    target=edge.target,
                    target_port=edge.target_port,
                    kind=(kind := self._source_kind(edge) or self._target_kind(edge) or ""),
                    window_chunks=config.window_chunks or WINDOWS.get(kind, WINDOW),
                    window_bytes=config.window_bytes,
                )
                for edge in self._edges.values()
            ),
            non_idempotent=frozenset(
                stage for stage in stages if (found := self._adapters[stage]) is not None and not found.is_idempotent
            ),
            max_in_flight=config.max_in_flight,
            max_queued=config.max_queued,
            timeout_s=config.timeout_s,
            max_queued_bytes=config.max_queued_bytes,
            routing=config.routing,
            params={stage: params_of(found) for stage in stages if (found := self._adapters[stage]) is not None},
        )

    def _add(self, path: Path, message: str) -> None:
        self.problems.append(Problem(path, message))

    def _edge_path(self, index: int) -> Path:
        return (*self._path, "edges", index)

    def _read_edges(self) -> None:
        first_index: dict[Edge, int] = {}
        for index, text in enumerate(self._config.edges):
            edge = parse_edge(text)
            if isinstance(edge, str):
                self._add(self._edge_path(index), edge)
                self.is_whole = False
                continue
            unknown = [name for name in (edge.source, edge.target) if name not in (IN, OUT, *self._adapters)]
            for name in dict.fromkeys(unknown):
                self._add(self._edge_path(index), unknown_name("stage", name, self._adapters).message + f" in '{edge}'")
            if unknown:
                self.is_whole = False
            elif edge in first_index:
                self._add(self._edge_path(index), f"'{edge}' is there twice; the first is edges[{first_index[edge]}]")
            else:
                first_index[edge] = index
                self._edges[index] = edge

    def _source_kind(self, edge: Edge) -> str | None:
        found = None if edge.source == IN else self._adapters[edge.source]
        return None if found is None else found.emits.get(edge.source_port)

    def _target_kind(self, edge: Edge) -> str | None:
        found = None if edge.target == OUT else self._adapters[edge.target]
        return None if found is None else found.accepts.get(edge.target_port)

    def _check_ports(self) -> None:
        for index, edge in self._edges.items():
            source = None if edge.source == IN else self._adapters[edge.source]
            target = None if edge.target == OUT else self._adapters[edge.target]
            if source is not None and edge.source_port not in source.emits:
                self._add_unknown_port(index, edge.source, "output", edge.source_port, source.emits)
            if target is not None and edge.target_port not in target.accepts:
                self._add_unknown_port(index, edge.target, "input", edge.target_port, target.accepts)
            emitted, accepted = self._source_kind(edge), self._target_kind(edge)
            if emitted and accepted and emitted != accepted:
                message = f"'{edge}' does not fit: {edge.source}.{edge.source_port} emits {emitted}, "
                self._add(self._edge_path(index), message + f"{edge.target}.{edge.target_port} accepts {accepted}")

    def _add_unknown_port(self, index: int, stage: str, side: str, port: str, known: Mapping[str, str]) -> None:
        kinds = ", ".join(f"{name} ({kind})" for name, kind in known.items()) or "none"
        message = f"stage '{stage}' has no {side} '{port}'{did_you_mean(port, known)} ({side}s: {kinds})"
        self._add(self._edge_path(index), f"{message} in '{self._edges[index]}'")

    def _check_fan_in(self) -> None:
        """Two edges into one port would mix their chunks; an engine that takes two inputs has two ports."""
        feeder: dict[tuple[str, str], Edge] = {}
        for index, edge in self._edges.items():
            port = (edge.target, edge.target_port)
            if port in feeder:
                message = f"{edge.target}.{edge.target_port} is fed twice, by '{feeder[port]}' and by '{edge}'"
                self._add(self._edge_path(index), message + "; each edge needs a port of its own")
            else:
                feeder[port] = edge

    def _check_input_kinds(self) -> None:
        first: dict[str, tuple[Edge, str]] = {}
        for index, edge in self._edges.items():
            kind = self._target_kind(edge)
            if edge.source != IN or kind is None:
                continue
            other, other_kind = first.setdefault(edge.source_port, (edge, kind))
            if kind != other_kind:
                message = f"in.{edge.source_port} would be two kinds: {other_kind} for '{other}', {kind} for '{edge}'"
                self._add(self._edge_path(index), message)

    def _check_cycles(self) -> None:
        """Report one cycle, take its closing edge away, and look again until there is none."""
        sources: dict[str, list[str]] = {}
        for edge in self._edges.values():
            if edge.source != IN and edge.target != OUT:
                sources.setdefault(edge.target, []).append(edge.source)
        while True:
            try:
                graphlib.TopologicalSorter(sources).prepare()
            except graphlib.CycleError as error:
                cycle: list[str] = error.args[1]
                closing, first = cycle[-2], cycle[-1]
                index = max(i for i, e in self._edges.items() if (e.source, e.target) == (closing, first))
                self._add(self._edge_path(index), f"the edges go round in a cycle: {' -> '.join(cycle)}")
                sources[first] = [source for source in sources[first] if source != closing]
            else:
                return

    def _check_reach(self) -> None:
        forward: dict[str, set[str]] = {}
        backward: dict[str, set[str]] = {}
        for edge in self._edges.values():
            forward.setdefault(edge.source, set()).add(edge.target)
            backward.setdefault(edge.target, set()).add(edge.source)
        from_in, from_out = _reach(forward, IN), _reach(backward, OUT)
        for stage in dict.fromkeys(name for e in self._edges.values() for name in (e.source, e.target)):
            if stage in (IN, OUT):
                continue
            path = self._edge_path(min(i for i, e in self._edges.items() if stage in (e.source, e.target)))
            if stage not in from_in:
                self._add(path, f"stage '{stage}' is unreachable: no path from 'in' leads to it")
            if stage not in from_out:
                self._add(path, f"stage '{stage}' is a dead end: no path from it leads to 'out'")

    def _check_fed(self) -> None:
        fed = {(edge.target, edge.target_port) for edge in self._edges.values()}
        for stage in sorted(self.stages):
            found = self._adapters[stage]
            if found is None:
                continue
            for port, kind in found.accepts.items():
                if (stage, port) not in fed and port not in found.optional_inputs:
                    message = f"input {stage}.{port} ({kind}) is not fed: no edge leads to it"
                    self._add((*self._path, "edges"), message)


def _reach(next_of: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    frontier = [start]
    while frontier:
        for name in next_of.get(frontier.pop(), ()):
            if name not in reached:
                reached.add(name)
                frontier.append(name)
    return reached


def _model_name_problems(pipelines: Mapping[str, PipelineConfig | None]) -> Iterator[Problem]:
    owner: dict[str, str] = {}
    for name, config in pipelines.items():
        if config is None:
            continue
        keys: list[tuple[Path, str]] = [(("serve_as",), config.serve_as or name)]
        keys += [(("aliases", index), alias) for index, alias in enumerate(config.aliases)]
        for key, model in keys:
            path = ("pipelines", name, *key)
            if not model:
                yield Problem(path, "the model name is empty")
            elif model in owner:
                where = "twice by this pipeline" if owner[model] == name else f"by pipeline '{owner[model]}' already"
                yield Problem(path, f"the model name '{model}' is served {where}")
            else:
                owner[model] = name


def _serve(
    graph: Graph,
    pipelines: Mapping[str, PipelineConfig | None],
    gateways: Mapping[str, GatewayConfig | None],
    protocols: Mapping[str, type[Any] | None],
) -> None:
    """Give each gateway its pipelines."""
    for name, gateway in gateways.items():
        protocol = protocols.get(name)
        if gateway is None:
            continue
        path: Path = ("gateways", name)
        for index, wanted in enumerate(gateway.pipelines or ()):
            if wanted not in pipelines:
                message = unknown_name("pipeline", wanted, pipelines).message
                graph.problems.append(Problem((*path, "pipelines", index), message))
        if protocol is None:
            continue
        names = graph.pipelines if gateway.pipelines is None else gateway.pipelines
        candidates = [graph.pipelines[wanted] for wanted in names if wanted in graph.pipelines]
        served = tuple(pipeline.name for pipeline in candidates if protocol.can_serve(pipeline))
        graph.served[name] = served
        if gateway.pipelines is not None:
            for index, wanted in enumerate(gateway.pipelines):
                if wanted in graph.pipelines and wanted not in served:
                    message = f"gateway '{name}' can't serve {_outline(graph.pipelines[wanted])}"
                    graph.problems.append(Problem((*path, "pipelines", index), message))
            if not gateway.pipelines:
                message = "the list is empty; leave the key out to serve each pipeline that it can"
                graph.problems.append(Problem((*path, "pipelines"), message))
        elif not served and len(graph.pipelines) == len(pipelines) > 0:
            outlines = "; ".join(_outline(pipeline) for pipeline in candidates)
            graph.problems.append(Problem(path, f"gateway '{name}' has no pipeline that it can serve: {outlines}"))


def _outline(pipeline: Pipeline) -> str:
    def ports(kinds: Mapping[str, str]) -> str:
        return ", ".join(f"{port} ({kind})" for port, kind in kinds.items())

    return f"pipeline '{pipeline.name}' from {ports(pipeline.inputs)} to {ports(pipeline.outputs)}"


def _port_problems(gateways: Mapping[str, GatewayConfig | None]) -> Iterator[Problem]:
    taken: dict[tuple[str, int], str] = {}
    for name, gateway in gateways.items():
        if gateway is None or gateway.port == 0:
            continue
        address = (gateway.host, gateway.port)
        other = taken.setdefault(address, name)
        if other != name:
            message = f"{gateway.host}:{gateway.port} is taken by gateway '{other}' already; 0 takes a free port"
            yield Problem(("gateways", name, "port"), message)
