"""The forms of transcriptions, field by field; what comes out of models is in tests/clients."""

from __future__ import annotations

from typing import Any

import pytest

from gateways.openai_transcriptions_body import parse
from gateways.problems import Problem
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import BadInput
from omni_bus.wire.frames import RouteEdge


def pipeline(name: str, *outputs: tuple[str, str]) -> Pipeline:
    edges = [RouteEdge("in", "audio", "asr", "audio", "audio", 8, 1024)]
    edges += [RouteEdge("asr", port, "out", port, kind, 8, 1024) for port, kind in outputs]
    return Pipeline(name, name, (), tuple(edges))


TIMED, PLAIN = pipeline("timed", ("text", "text"), ("segments", "json")), pipeline("plain", ("text", "text"))
MODELS = {"timed": TIMED, "plain": PLAIN}


@pytest.mark.parametrize(
    ("fields", "outputs", "params"),
    [
        ({}, ("text",), {}),
        ({"stream": "True", "response_format": "text"}, ("text",), {}),
        ({"response_format": "srt"}, ("text", "segments"), {}),
        (
            {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]},
            ("text", "segments"),
            {"word_timestamps": True},
        ),
        ({"language": "EN", "prompt": "x", "temperature": "0.5"}, None, {"language": "en", "prompt": "x"}),
        ({"language": "", "prompt": ""}, ("text",), {}),
        ({"max_new_tokens": "9", "repetition_penalty": "1.5"}, None, {"max_new_tokens": 9, "repetition_penalty": 1.5}),
        ({"chunking_strategy": "auto"}, ("text",), {}),
    ],
)
def test_fields_mean_what_they_say(
    fields: dict[str, Any], outputs: tuple[str, ...] | None, params: dict[str, Any]
) -> None:
    wanted = parse(fields, "transcribe", MODELS)

    assert outputs is None or wanted.outputs == outputs
    assert params.items() <= wanted.params.items()
    assert wanted.writers == ("asr",)
    assert wanted.is_streamed == ("stream" in fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "diarized_json"}, "response_format: 'diarized_json' came"),
        ({"response_format": "vtt", "model": "plain"}, "response_format: 'vtt' came (allowed: json, text; this model"),
        ({"response_format": "verbose_json", "stream": "true"}, "with stream = true"),
        ({"stream": "yes"}, "stream: 'yes' came (allowed: true, false)"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy: 'server_vad' came (allowed: auto)"),
        ({"timestamp_granularities[]": ["word"]}, "(allowed: with response_format = verbose_json)"),
        ({"timestamp_granularities[]": ["line"], "response_format": "verbose_json"}, "'line' came (allowed: segment"),
        ({"language": "e1"}, "language: 'e1' came (allowed: an ISO 639-1 code, as en)"),
        ({"temperature": "nan"}, "temperature: 'nan' came (allowed: a number from 0 to 1)"),
        ({"temperature": "-0.1"}, "temperature: '-0.1' came"),
        ({"temperature": ""}, "temperature: '' came"),
        ({"repetition_penalty": "0"}, "repetition_penalty: '0' came (allowed: a number above 0, at most 2)"),
        ({"max_new_tokens": "1.5"}, "max_new_tokens: '1.5' came (allowed: an integer from 1 to"),
        ({"max_new_tokens": "9999999"}, "max_new_tokens: '9999999' came"),
    ],
)
def test_what_is_not_allowed_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse(fields, "transcribe", MODELS)

    assert message in refused.value.message
    assert refused.value.field in refused.value.message


def test_translation_is_a_task_of_the_model() -> None:
    assert parse({}, "translate", MODELS).params == {"task": "translate"}


def test_unknown_model_lists_those_that_transcribe() -> None:
    with pytest.raises(Problem, match=r"model: 'x' is not served here \(allowed: timed, plain\)"):
        parse({"model": "x"}, "transcribe", MODELS)
