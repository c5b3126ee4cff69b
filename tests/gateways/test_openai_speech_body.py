"""Bodies of speech: what each field comes to, and every refusal by its name."""

from __future__ import annotations

from typing import Any

import pytest

from gateways.openai_speech_batch import schema as batch_schema
from gateways.openai_speech_body import KNOWN, MAX_SPEECH_CHARS, ONLY, Speech, calls, parse, schema, share_speed
from gateways.problems import Problem
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import BadInput
from omni_bus.wire.frames import RouteEdge
from omni_bus.wire.payloads import Audio, Blob, Text


def pipeline(name: str, *inputs: tuple[str, str], params: dict[str, Any] | None = None) -> Pipeline:
    edges = [RouteEdge("in", port, "voice", port, kind, 8, 2**20) for port, kind in inputs]
    edges.append(RouteEdge("voice", "audio", "out", "audio", "audio", 8, 2**20))
    return Pipeline(name, name, (), tuple(edges), params={"voice": params} if params else {})


SPEED = {"type": "number", "minimum": 0.5, "maximum": 2, "default": 1.0}
PLAIN = pipeline("plain", ("text", "text"), params={"voice": {}, "seed": {}, "speed": SPEED})
TOLD = ("voice", "seed", "language", "instructions", "task_type", "reference_text", "max_new_tokens", "top_k")
ABLE = pipeline("able", ("text", "text"), ("reference", "audio"), params={name: {} for name in TOLD})
CHAT = Pipeline("chat", "chat", (), (RouteEdge("in", "messages", "llm", "prompt", "json", 8, 1024),))
MODELS = {"chat": CHAT, "plain": PLAIN, "able": ABLE}


def parsed(**fields: Any) -> Speech:
    return parse({"input": "Hello.", **fields}, MODELS)


def test_the_first_pipeline_that_speaks_is_the_default() -> None:
    speech = parsed()

    assert speech.pipeline is PLAIN
    assert (speech.format, speech.sample_rate, speech.speed, speech.delivery) == ("wav", None, 1.0, "whole")
    assert speech.params == {}


def test_a_body_is_one_request_on_the_bus() -> None:
    reference = Audio(8000, 1, "s16", Blob(b"\0\0"))
    speech = parsed(model="able", voice="A", ref_audio="data:,x", ref_text="x", priority=3, session_id="s")

    (call,) = calls(speech, reference)
    (without,) = calls(parsed(model="able"))
    (plain,) = calls(parsed())

    assert (call.pipeline, call.outputs) == ("able", ("audio",))
    assert call.inputs == {"text": [Text("Hello.")], "reference": [reference]}
    assert call.params == {"voice": {"voice": "a", "task_type": "Base", "reference_text": "x"}}
    assert (call.priority, call.session) == (-3, "s")
    assert without.inputs == {"text": [Text("Hello.")], "reference": []}
    assert plain.inputs == {"text": [Text("Hello.")]}


@pytest.mark.parametrize(
    ("fields", "delivery"),
    [
        ({"stream": True}, "sse"),
        ({"stream": True, "stream_format": "audio"}, "audio"),
        ({"stream_format": "audio"}, "audio"),
        ({"stream_format": "sse"}, "sse"),
        ({"stream": False, "stream_format": None}, "whole"),
    ],
)
def test_delivery(fields: dict[str, Any], delivery: str) -> None:
    assert parsed(**fields).delivery == delivery


@pytest.mark.parametrize(
    ("speed", "own", "rest"), [(None, None, 1.0), (1.5, 1.5, 1.0), (4.0, 2.0, 2.0), (0.25, 0.5, 0.5), (1.0, 1.0, 1.0)]
)
def test_the_voice_does_what_its_range_allows(speed: float | None, own: float | None, rest: float) -> None:
    assert share_speed(PLAIN, speed) == (own, rest)
    assert share_speed(ABLE, speed) == (None, speed or 1.0)


