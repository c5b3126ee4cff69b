"""Every field of a chat body: passed on, harmless, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gateways.openai_chat_body import ONLY, parse
from gateways.problems import Problem
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import BadInput
from omni_bus.wire.frames import RouteEdge


def edge(text: str, kind: str) -> RouteEdge:
    (source, source_port), (target, target_port) = (end.split(".") for end in text.split(" -> "))
    return RouteEdge(source, source_port, target, target_port, kind, 8, 2**20)


SPOKEN = Pipeline(
    "spoken",
    "speaker-1",
    ("speaker",),
    (
        edge("in.messages -> llm.prompt", "json"),
        edge("llm.text -> out.text", "text"),
        edge("llm.text -> voice.text", "text"),
        edge("voice.audio -> out.audio", "audio"),
    ),
)
WRITTEN = Pipeline(
    "written", "writer-1", (), (edge("in.messages -> llm.prompt", "json"), edge("llm.text -> out.text", "text"))
)
MODELS = {"speaker-1": SPOKEN, "speaker": SPOKEN, "writer-1": WRITTEN}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def parse_with(**fields: Any):
    return parse({"messages": HELLO} | fields, MODELS)


def refusal_of(**fields: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        parse_with(**fields)
    return caught.value


def test_bare_body_asks_for_everything_and_sets_nothing() -> None:
    chat = parse_with()

    assert chat.pipeline is SPOKEN
    assert chat.outputs == ("text", "audio")
    assert chat.params == {}
    assert (chat.is_streamed, chat.has_usage_chunk, chat.audio_format) == (False, False, "wav")
    assert chat.messages == HELLO


SAMPLING: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", 2.0, 2.0),
    ("top_p", 0.5, 0.5),
    ("top_k", -1, -1),
    ("min_p", 0.1, 0.1),
    ("max_tokens", 5, 5),
    ("min_tokens", 0, 0),
    ("seed", 7, 7),
    ("stop", "END", ["END"]),
    ("stop", ["a", "b"], ["a", "b"]),
    ("stop_token_ids", [1, 2], [1, 2]),
    ("ignore_eos", True, True),
    ("frequency_penalty", -2, -2.0),
    ("presence_penalty", 1.5, 1.5),
    ("repetition_penalty", 1.1, 1.1),
]


@pytest.mark.parametrize(("name", "value", "passed"), SAMPLING)
def test_sampling_field_goes_to_the_stage_that_reads_messages(name: str, value: Any, passed: Any) -> None:
    assert parse_with(**{name: value}).params == {"llm": {name: passed}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", "5"),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0),
        ("voice", ""),
        ("voice", 1),
        ("speed", 0.1),
        ("speed", 5),
        ("language", []),
        ("stream", "yes"),
        ("stream_options", True),
        ("modalities", "text"),
        ("modalities", [1]),
        ("modalities", ["smell"]),
        ("audio", "wav"),
        ("model", 5),
        ("sampling_params_list", [5]),
        ("sampling_params_list", [{}, {}, {}]),
        ("request_id", "a b"),
        ("extra_body", "x"),
        ("extra_body", [1]),
        ("messages", []),
        ("messages", "Hello"),
        ("messages", None),
    ],
)
def test_bad_value_is_refused_with_field_and_allowed(name: str, value: Any) -> None:
    error = refusal_of(**{name: value})

    assert error.field == name
    assert error.message.startswith(f"{name}: ")
    assert "(allowed: " in error.message
    assert "allowed: )" not in error.message


def test_null_means_absent() -> None:
    assert parse_with(temperature=None, stop=None, modalities=None, tools=None, stream=None, audio=None).params == {}


def test_newer_token_limit_wins() -> None:
    assert parse_with(max_tokens=5, max_completion_tokens=3).params == {"llm": {"max_tokens": 3}}


def test_seed_of_any_sign_folds_into_what_engines_take() -> None:
    seeds = [parse_with(seed=seed).params["llm"]["seed"] for seed in (-1, 2**63 - 1, 2**32 - 2, 2**32 - 1)]

    assert all(0 <= seed <= 2**32 - 2 for seed in seeds)
    assert seeds[2:] == [2**32 - 2, 0]


def test_voice_fields_go_to_the_stage_that_makes_sound() -> None:
    fields = {"voice": "heart", "speed": 1.5, "language": "en", "instructions": "softly"}

    assert parse_with(**fields).params == {"voice": fields}
    assert parse_with(speaker="heart").params == {"voice": {"voice": "heart"}}
    assert parse_with(voice="heart", modalities=["text"]).params == {}


@pytest.mark.parametrize("name", ["voice", "speaker", "language", "instructions"])
def test_voice_of_a_silent_model_is_refused(name: str) -> None:
    error = refusal_of(model="writer-1", **{name: "heart"})

    assert error.field == name
    assert "writer-1 makes no audio" in error.message


def test_parameters_by_stage_replace_the_others() -> None:
    chat = parse_with(temperature=1, speed=2, sampling_params_list=[{"tokens": 3}])

    assert chat.params == {"llm": {"tokens": 3}, "voice": {"speed": 2.0}}
    assert parse_with(sampling_params_list=[None, {"a": 1}]).params == {"voice": {"a": 1}}


@pytest.mark.parametrize(
    ("modalities", "outputs"),
    [
        ([], ("text", "audio")),
        (["text"], ("text",)),
        (["audio"], ("audio",)),
        (["audio", "text"], ("text", "audio")),
    ],
)
def test_modalities_choose_the_outputs(modalities: list[str], outputs: tuple[str, ...]) -> None:
    assert parse_with(modalities=modalities).outputs == outputs


def test_unknown_modality_lists_the_supported() -> None:
    assert "(allowed: text, audio" in refusal_of(modalities=["text", "image"]).message
    assert "(allowed: text," in refusal_of(modalities=["audio"], model="writer-1").message


@pytest.mark.parametrize("fmt", ["wav", "pcm", "pcm16", "flac", "mp3", "opus"])
def test_audio_format_is_taken(fmt: str) -> None:
    assert parse_with(audio={"format": fmt, "voice": "alloy"}).audio_format == fmt


def test_unknown_audio_format_lists_the_known() -> None:
    error = refusal_of(audio={"format": "aac"})

    assert error.field == "audio.format"
    assert "'aac' came (allowed: wav, pcm, pcm16, flac, mp3, opus)" in error.message


def test_model_is_found_by_every_name() -> None:
    assert parse_with(model="speaker").pipeline is SPOKEN
    assert parse_with(model="writer-1").pipeline is WRITTEN


def test_unknown_model_is_not_found() -> None:
    with pytest.raises(Problem) as caught:
        parse_with(model="nope")
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert "speaker-1, speaker, writer-1" in caught.value.message


def test_stream_options_need_a_stream() -> None:
    assert refusal_of(stream_options={"include_usage": True}).field == "stream_options"
    assert parse_with(stream=True, stream_options={"include_usage": True}).has_usage_chunk
    assert not parse_with(stream=True, stream_options={}).has_usage_chunk
    error = refusal_of(stream=True, stream_options={"continuous_usage_stats": True})
    assert error.field == "stream_options.continuous_usage_stats"
    assert refusal_of(stream=True, stream_options={"include_usage": 1}).field == "stream_options.include_usage"


def test_lower_priority_numbers_go_first_as_in_vllm() -> None:
    assert parse_with().priority == 0
    assert parse_with(priority=-3).priority == 3
    assert parse_with(extra_body={"priority": 7}).priority == -7
    assert parse_with(priority=1, extra_body={"priority": 7}).priority == -1
    for value in (1001, -1001, 1.5, "high", True):
        assert refusal_of(priority=value).field == "priority"
        assert "an integer from -1000 to 1000" in refusal_of(extra_body={"priority": value}).message


@pytest.mark.parametrize("name", ONLY)
def test_field_without_effect_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    harmless, allowed = ONLY[name]

    for value in (None, *harmless):
        assert parse_with(**{name: value}).params == {}
    for value in (2, "x", [1], {"a": 1}):
        error = refusal_of(**{name: value})
        assert error.field == name
        assert error.message.endswith(f"(allowed: {allowed})")


@pytest.mark.parametrize("name", ONLY)
def test_nested_extensions_are_not_taken_and_ignored(name: str) -> None:
    harmless, _ = ONLY[name]

    for value in (None, *harmless):
        assert parse_with(extra_body={name: value, "unknown": 1}).params == {}
    assert refusal_of(extra_body={name: "x"}).field == f"extra_body.{name}"


def test_number_without_a_form_on_the_wire_is_refused_at_its_place() -> None:
    error = refusal_of(sampling_params_list=[None, {"seed": [2**64]}])

    assert error.field == "sampling_params_list[1]"
    assert "64 bits" in error.message


def test_boolean_is_not_taken_for_one() -> None:
    assert refusal_of(n=True).field == "n"
    assert refusal_of(logprobs=0).field == "logprobs"


def test_unknown_and_harmless_keys_are_accepted() -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "parallel_tool_calls": True,
        "service_tier": "auto",
    }

    assert parse_with(**harmless, some_extension={"deep": [1]}).params == {}


# --- messages -----------------------------------------------------------------------------------------------


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]

    assert parse_with(messages=[{"role": "developer", "content": parts}]).messages == [
        {"role": "developer", "content": "Hello"}
    ]


def test_answer_of_ours_can_be_sent_back() -> None:
    answered = {
        "role": "assistant",
        "content": "Hi.",
        "refusal": None,
        "audio": {"id": "a", "data": "UklG"},
        "name": None,
    }
    spoken = {
        "role": "assistant",
        "content": None,
        "audio": {"id": "a", "data": "", "transcript": "Hey."},
        "tool_calls": [],
    }

    assert [message["content"] for message in parse_with(messages=[answered, spoken]).messages] == ["Hi.", "Hey."]


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        ("Hello", "messages[0]", "an object with 'role' and 'content'"),
        ({"content": "x"}, "messages[0].role", "null came (allowed: system"),
        ({"role": "robot", "content": "x"}, "messages[0].role", "'robot' came"),
        ({"role": "tool", "content": "x"}, "messages[0].role", "no tools"),
        ({"role": "user"}, "messages[0].content", "null came"),
        ({"role": "user", "content": []}, "messages[0].content", "an empty list came"),
        ({"role": "user", "content": 5}, "messages[0].content", "5 came"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type", "'image_url' came"),
        ({"role": "user", "content": [{"image_url": "x"}]}, "messages[0].content[0].type", "'image_url' came"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "null came"),
        ({"role": "user", "content": [7]}, "messages[0].content[0]", "7 came"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[0].name", "'Ann' came"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls", "a list of 1 came"),
    ],
)
def test_bad_message_is_refused_at_its_place(message: Any, field: str, words: str) -> None:
    error = refusal_of(messages=[message])

    assert error.field == field
    assert words in error.message


def test_refusal_shows_no_long_prompt() -> None:
    assert "secret" not in refusal_of(messages=["secret " * 100]).message
