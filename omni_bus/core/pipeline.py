"""A pipeline as the coordinator and the gateways see it: a graph of named edges, and what a request needs of it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from omni_bus.core.binding import Routing
from omni_bus.errors import unknown_name
from omni_bus.wire.frames import RouteEdge

IN = "in"
"""The source of edges that carry what the client sends."""

OUT = "out"
"""The target of edges that carry what the client gets."""


class Pipeline(msgspec.Struct, frozen=True, dict=True):
    """A checked graph: acyclic, every stage reachable from `in` and leading to `out`.

    What every request asks of it is worked out once; nobody changes what is returned.
    """

    name: str
    serve_as: str
    aliases: tuple[str, ...]
    edges: tuple[RouteEdge, ...]
    non_idempotent: frozenset[str] = frozenset()
    """Stages whose work must not be repeated."""
    max_in_flight: int = 64
    max_queued: int = 256
    timeout_s: float | None = None
    max_queued_bytes: int = 256 * 1024 * 1024
    routing: Routing = "prefix"
    voices: tuple[str, ...] = ()
    """Voices that its stages speak with by themselves, sorted."""
    params: dict[str, dict[str, Any]] = {}
    """What a request may set on each stage: the JSON Schema of each parameter, by its name."""

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Input ports of the pipeline and the payload kind of each."""
        return {edge.source_port: edge.kind for edge in self.edges if edge.source == IN}

    @cached_property
    def outputs(self) -> dict[str, str]:
        """Output ports of the pipeline and the payload kind of each."""
        return {edge.target_port: edge.kind for edge in self.edges if edge.target == OUT}

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """Stage names in the order in which the edges name them."""
        names = (name for edge in self.edges for name in (edge.source, edge.target))
        return tuple(dict.fromkeys(name for name in names if name not in (IN, OUT)))

    @property
    def is_branching(self) -> bool:
        """Whether a stage feeds, or is fed by, more than one other stage, or the client feeds several.

        Requests of such a pipeline hold slots of one branch while they wait for another. Two of them that got the last
        slots of two stages in opposite order would wait for each other for ever, each held back by the other's full
        window; so each stage needs a slot for every request in flight (`max_in_flight` at most `max_resident`). Along a
        path this can't happen, since whoever holds a slot holds one, or has finished, in all stages before; nor between
        paths, unless they pass two stages in opposite order. Where the client feeds a stage and one behind it, a
        request may get a slot in the second before the first.
        """
        pairs = {(e.source, e.target) for e in self.edges if e.target != OUT}
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        return len(set(sources)) < len(sources) or len(set(targets)) < len(targets)

    def readers_of(self, port: str) -> tuple[str, ...]:
        """Return the stages that read an input port."""
        return tuple(dict.fromkeys(e.target for e in self.edges if e.source == IN and e.source_port == port))

    def sources_of(self, port: str) -> tuple[str, ...]:
        """Return the stages that an output port's payloads come from."""
        return tuple(dict.fromkeys(e.source for e in self.edges if e.target == OUT and e.target_port == port))

    def speakers_of(self, port: str) -> tuple[str, ...]:
        """Return the stages that say how a port's sound is: its sources, or who writes the codes they make it of."""
        found: dict[str, None] = {}
        asked = list(self.sources_of(port))
        for stage in asked:
            incoming = [edge for edge in self.edges if edge.target == stage]
            if any(edge.kind == "codes" for edge in incoming):
                asked += [edge.source for edge in incoming if edge.kind == "codes" and edge.source != IN]
            else:
                found[stage] = None
        return tuple(found)

    def needed(self, outputs: tuple[str, ...]) -> tuple[RouteEdge, ...]:
        """Return the edges that lead to the wanted output ports; all of them when none is named.

        Raises:
            UnknownName: an output that the pipeline doesn't have.
        """
        for name in outputs:
            if name not in self.outputs:
                raise unknown_name("output", name, self.outputs, field="outputs")
        wanted = set(outputs or self.outputs)
        stages: set[str] = set()
        frontier = [edge.source for edge in self.edges if edge.target == OUT and edge.target_port in wanted]
        while frontier:
            stage = frontier.pop()
            if stage in stages or stage == IN:
                continue
            stages.add(stage)
            frontier.extend(edge.source for edge in self.edges if edge.target == stage)
        return tuple(
            edge for edge in self.edges if edge.target in stages or (edge.target == OUT and edge.target_port in wanted)
        )
