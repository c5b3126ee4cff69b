import pytest

from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import UnknownName
from omni_bus.wire.frames import RouteEdge


def pipeline(*edges: str) -> Pipeline:
    parsed = []
    for edge in edges:
        source, target = edge.split(" -> ")
        (stage, port), (target_stage, target_port) = source.split("."), target.split(".")
        parsed.append(RouteEdge(stage, port, target_stage, target_port, "text", 1, 1024))
    return Pipeline("p", "p", (), tuple(parsed))


VOICE_CHAT = pipeline(
    "in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"
)


def test_ports_and_stages_come_from_the_edges():
    assert VOICE_CHAT.inputs == {"messages": "text"}
    assert VOICE_CHAT.outputs == {"text": "text", "audio": "text"}
    assert VOICE_CHAT.stages == ("llm", "voice")


def test_readers_and_sources_of_a_port_are_named_once():
    both = pipeline("in.a -> x.a", "in.a -> x.b", "in.b -> y.a", "x.c -> out.c", "y.c -> out.c")

    assert (both.readers_of("a"), both.readers_of("c")) == (("x",), ())
    assert (both.sources_of("c"), both.sources_of("a")) == (("x", "y"), ())


@pytest.mark.parametrize(
    ("edges", "speakers"),
    [
        ([("in", "voice", "text"), ("voice", "out", "audio")], ("voice",)),
        ([("in", "lm", "text"), ("lm", "codec", "codes"), ("codec", "out", "audio")], ("lm",)),
        (
            [("in", "llm", "json"), ("llm", "lm", "text"), ("lm", "codec", "codes"), ("codec", "out", "audio")],
            ("lm",),
        ),
        (
            [
                ("in", "thinker", "json"),
                ("thinker", "talker", "hidden"),
                ("talker", "wave", "codes"),
                ("wave", "out", "audio"),
            ],
            ("talker",),
        ),
        ([("in", "omni", "json"), ("omni", "out", "text"), ("omni", "out", "audio")], ("omni",)),
        ([("in", "codec", "codes"), ("codec", "out", "audio")], ()),
        ([("in", "llm", "json"), ("llm", "out", "text")], ()),
    ],
)
def test_whoever_writes_the_codes_of_the_sound_speaks(edges, speakers):
    routed = tuple(RouteEdge(a, kind, b, kind, kind, 1, 1) for a, b, kind in edges)  # ports are called as their kind

    assert Pipeline("p", "p", (), routed).speakers_of("audio") == speakers


@pytest.mark.parametrize(
    ("outputs", "numbers"),
    [((), [0, 1, 2, 3]), (("text", "audio"), [0, 1, 2, 3]), (("text",), [0, 1]), (("audio",), [0, 2, 3])],
)
def test_needed_edges_lead_to_the_wanted_outputs(outputs, numbers):
    assert VOICE_CHAT.needed(outputs) == tuple(VOICE_CHAT.edges[number] for number in numbers)


def test_unknown_output_is_refused_with_the_known_ones():
    with pytest.raises(UnknownName, match=r"output 'txt'; did you mean 'text'.*audio, text"):
        VOICE_CHAT.needed(("txt",))


@pytest.mark.parametrize(
    ("edges", "is_branching"),
    [
        (("in.a -> x.a", "x.b -> out.b"), False),
        (("in.a -> x.a", "x.b -> out.b", "x.b -> y.a", "y.b -> out.c"), False),
        (("in.a -> x.a", "x.b -> y.a", "x.c -> y.b", "y.d -> out.d"), False),
        (("in.a -> x.a", "x.b -> y.a", "x.b -> z.a", "y.b -> out.y", "z.b -> out.z"), True),
        (("in.a -> x.a", "in.a -> y.a", "x.b -> z.a", "y.b -> z.b", "z.c -> out.c"), True),
        (("in.a -> x.a", "in.a -> y.a", "x.b -> y.b", "y.c -> out.c"), True),
        (("in.a -> x.a", "in.b -> y.b", "x.b -> y.a", "y.c -> out.c"), True),
        (("in.a -> x.a", "in.b -> x.b", "x.c -> y.a", "y.c -> out.c"), False),
    ],
)
def test_only_stages_with_several_neighbours_branch(edges, is_branching):
    assert pipeline(*edges).is_branching == is_branching
