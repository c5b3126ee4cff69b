"""Graph checks: each reason to refuse by its own example, and the verdict on random graphs against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_bus.config.graph import Graph, build, warnings
from omni_bus.config.schema import GatewayConfig, PipelineConfig, StageConfig
from omni_bus.core.pipeline import Pipeline
from omni_bus.engine import Engine
from omni_bus.wire.frames import RouteEdge


def _adapter(accepts: dict[str, str], emits: dict[str, str], *, is_idempotent: bool = True) -> type[Engine]:
    members = {"accepts": accepts, "emits": emits, "is_idempotent": is_idempotent}
    return type("Adapter", (Engine,), members)


LLM = _adapter({"prompt": "json"}, {"text": "text", "hidden": "hidden"})
VOICE = _adapter({"text": "text"}, {"audio": "audio"}, is_idempotent=False)
MIXER = _adapter({"left": "audio", "right": "audio"}, {"audio": "audio"})
RELAY = _adapter({"text": "text"}, {"text": "text"})

GOOD = ("in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio")


class ChatGateway:
    """Serves pipelines with an input called messages."""

    class Options(msgspec.Struct):
        """None."""

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        return "messages" in pipeline.inputs


def _build(adapters: Mapping[str, type[Engine] | None], *edges: str, **fields: Any) -> Graph:
    return build(adapters, {"p": PipelineConfig(edges=edges, **fields)}, {}, {})


def _messages(graph: Graph) -> list[str]:
    return [problem.message for problem in graph.problems]


def _only_problem(graph: Graph) -> tuple[tuple[str | int, ...], str]:
    (problem,) = graph.problems
    return problem.path, problem.message


class VoiceParams(msgspec.Struct):
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2)] = 1.0
    seed: int | None = None


class Opaque:
    """A type that JSON Schema has no word for."""


class OpaqueParams(msgspec.Struct):
    opaque: Opaque | None = None


def test_a_pipeline_says_what_may_be_set_on_its_stages() -> None:
    voice = type("Voice", (VOICE,), {"Params": VoiceParams})
    llm = type("Llm", (LLM,), {"Params": OpaqueParams})

    params = _build({"llm": llm, "voice": voice}, *GOOD).pipelines["p"].params

    assert params["voice"]["speed"] == {"type": "number", "minimum": 0.5, "maximum": 2, "default": 1.0}
    assert params["voice"].keys() == {"speed", "seed"}
    assert params["llm"] == {}


def test_good_graph_becomes_a_pipeline_with_kinds_and_windows() -> None:
    graph = _build({"llm": LLM, "voice": VOICE}, *GOOD, window_chunks=3, window_bytes=4096, aliases=("x",))

    assert graph.problems == []
    pipeline = graph.pipelines["p"]
    assert pipeline.edges[0] == RouteEdge("in", "messages", "llm", "prompt", "json", 3, 4096)
    assert [edge.kind for edge in pipeline.edges] == ["json", "text", "text", "audio"]
    assert pipeline.serve_as == "p"
    assert pipeline.aliases == ("x",)
    assert pipeline.non_idempotent == {"voice"}


def test_a_window_is_longer_where_a_chunk_is_a_token() -> None:
    pipeline = _build({"llm": LLM, "voice": VOICE}, *GOOD).pipelines["p"]

    windows = {edge.kind: edge.window_chunks for edge in pipeline.edges}
    assert windows["json"] == windows["audio"] < windows["text"]


def test_empty_deployment_lacks_stages_and_pipelines() -> None:
    assert [problem.path for problem in build({}, {}, {}, {}).problems] == [("stages",), ("pipelines",)]


@pytest.mark.parametrize(
    "edge",
    ["", "llm.text", "llm.text > voice.text", "llm -> voice", "a.b -> c.d -> e.f", "a.b.c -> d.e", "é.x -> llm.prompt"],
)
def test_unreadable_edge_shows_the_expected_form(edge: str) -> None:
    path, message = _only_problem(_build({"llm": LLM}, GOOD[0], edge, GOOD[1]))

    assert path == ("pipelines", "p", "edges", 1)
    assert message.startswith(f"'{edge}' is no edge")
    assert '"source.port -> target.port"' in message


@pytest.mark.parametrize(
    ("edge", "expected"),
    [
        ("out.text -> llm.prompt", "comes from 'out'"),
        ("llm.hidden -> in.x", "leads to 'in'"),
        ("in.x -> out.x", "passes no stage"),
    ],
)
def test_edge_on_the_wrong_side_of_the_client_is_refused(edge: str, expected: str) -> None:
    _, message = _only_problem(_build({"llm": LLM}, *GOOD[:2], edge))

    assert expected in message


def test_unknown_stage_names_the_nearest_and_nothing_else() -> None:
    graph = _build({"llm": LLM, "voice": VOICE}, *GOOD[:2], "llm.text -> voise.text", GOOD[3])

    path, message = _only_problem(graph)
    assert path == ("pipelines", "p", "edges", 2)
    assert "unknown stage 'voise'; did you mean 'voice'?" in message


def test_unknown_ports_list_the_known_ones() -> None:
    graph = _build({"llm": LLM, "voice": VOICE}, *GOOD, "llm.txt -> out.again", "in.x -> voice.txet")

    sent, taken = _messages(graph)
    assert "stage 'llm' has no output 'txt'; did you mean 'text'? (outputs: text (text), hidden (hidden))" in sent
    assert "stage 'voice' has no input 'txet'; did you mean 'text'? (inputs: text (text))" in taken


def test_kinds_that_do_not_match_are_named() -> None:
    path, message = _only_problem(_build({"llm": LLM, "voice": VOICE}, *GOOD[:2], "llm.hidden -> voice.text", GOOD[3]))

    assert path == ("pipelines", "p", "edges", 2)
    assert message.endswith("llm.hidden emits hidden, voice.text accepts text")


def test_cycle_is_shown_with_its_path() -> None:
    two = _adapter({"text": "text", "back": "text"}, {"text": "text"})
    graph = _build(
        {"a": two, "b": RELAY, "c": RELAY},
        "in.x -> a.text",
        "a.text -> b.text",
        "b.text -> c.text",
        "c.text -> a.back",
        "c.text -> out.text",
    )

    path, message = _only_problem(graph)
    assert path[:3] == ("pipelines", "p", "edges")
    cycle = message.removeprefix("the edges go round in a cycle: ").split(" -> ")
    assert cycle[0] == cycle[-1]
    assert sorted(cycle[1:]) == ["a", "b", "c"]
    assert all(pair in ("ab", "bc", "ca") for pair in map("".join, itertools.pairwise(cycle)))


def test_stage_that_feeds_itself_is_a_cycle() -> None:
    graph = _build({"a": MIXER}, "in.x -> a.left", "a.audio -> a.right", "a.audio -> out.audio")

    assert _only_problem(graph)[1].endswith("cycle: a -> a")


def test_two_separate_cycles_are_both_reported() -> None:
    edges = ["in.x -> a.left", "a.audio -> a.right", "in.x -> b.left", "b.audio -> b.right"]
    graph = _build({"a": MIXER, "b": MIXER}, *edges, "a.audio -> out.a", "b.audio -> out.b")

    assert sorted(message[-6:] for message in _messages(graph)) == ["a -> a", "b -> b"]


def test_pipeline_without_output_is_refused() -> None:
    messages = _messages(_build({"llm": LLM}, "in.messages -> llm.prompt"))

    assert "no final output: no edge leads to 'out'" in messages
    assert any("'llm' is a dead end" in message for message in messages)


def test_unreachable_stage_and_unfed_port_are_named() -> None:
    messages = _messages(_build({"llm": LLM, "voice": VOICE}, *GOOD[:2], "voice.audio -> out.audio"))

    assert any("'voice' is unreachable" in message for message in messages)
    assert any("voice.text (text) is not fed" in message for message in messages)
    assert len(messages) == 2


def test_optional_input_may_stay_unfed() -> None:
    picky = _adapter({"text": "text", "image": "image"}, {"text": "text"})
    edges = ("in.x -> a.text", "a.text -> out.x")

    assert _only_problem(_build({"a": picky}, *edges))[1].startswith("input a.image (image) is not fed")
    picky.optional_inputs = frozenset({"image"})
    assert _build({"a": picky}, *edges).problems == []


def test_dead_end_is_named() -> None:
    graph = _build({"llm": LLM, "voice": VOICE}, *GOOD[:3])

    assert _only_problem(graph)[1].startswith("stage 'voice' is a dead end")


def test_duplicate_edge_is_refused() -> None:
    path, message = _only_problem(_build({"llm": LLM}, *GOOD[:2], "llm.text->out.text"))

    assert path[-1] == 2
    assert "twice" in message
    assert "edges[1]" in message


def test_port_fed_by_two_edges_is_refused() -> None:
    graph = _build({"a": RELAY, "b": RELAY}, "in.x -> a.text", "in.y -> b.text", "a.text -> out.t", "b.text -> out.t")

    assert _only_problem(graph)[1].startswith("out.t is fed twice, by 'a.text -> out.t' and by 'b.text -> out.t'")


def test_fan_in_to_distinct_ports_is_good() -> None:
    graph = _build(
        {"llm": LLM, "a": VOICE, "b": VOICE, "mix": MIXER},
        "in.messages -> llm.prompt",
        "llm.text -> a.text",
        "llm.text -> b.text",
        "a.audio -> mix.left",
        "b.audio -> mix.right",
        "mix.audio -> out.audio",
    )

    assert graph.problems == []


def test_input_that_fans_out_to_two_kinds_is_refused() -> None:
    edges = ["in.x -> llm.prompt", "in.x -> voice.text", "llm.text -> out.text", "voice.audio -> out.audio"]

    assert "in.x would be two kinds: json for" in _only_problem(_build({"llm": LLM, "voice": VOICE}, *edges))[1]


def test_stage_in_no_pipeline_is_refused() -> None:
    graph = _build({"llm": LLM, "voice": VOICE}, *GOOD[:2])

    assert _only_problem(graph) == (("stages", "voice"), "stage 'voice' is in no pipeline")


def test_pipeline_without_edges_is_refused() -> None:
    graph = _build({"llm": LLM})

    assert any(problem.path == ("pipelines", "p", "edges") for problem in graph.problems)


@pytest.mark.parametrize("name", ["in", "out", "", "a.b", "a b", "ü", "x" * 65])
def test_bad_stage_name_is_refused(name: str) -> None:
    graph = build({name: LLM, "llm": LLM}, {"p": PipelineConfig(edges=GOOD[:2])}, {}, {})

    assert ("stages", name) in [problem.path for problem in graph.problems if "no stage name" in problem.message] + [
        problem.path for problem in graph.problems if "is no name" in problem.message
    ]


def test_model_name_of_two_pipelines_is_refused() -> None:
    pipelines = {
        "p": PipelineConfig(edges=GOOD[:2], serve_as="m"),
        "q": PipelineConfig(edges=GOOD[:2], aliases=("m", "q")),
    }
    graph = build({"llm": LLM}, pipelines, {}, {})

    assert [(problem.path, problem.message) for problem in graph.problems] == [
        (("pipelines", "q", "aliases", 0), "the model name 'm' is served by pipeline 'p' already"),
        (("pipelines", "q", "aliases", 1), "the model name 'q' is served twice by this pipeline"),
    ]


def _with_gateway(gateway: GatewayConfig, *edges: str) -> Graph:
    pipelines = {"p": PipelineConfig(edges=edges)}
    return build({"llm": LLM}, pipelines, {"chat": gateway}, {"chat": ChatGateway})


def test_gateway_serves_each_pipeline_that_it_can() -> None:
    graph = _with_gateway(GatewayConfig(), *GOOD[:2])

    assert graph.problems == []
    assert graph.served == {"chat": ("p",)}


def test_gateway_without_a_fitting_pipeline_is_refused() -> None:
    edges = ("in.other -> llm.prompt", GOOD[1])

    path, message = _only_problem(_with_gateway(GatewayConfig(), *edges))
    assert path == ("gateways", "chat")
    assert "pipeline 'p' from other (json) to text (text)" in message
    assert "can't serve" in _only_problem(_with_gateway(GatewayConfig(pipelines=("p",)), *edges))[1]


def test_gateway_with_unknown_or_no_pipelines_is_refused() -> None:
    assert "unknown pipeline 'pp'" in _only_problem(_with_gateway(GatewayConfig(pipelines=("p", "pp")), *GOOD[:2]))[1]
    assert "empty" in _only_problem(_with_gateway(GatewayConfig(pipelines=()), *GOOD[:2]))[1]


def test_two_gateways_on_one_port_are_refused() -> None:
    gateways = {
        "a": GatewayConfig(port=8000),
        "b": GatewayConfig(port=8000),
        "c": GatewayConfig(),
        "d": GatewayConfig(),
    }
    graph = build({"llm": LLM}, {"p": PipelineConfig(edges=GOOD[:2])}, gateways, dict.fromkeys(gateways, ChatGateway))

    assert _only_problem(graph)[0] == ("gateways", "b", "port")


def test_unknown_adapter_leaves_its_ports_unchecked() -> None:
    graph = _build({"llm": None, "voice": VOICE}, *GOOD)

    assert graph.problems == []
    assert graph.pipelines == {}


def test_threads_beyond_the_cores_are_a_warning() -> None:
    stages = {"a": StageConfig("x", replicas=2, threads=2), "b": StageConfig("x")}

    assert warnings(stages, 4) == []
    assert "4 threads on 3 cores" in warnings(stages, 3)[0]


def test_long_chain_is_checked_without_recursion() -> None:
    length = 3000
    adapters = {f"s{i}": RELAY for i in range(length)}
    edges = [f"s{i}.text -> s{i + 1}.text" for i in range(length - 1)]

    assert _build(adapters, "in.x -> s0.text", *edges, f"s{length - 1}.text -> out.x").problems == []


# Random graphs: stages 0..n-1, -1 is the client. Every stage has one input port for each possible source.

Arrows = list[tuple[int, int]]


def _walks(arrows: Arrows, start: int, seen: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every simple path from `start`, and every one that has just closed a loop."""
    for source, target in arrows:
        if source == start:
            path = (*seen, source, target)
            yield path
            if target != -1 and target not in (*seen, source):
                yield from _walks(arrows, target, (*seen, source))