def test_a_range_of_a_parameter_that_may_be_null_is_found() -> None:
    nullable = pipeline("p", ("text", "text"), params={"speed": {"anyOf": [SPEED, {"type": "null"}]}})
    endless = pipeline("p", ("text", "text"), params={"speed": {"type": "number"}})

    assert share_speed(nullable, 4.0) == (2.0, 2.0)
    assert share_speed(endless, 4.0) == (4.0, 1.0)


def test_seeds_of_64_bits_are_folded_into_the_voices_range() -> None:
    small = pipeline("p", ("text", "text"), params={"seed": {"type": "integer", "minimum": 0, "maximum": 9}})

    for seed, folded in ((5, 5), (10, 0), (-1, 9), (2**63 - 1, 7)):
        assert parse({"input": "x", "seed": seed}, {"p": small}).params == {"voice": {"seed": folded}}
    assert parsed(seed=-1).params == {"voice": {"seed": 2**63 - 1}}


@pytest.mark.parametrize(
    ("given", "told"), [("french", "French"), ("en", "en"), ("pt-BR", "pt-BR"), ("AUTO", None), ("Auto", None)]
)
def test_languages_are_names_or_codes(given: str, told: str | None) -> None:
    speech = parsed(model="able", language=given)

    assert speech.params == ({} if told is None else {"voice": {"language": told}})


@pytest.mark.parametrize("task_type", ["CustomVoice", None])
def test_a_voice_that_has_one_way_to_speak_is_custom(task_type: str | None) -> None:
    assert parsed(task_type=task_type).params == {}
    assert parsed(model="able", task_type="CustomVoice").params == {"voice": {"task_type": "CustomVoice"}}


@pytest.mark.parametrize("text", ["a\tb\nc\r\n", "\u00e9\u4f60\U0001f642", "x\u200d\u2028y", "9", "?!"])
def test_texts_pass_as_they_are(text: str) -> None:
    assert parsed(input=text).text == text


