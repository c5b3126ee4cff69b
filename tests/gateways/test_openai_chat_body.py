"""Every field of a chat body: passed on, harmless, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateways.openai_chat_body import KNOWN, ChatFields, Template, parse, schema
from gateways.openai_fields import INERT, ONLY, Sampling, Shared, Speech, for_choice
from gateways.openai_structure import Tools
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
ABLE = Pipeline(
    "able",
    "able-1",
    (),
    (
        edge("in.messages -> llm.prompt", "json"),
        edge("llm.text -> out.text", "text"),
        edge("llm.reasoning -> out.reasoning", "text"),
        edge("llm.tool_calls -> out.tool_calls", "json"),
        edge("llm.rendered -> out.rendered", "json"),
    ),
)
MODELS = {"speaker-1": SPOKEN, "speaker": SPOKEN, "writer-1": WRITTEN, "able-1": ABLE}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse_with(**fields: Any):
    return parse({"messages": HELLO} | fields, MODELS)


def refusal_of(**fields: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        parse_with(**fields)
    return caught.value


def test_bare_body_asks_for_everything_and_sets_nothing() -> None:
    chat = parse_with()

    assert chat.pipeline is SPOKEN
    assert chat.outputs == chat.modalities == ("text", "audio")
    assert chat.params == chat.prompt == {}
    assert (chat.is_streamed, chat.stream_options.include_usage, chat.audio_format) == (False, False, "wav")
    assert chat.conversation.messages == HELLO


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
    ("logit_bias", {"5": -100, "6": 1.5}, {"5": -100.0, "6": 1.5}),
    ("bad_words", ["a"], ["a"]),
    ("skip_special_tokens", False, False),
    ("include_stop_str_in_output", True, True),
    ("cache_salt", "mine", "mine"),
]


@pytest.mark.parametrize(("name", "value", "passed"), SAMPLING)
def test_sampling_field_goes_to_the_stage_that_reads_messages(name: str, value: Any, passed: Any) -> None:
    assert parse_with(**{name: value}).params == {"llm": {name: passed}}


def test_table_of_sampling_fields_is_complete() -> None:
    """What needs more of the pipeline has tests of its own."""
    tabled = {name for name, _, _ in SAMPLING}

    assert set(Sampling.__struct_fields__) | {"max_tokens"} == tabled | {"prompt_logprobs"}


BAD: list[tuple[str, Any]] = [
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
    ("stop_token_ids", [0] * 65),
    ("ignore_eos", 1),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", [1]),
    ("bad_words", "a"),
    ("bad_words", [""]),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("skip_special_tokens", "no"),
    ("include_stop_str_in_output", 1),
    ("cache_salt", "a/b"),
    ("cache_salt", "x" * 129),
    ("voice", ""),
    ("voice", 1),
    ("speaker", 1),
    ("speed", 0.1),
    ("speed", 5),
    ("language", []),
    ("instructions", 1),
    ("stream", "yes"),
    ("stream_options", True),
    ("modalities", "text"),
    ("modalities", [1]),
    ("modalities", ["smell"]),
    ("audio", "wav"),
    ("model", 5),
    ("n", 0),
    ("n", 129),
    ("n", 1000),
    ("n", "2"),
    ("n", True),
    ("logprobs", 0),
    ("logprobs", "true"),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("top_logprobs", 5),
    ("response_format", "json"),
    ("structured_outputs", "json"),
    ("sampling_params_list", [5]),
    ("sampling_params_list", [{}, {}, {}]),
    ("request_id", "a b"),
    ("session_id", "a\nb"),
    ("extra_body", "x"),
    ("extra_body", [1]),
    ("priority", 1001),
    ("user", 5),
    ("return_token_ids", "x"),
    ("return_token_ids", True),
    ("return_prompt_text", 1),
    ("return_prompt_text", True),
    ("prompt_logprobs", 1),
    ("return_stage_metrics", "maybe"),
    ("return_stage_metrics", 1),
    ("include_reasoning", "yes"),
    ("echo", 1),
    ("add_generation_prompt", 1),
    ("continue_final_message", "x"),
    ("add_special_tokens", 1),
    ("documents", {}),
    ("documents", ["x"]),
    ("chat_template", ""),
    ("chat_template", "{{ x }}"),
    ("chat_template_kwargs", "x"),
    ("chat_template_kwargs", {"a": 2**64}),
    ("reasoning_effort", 1),
    ("mm_processor_kwargs", []),
    ("tools", []),
    ("tools", {}),
    ("tools", [TOOL]),
    ("tool_choice", "auto"),
    ("tool_choice", 1),
    ("parallel_tool_calls", "no"),
    ("messages", []),
    ("messages", "Hello"),
    ("messages", None),
]
"""Wrong types, out of range, unknown values, and what this model does not do."""


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused_with_field_and_allowed(name: str, value: Any) -> None:
    error = refusal_of(**{name: value})

    assert error.field == name
    assert error.message.startswith(f"{name}: ")
    assert "(allowed: " in error.message
    assert "allowed: )" not in error.message


def test_table_of_refusals_has_every_field() -> None:
    declared = {
        field
        for struct in (ChatFields, Template, Tools, Shared, Sampling, Speech)
        for field in struct.__struct_fields__
    }

    assert declared == {name for name, _ in BAD}
    assert declared | ONLY.keys() | set(INERT) == KNOWN == schema([SPOKEN])["properties"].keys()


def test_null_means_absent() -> None:
    chat = parse_with(**dict.fromkeys(KNOWN - {"messages"}), unknown=None)

    assert (chat.params, chat.prompt, chat.n) == ({}, {}, 1)


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "'temperature'"), ("max_token", "'max_tokens'"), ("zzz", "")]
)
def test_unknown_field_is_refused_by_name(name: str, near: str) -> None:
    error = refusal_of(**{name: 1})

    assert error.field == name
    assert "unknown field" in error.message
    assert near in error.message


def test_newer_token_limit_wins() -> None:
    assert parse_with(max_tokens=5, max_completion_tokens=3).params == {"llm": {"max_tokens": 3}}


def test_seed_of_any_sign_folds_into_what_engines_take() -> None:
    seeds = [parse_with(seed=seed).params["llm"]["seed"] for seed in (-1, 2**63 - 1, 2**32 - 2, 2**32 - 1)]

    assert all(0 <= seed <= 2**32 - 2 for seed in seeds)
    assert seeds[2:] == [2**32 - 2, 0]


def test_each_choice_draws_numbers_of_its_own() -> None:
    chat = parse_with(n=3, seed=2**32 - 2)

    assert [for_choice(chat.params, i)["llm"]["seed"] for i in range(chat.n)] == [2**32 - 2, 0, 1]
    assert for_choice({"llm": {"temperature": 1.0}}, 2) == {"llm": {"temperature": 1.0}}


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


@pytest.mark.parametrize("name", ["voice", "speaker"])
def test_voice_is_one_of_those_that_the_pipeline_has(name: str) -> None:
    models = {"omni": msgspec.structs.replace(SPOKEN, voices=("Chelsie", "Ethan"))}

    def params(voice: str) -> Any:
        return parse({"messages": HELLO, name: voice}, models).params

    assert params("ethan") == {"voice": {"voice": "ethan"}}
    assert params("Default") == {}
    with pytest.raises(BadInput) as caught:
        params("Bob")
    assert caught.value.field == name
    assert caught.value.message == f"{name}: 'Bob' came (allowed: Chelsie, Ethan, default)"


def test_parameters_by_stage_replace_the_others() -> None:
    chat = parse_with(temperature=1, speed=2, sampling_params_list=[{"tokens": 3}])

    assert chat.params == {"llm": {"tokens": 3}, "voice": {"speed": 2.0}}
    assert parse_with(sampling_params_list=[None, {"a": 1}]).params == {"voice": {"a": 1}}


def test_parameters_by_stage_leave_what_the_answer_consists_of() -> None:
    chat = parse_with(logprobs=True, temperature=1, sampling_params_list=[{"tokens": 3}])

    assert chat.params == {"llm": {"logprobs": 0, "tokens": 3}}
    chat = parse_with(voice="heart", sampling_params_list=[None, {"temperature": 1}])
    assert chat.params == {"voice": {"voice": "heart", "temperature": 1}}


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
    assert "(allowed: text," in refusal_of(modalities=["reasoning"], model="able-1").message


@pytest.mark.parametrize("fmt", ["wav", "pcm", "pcm16", "flac", "mp3", "opus"])
def test_audio_format_is_taken(fmt: str) -> None:
    assert parse_with(audio={"format": fmt, "voice": "alloy"}).audio_format == fmt


def test_unknown_audio_format_lists_the_known() -> None:
    error = refusal_of(audio={"format": "ogg"})

    assert error.field == "audio.format"
    assert "'ogg' came (allowed: wav, pcm, pcm16, flac, mp3, opus, aac)" in error.message
    assert refusal_of(audio={"rate": 8000}).field == "audio.rate"


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
    assert parse_with(stream=True, stream_options={"include_usage": True}).stream_options.include_usage
    assert not parse_with(stream=True, stream_options={}).stream_options.include_usage
    assert not parse_with(stream=True, stream_options={"include_obfuscation": False}).stream_options.include_usage
    assert refusal_of(stream=True, stream_options={"include_usage": 1}).field == "stream_options.include_usage"
    assert refusal_of(stream=True, stream_options={"inclued": 1}).field == "stream_options.inclued"


def test_continuous_usage_needs_the_count_of_the_prompt() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}

    chat = parse_with(model="able-1", stream=True, stream_options=both)
    assert chat.stream_options.continuous_usage_stats
    assert "rendered" in chat.outputs
    name = "stream_options.continuous_usage_stats"
    assert refusal_of(model="writer-1", stream=True, stream_options=both).field == name
    assert refusal_of(model="able-1", stream=True, stream_options={"continuous_usage_stats": True}).field == name


def test_lower_priority_numbers_go_first_as_in_vllm() -> None:
    assert parse_with().priority == 0
    assert parse_with(priority=-3).priority == 3
    assert parse_with(extra_body={"priority": 7}).priority == -7


@pytest.mark.parametrize("name", ONLY)
def test_field_without_effect_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    harmless, allowed = ONLY[name]

    for value in (None, *harmless):
        assert parse_with(**{name: value}).params == {}
    for value in (2, "x", [1], {"a": 1}):
        error = refusal_of(**{name: value})
        assert error.field == name
        assert error.message.endswith(f"(allowed: {allowed})")


def test_fields_of_a_literal_extra_body_count_as_the_others() -> None:
    assert parse_with(extra_body={"top_k": 5}).params == {"llm": {"top_k": 5}}
    assert refusal_of(extra_body={"top_k": "x"}).field == "top_k"
    assert refusal_of(extra_body={"unknown": 1}).field == "unknown"
    assert refusal_of(extra_body={"top_k": 5}, top_k=5).field == "extra_body.top_k"
    assert refusal_of(extra_body={"extra_body": {}}).field == "extra_body.extra_body"


def test_number_without_a_form_on_the_wire_is_refused_at_its_place() -> None:
    error = refusal_of(sampling_params_list=[None, {"seed": [2**64]}])

    assert error.field == "sampling_params_list[1]"
    assert "64 bits" in error.message


def test_fields_for_operators_are_accepted() -> None:
    fields: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }

    assert parse_with(**fields).params == {}


# --- what the answer consists of ----------------------------------------------------------------------------


def test_logprobs_go_to_the_engine_with_their_number() -> None:
    assert parse_with(logprobs=True).params == {"llm": {"logprobs": 0}}
    assert parse_with(logprobs=True, top_logprobs=20).params == {"llm": {"logprobs": 20}}
    assert parse_with(logprobs=True, top_logprobs=20).logprobs == 20
    assert parse_with(logprobs=False, top_logprobs=0).logprobs is None
    assert refusal_of(logprobs=True, modalities=["audio"]).field == "logprobs"


def test_token_ids_and_prompts_need_a_model_that_tells_them() -> None:
    chat = parse_with(model="able-1", return_token_ids=True, return_prompt_text=True, prompt_logprobs=3)

    assert chat.outputs == ("text", "reasoning", "rendered")
    assert chat.params == {"llm": {"prompt_logprobs": 3, "token_ids": True}}
    assert refusal_of(model="able-1", prompt_logprobs=3, stream=True).field == "prompt_logprobs"


def test_reasoning_comes_unless_it_is_not_wanted() -> None:
    assert parse_with(model="able-1").outputs == ("text", "reasoning")
    assert parse_with(model="able-1", include_reasoning=False).outputs == ("text",)


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, {"json_object": True}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: 'a'"}}, {"grammar": "start: 'a'"}),
    ],
)
def test_structure_goes_to_the_engine(fields: dict[str, Any], structure: Any) -> None:
    assert parse_with(**fields).params == ({} if structure is None else {"llm": {"structure": structure}})


def _deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        found = {"properties": {"a": found}}
    return found


def _schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize(
    ("response_format", "field"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "structural_tag"}, "response_format.type"),
        ({"type": "text", "strict": True}, "response_format.strict"),
        ({"type": "text", "json_schema": {"name": "a"}}, "response_format.json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a b"}}, "response_format.json_schema.name"),
        (_schema_format([]), "response_format.json_schema.schema"),
        (_schema_format({"type": "objekt"}), "response_format.json_schema.schema.type"),
        (
            _schema_format({"properties": {"a": {"minimum": "x"}}}),
            "response_format.json_schema.schema.properties.a.minimum",
        ),
        (_schema_format({"$ref": "#/nowhere"}), "response_format.json_schema.schema"),
        (_schema_format({"$ref": "http://127.0.0.1/x"}), "response_format.json_schema.schema"),
        (_schema_format({"$ref": "file:///etc/passwd"}), "response_format.json_schema.schema"),
        (_schema_format({"$schema": "http://nowhere"}), "response_format.json_schema.schema"),
        (_schema_format({"pattern": "("}), "response_format.json_schema.schema.pattern"),
        (_schema_format({"minimum": 2**64}), "response_format.json_schema.schema"),
        (_schema_format({"title": "\ud800"}), "response_format.json_schema.schema"),
        (_schema_format(_deep(20)), "response_format.json_schema.schema"),
        (_schema_format(_deep(900)), "response_format.json_schema.schema"),
        (_schema_format({"description": "x" * 70_000}), "response_format.json_schema.schema"),
    ],
)
def test_format_that_means_nothing_is_refused_at_its_place(response_format: Any, field: str) -> None:
    assert refusal_of(response_format=response_format).field == field


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": SCHEMA, "regex": "a"}, "structured_outputs"),
        ({"json": {"type": "objekt"}}, "structured_outputs.json.type"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"xml": "a"}, "structured_outputs.xml"),
    ],
)
def test_structured_outputs_that_mean_nothing_are_refused(value: Any, field: str) -> None:
    assert refusal_of(structured_outputs=value).field == field


def test_two_structures_are_refused() -> None:
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}

    assert refusal_of(**fields).field == "structured_outputs"


# --- tools --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "passed"),
    [
        (None, "auto"),
        ("none", "none"),
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "look"}}, "function:look"),
    ],
)
def test_tools_go_into_the_prompt(choice: Any, passed: str) -> None:
    chat = parse_with(model="able-1", tools=[TOOL], tool_choice=choice)

    assert chat.prompt == {"tools": [TOOL], "tool_choice": passed}
    assert chat.outputs == ("text", "tool_calls", "reasoning")


def test_single_calls_are_asked_for() -> None:
    chat = parse_with(model="able-1", tools=[TOOL], parallel_tool_calls=False)

    assert chat.prompt["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL | {"cost": 1}]}, "tools[0].cost"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "objekt"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_tool_that_can_not_be_called_is_refused_at_its_place(fields: dict[str, Any], field: str) -> None:
    assert refusal_of(model="able-1", **fields).field == field


def test_tools_of_a_model_that_calls_none_are_refused() -> None:
    assert "writer-1 calls no tools" in refusal_of(model="writer-1", tools=[TOOL]).message


# --- the template -------------------------------------------------------------------------------------------


def test_template_fields_go_into_the_prompt() -> None:
    fields: dict[str, Any] = {
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "documents": [{"text": "a"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "mm_processor_kwargs": {"use_audio_in_video": True},
    }

    assert parse_with(**fields).prompt == fields
    assert parse_with(continue_final_message=True).prompt == {
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert refusal_of(continue_final_message=True, add_generation_prompt=True).field == "continue_final_message"


def test_template_of_a_request_needs_trust() -> None:
    body = {"messages": HELLO, "chat_template": "{{ messages }}"}

    assert parse(body, MODELS, trusts_templates=True).prompt == {"chat_template": "{{ messages }}"}


def test_echo_gives_the_begun_answer_back() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]

    assert parse_with(messages=begun, echo=True).echo == "It is"
    assert parse_with(messages=HELLO, echo=True).echo == ""
    assert parse_with(messages=begun).echo == ""
