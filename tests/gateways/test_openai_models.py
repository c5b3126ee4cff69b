from __future__ import annotations

import pytest

from gateways.openai_models import speakers_of
from omni_bus.core.pipeline import Pipeline
from omni_bus.wire.frames import RouteEdge


def pipeline(*edges: tuple[str, str, str]) -> Pipeline:
    """Return a pipeline of edges ``(source, target, kind)``; ports are called as their kind."""
    return Pipeline("p", "p", (), tuple(RouteEdge(a, kind, b, kind, kind, 1, 1) for a, b, kind in edges))


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
def test_whoever_writes_the_codes_of_the_sound_speaks(
    edges: list[tuple[str, str, str]], speakers: tuple[str, ...]
) -> None:
    assert speakers_of(pipeline(*edges)) == speakers