def test_extra_body_is_a_place_for_extensions() -> None:
    assert parsed(extra_body={"seed": 4, "extra_params": {"voice2": 1}} | {"extra_params": None}).params == {
        "voice": {"seed": 4}
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": " \n\t"}, "input"),
    ({"input": 7}, "input"),
    ({"input": ["a"]}, "input"),
    ({"input": "x" * (MAX_SPEECH_CHARS + 1)}, "input"),
    ({"input": "x" * 1_000_000}, "input"),
    ({"input": "a\0b"}, "input"),
    ({"input": "a\x1b[0m"}, "input"),
    ({"input": "a\x7f"}, "input"),
    ({"voice": ""}, "voice"),
    ({"voice": " "}, "voice"),
    ({"voice": "x" * 257}, "voice"),
    ({"voice": "a\nb"}, "voice"),
    ({"voice": 3}, "voice"),
    ({"voice": {}}, "voice.id"),
    ({"voice": {"id": 3}}, "voice.id"),
    ({"voice": {"id": "a", "name": "b"}}, "voice.name"),
    ({"voice": "a", "speaker": "b"}, "speaker"),
    ({"speaker": {"id": ""}}, "speaker.id"),
    ({"response_format": "ogg"}, "response_format"),
    ({"response_format": "WAV"}, "response_format"),
    ({"sample_rate": 7999}, "sample_rate"),
    ({"sample_rate": 192_001}, "sample_rate"),
    ({"sample_rate": 24000.5}, "sample_rate"),
    ({"sample_rate": "24000"}, "sample_rate"),
    ({"sample_rate": 44_100, "response_format": "opus"}, "sample_rate"),
    ({"sample_rate": 96_000, "response_format": "mp3"}, "sample_rate"),
    ({"sample_rate": 191_999, "response_format": "flac"}, "sample_rate"),
    ({"speed": 0.2}, "speed"),
    ({"speed": 4.1}, "speed"),
    ({"speed": "fast"}, "speed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_format": "raw"}, "stream_format"),
    ({"task_type": "Clone"}, "task_type"),
    ({"task_type": "VoiceDesign"}, "task_type"),
    ({"task_type": "Base"}, "task_type"),
    ({"language": "French"}, "language"),
    ({"language": ""}, "language"),
    ({"instructions": "x" * 501}, "instructions"),
    ({"instructions": "Softly."}, "instructions"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": 4097}, "max_new_tokens"),
    ({"max_new_tokens": 5}, "max_new_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"ref_audio": "data:,x"}, "ref_audio"),
    ({"ref_text": "x"}, "ref_text"),
    ({"references": [{"audio_path": "data:,x"}]}, "references"),
    ({"extra_params": {"speed": 2}}, "extra_params.speed"),
    ({"extra_params": {"seed": 2}, "seed": 3}, "extra_params.seed"),
    ({"extra_params": {"top_k": 2}}, "extra_params.top_k"),
    ({"extra_params": [1]}, "extra_params"),
    ({"extra_params": {"x": 2**70}}, "extra_params.x"),
    ({"extra_body": 3}, "extra_body"),
    ({"extra_body": {"input": "again"}}, "extra_body.input"),
    ({"word_timestamps": True}, "word_timestamps"),
    ({"x_vector_only_mode": True}, "x_vector_only_mode"),
    ({"speaker_embedding": [0.5]}, "speaker_embedding"),
    ({"initial_codec_chunk_frames": 4}, "initial_codec_chunk_frames"),
    ({"non_streaming_mode": True}, "non_streaming_mode"),
    ({"ref_audio_2": "x"}, "ref_audio_2"),
    ({"ambient_sound": "rain"}, "ambient_sound"),
    ({"duration_seconds": 3}, "duration_seconds"),
    ({"session_id": "a\nb"}, "session_id"),
    ({"priority": 1001}, "priority"),
    ({"user": 5}, "user"),
    ({"model": ""}, "model"),
    ({"nonsense": 1}, "nonsense"),
    ({"Voice": "a"}, "Voice"),
    ({"model": "able", "ref_text": "x"}, "ref_text"),
    ({"model": "able", "ref_audio": []}, "ref_audio"),
    ({"model": "able", "ref_audio": ["a", "b"]}, "ref_audio"),
    ({"model": "able", "ref_audio": ""}, "ref_audio"),
    ({"model": "able", "ref_audio": "data:,x", "task_type": "CustomVoice"}, "task_type"),
    ({"model": "able", "references": []}, "references"),
    ({"model": "able", "references": [{"text": "x"}]}, "references[0].audio_path"),
    ({"model": "able", "references": [{"audio_path": "a", "text": 1}]}, "references[0].text"),
    ({"model": "able", "references": [{"audio_path": "a", "name": 1}]}, "references[0].name"),
    ({"model": "able", "references": [{"audio_path": "a"}], "ref_audio": "b"}, "references"),
    ({"model": "able", "extra_params": {"top_p": 0.5}}, "extra_params.top_p"),
]


@pytest.mark.parametrize(("fields", "field"), BAD, ids=lambda value: str(value)[:60])
def test_what_cant_be_honoured_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as caught:
        parsed(**fields)

    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
    assert "allowed:" in caught.value.message
    assert len(caught.value.message) < 500


def test_every_field_that_asks_for_nothing_is_taken() -> None:
    for name, (harmless, _) in ONLY.items():
        for value in (None, *harmless):
            assert parsed(**{name: value}).params == {}
    assert parsed(**dict.fromkeys(KNOWN - {"input"})) == parsed()


@pytest.mark.parametrize("model", ["nope", "chat"])
def test_other_models_are_not_found(model: str) -> None:
    with pytest.raises((Problem, BadInput)) as caught:
        parsed(model=model)

    assert "model: " in str(caught.value)


def test_schemas_have_every_field() -> None:
    properties = schema()["properties"]

    assert properties.keys() >= KNOWN
    assert set(batch_schema()["properties"]) >= properties.keys() - {"input", "stream_format"} | {"items"}