def _brute_force(arrows: Arrows) -> tuple[bool, set[int], set[int]]:
    """Whether there is a cycle, and which stages are unreachable and which dead ends, by walking every path."""
    stages = {stage for arrow in arrows for stage in arrow} - {-1}
    has_cycle = any(path[-1] in path[:-1] for stage in stages for path in _walks(arrows, stage))
    reached = {stage for path in _walks(arrows, -1) for stage in path}
    leading = {stage for stage in stages if any(path[-1] == -1 for path in _walks(arrows, stage))}
    return has_cycle, stages - reached, stages - leading


@st.composite
def _arrows(draw: st.DrawFn) -> Arrows:
    ends = st.integers(-1, 4)
    arrow = st.tuples(ends, ends).filter(lambda pair: pair != (-1, -1))
    return draw(st.lists(arrow, min_size=1, max_size=12, unique=True))


@settings(max_examples=400, deadline=None)
@given(_arrows())
def test_verdict_on_random_graphs_equals_brute_force(arrows: Arrows) -> None:
    stages = sorted({stage for arrow in arrows for stage in arrow} - {-1})
    adapters = {
        f"s{stage}": _adapter({f"from{source}": "text" for source, target in arrows if target == stage}, {"o": "text"})
        for stage in stages
    }
    edges = [
        ("in.x" if source == -1 else f"s{source}.o")
        + " -> "
        + (f"out.o{source}" if target == -1 else f"s{target}.from{source}")
        for source, target in arrows
    ]

    graph = _build(adapters, *edges)

    has_cycle, unreachable, dead_ends = _brute_force(arrows)
    messages = _messages(graph)
    assert any("cycle" in message for message in messages) == has_cycle
    assert {message.split("'")[1] for message in messages if "unreachable" in message} == {f"s{s}" for s in unreachable}
    assert {message.split("'")[1] for message in messages if "dead end" in message} == {f"s{s}" for s in dead_ends}
    is_faultless = not has_cycle and not unreachable and not dead_ends
    assert bool(graph.pipelines) == is_faultless
    assert (graph.problems == []) == is_faultless
