"""The body of ``POST /v1/chat/completions``: checked field by field, turned into what the bus runs.

A field is passed on, or harmless, or refused by name; none is taken and then ignored. Keys that nobody knows are
accepted, since extensions arrive that way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateways.fields import read_fields, refusal, shown
from gateways.openapi import nullable
from gateways.problems import Problem
from omni_bus.core.pipeline import IN, OUT, Pipeline
from omni_bus.errors import BadInput
from omni_bus.media.encode import FORMATS, Format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MESSAGES = "messages"
"""The input port of every pipeline that chat can serve."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")

_MAX_SEED = 2**32 - 2
"""What engines take; OpenAI's seeds have 64 bits and are folded into it."""

_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
_Bool = Annotated[bool, Meta(description="true or false")]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1, description=f"an integer from 1 to {2**31 - 1}")]
_String = Annotated[str, Meta(min_length=1, max_length=4096, description="a string of 1 to 4096 characters")]
_Object = Annotated[dict[str, Any], Meta(description="an object")]


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, where it is given, to the stages that read the messages. Names are those of the engines."""

    temperature: Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="an integer, at least 1; 0 or -1 for all")] | None = (
        None
    )
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] | None = None
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1, description="an integer, at least 0")] | None = None
    seed: Annotated[_Int64, Meta(description="an integer of 64 bits")] | None = None
    stop: (
        Annotated[
            _StopString | Annotated[list[_StopString], Meta(max_length=4)],
            Meta(description="a string, or a list of at most 4 strings, each of 1 to 256 characters"),
        ]
        | None
    ) = None
    stop_token_ids: (
        Annotated[
            list[Annotated[int, Meta(ge=0, le=2**31 - 1)]],
            Meta(max_length=64, description="a list of at most 64 token ids, each at least 0"),
        ]
        | None
    ) = None
    ignore_eos: _Bool | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10, description="a number from 0.01 to 10")] | None = None


class _Speech(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, where it is given, to the stage that makes the sound."""

    voice: _String | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4, description="a number from 0.25 to 4")] | None = None
    language: _String | None = None
    instructions: _String | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """The rest."""

    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")]
    model: _String | None = None
    stream: _Bool = False
    stream_options: _Object | None = None
    modalities: Annotated[list[str], Meta(description="a list of strings")] | None = None
    audio: _Object | None = None
    speaker: _String | None = None
    max_completion_tokens: _Count | None = None
    sampling_params_list: (
        Annotated[list[dict[str, Any] | None], Meta(description="a list of objects, one for each stage")] | None
    ) = None
    extra_body: _Object = msgspec.field(default_factory=dict[str, Any])
    request_id: (
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$", description="1 to 128 letters, digits or . _ : -")]
        | None
    ) = None


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's field, looked for in ``extra_body`` too: lower numbers go first."""

    priority: Annotated[int, Meta(ge=-1000, le=1000, description="an integer from -1000 to 1000")] | None = None


class _StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: _Bool = False


class _AudioOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: Annotated[Format, Meta(description=", ".join(FORMATS))] = "wav"


ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "1"),
    "logprobs": ((False,), "false"),
    "top_logprobs": ((0,), "0"),
    "prompt_logprobs": ((0,), "null"),
    "tools": ((), "null: this server calls no tools"),
    "functions": ((), "null: this server calls no functions"),
    "tool_choice": (("none",), "'none'"),
    "function_call": (("none",), "'none'"),
    "response_format": (({"type": "text"},), '{"type": "text"}'),
    "structured_outputs": ((), "null"),
    "logit_bias": (({},), "an empty object"),
    "bad_words": (([],), "an empty list"),
    "prediction": ((), "null"),
    "web_search_options": ((), "null"),
    "reasoning_effort": (("none",), "'none'"),
    "echo": ((False,), "false"),
    "add_generation_prompt": ((True,), "true"),
    "continue_final_message": ((False,), "false"),
    "add_special_tokens": ((False,), "false"),
    "skip_special_tokens": ((True,), "true"),
    "documents": (([],), "an empty list"),
    "chat_template": ((), "null"),
    "chat_template_kwargs": (({},), "an empty object"),
    "mm_processor_kwargs": (({},), "an empty object"),
    "return_token_ids": ((False,), "false"),
    "return_prompt_text": ((False,), "false"),
    "return_stage_metrics": ((False,), "false"),
    "ref_audio": ((), "null"),
    "ref_text": ((), "null"),
    "additional_information": (({},), "an empty object"),
}
"""Fields that would change the answer and that nothing here honours yet: the values that ask for nothing."""


class _Part(msgspec.Struct, frozen=True):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class _Message(msgspec.Struct, frozen=True):
    """One message; an assistant's may have its words in ``audio.transcript`` instead."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[str | _Part], Meta(min_length=1)]


def schema(pipelines: Iterable[Pipeline]) -> dict[str, Any]:
    """Return the JSON Schema of a body; which outputs may be asked for depends on what is served."""
    # Without references, since these Structs are no schemas of their own: the fields of four of them are one object.
    parts = (_Body, _Sampling, _Speech, _Order)
    _, found = msgspec.json.schema_components([*parts, _StreamOptions, _AudioOptions, _Message])
    optional: dict[str, Any] = {}
    for part in parts:
        optional |= found[part.__name__]["properties"]
    del optional["messages"]
    outputs = list(dict.fromkeys(port for pipeline in pipelines for port in pipeline.outputs))
    message = found["_Message"]
    message["properties"]["content"] = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, found["_Part"]]}},
        ]
    }
    options = found["_StreamOptions"]["properties"] | {"continuous_usage_stats": {"enum": [False]}}
    optional |= {
        "modalities": {"type": "array", "items": {"enum": outputs}, "description": "empty and null: all"},
        "audio": found["_AudioOptions"] | {"properties": _optional(found["_AudioOptions"]["properties"])},
        "stream_options": {"type": "object", "properties": _optional(options)},
    }
    optional |= {
        name: {"enum": list(harmless), "description": f"only {words}"} for name, (harmless, words) in ONLY.items()
    }
    messages = {"type": "array", "minItems": 1, "items": message}
    return {
        "title": "ChatCompletionRequest",
        "description": "Fields that are not named here are left alone.",
        "type": "object",
        "properties": {"messages": messages, **_optional(optional)},
        "required": ["messages"],
    }


def _optional(properties: dict[str, Any]) -> dict[str, Any]:
    """Return properties that may be null, which means absent."""
    return {
        name: nullable({key: value for key, value in schema.items() if key != "default"})
        for name, schema in properties.items()
    }


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request."""

    pipeline: Pipeline
    messages: list[dict[str, str]]
    outputs: tuple[str, ...]
    """Wanted output ports: ``text``, ``audio`` or both."""
    params: dict[str, dict[str, Any]]
    """Parameters by stage."""
    is_streamed: bool
    has_usage_chunk: bool
    audio_format: Format
    id_suffix: str | None
    priority: int = 0
    """The bus's: higher goes first."""


def parse(body: dict[str, Any], models: Mapping[str, Pipeline]) -> Chat:
    """Check a body.

    Args:
        body: the JSON object.
        models: pipelines by every name that clients may use; the first one is the default.

    Raises:
        BadInput: a field that can't be honoured, by name.
        Problem: 404 for a model that is not served.
    """
    fields = read_fields(_Body, body)
    pipeline = find_model(fields.model, models)
    _refuse_unhonoured(body)
    _refuse_unhonoured(fields.extra_body, prefix="extra_body.")
    outputs = _outputs(fields.modalities, pipeline)
    audio = read_fields(_AudioOptions, fields.audio or {}, prefix="audio.")
    return Chat(
        pipeline=pipeline,
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(fields.messages)],
        outputs=outputs,
        params=_params(body, fields, pipeline, outputs),
        is_streamed=fields.stream,
        has_usage_chunk=_has_usage_chunk(fields),
        audio_format=audio.format,
        id_suffix=fields.request_id,
        priority=_priority(body, fields.extra_body),
    )


def _priority(body: dict[str, Any], extra_body: dict[str, Any]) -> int:
    given = [read_fields(_Order, body).priority, read_fields(_Order, extra_body, prefix="extra_body.").priority]
    return -next((priority for priority in given if priority is not None), 0)


def _refuse_unhonoured(body: dict[str, Any], prefix: str = "") -> None:
    """Refuse what asks for something that nothing here does; extensions are looked for in ``extra_body`` too."""
    for name, (harmless, allowed) in ONLY.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in harmless):
            raise refusal(f"{prefix}{name}", value, allowed)


def find_model(name: str | None, models: Mapping[str, Pipeline]) -> Pipeline:
    """Return the pipeline that a name stands for, the first one for none.

    Raises:
        Problem: 404, listing what is served.
    """
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        served = ", ".join(models)
        raise Problem(404, f"model: {shown(name)} is not served here (allowed: {served})", param="model")
    return models[name]


def _has_usage_chunk(fields: _Body) -> bool:
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise refusal("stream_options", fields.stream_options, "null, unless stream is true")
    continuous = fields.stream_options.get("continuous_usage_stats")
    if continuous is not None and continuous is not False:
        raise refusal("stream_options.continuous_usage_stats", continuous, "false")
    return read_fields(_StreamOptions, fields.stream_options, prefix="stream_options.").include_usage


def _outputs(modalities: list[str] | None, pipeline: Pipeline) -> tuple[str, ...]:
    """Return the wanted ports in the pipeline's order; no list and an empty one mean all."""
    supported = tuple(pipeline.outputs)
    for modality in modalities or ():
        if modality not in supported:
            raise refusal("modalities", modality, f"{', '.join(supported)}, as {pipeline.serve_as} makes nothing else")
    return tuple(port for port in supported if not modalities or port in modalities)


def _params(
    body: dict[str, Any], fields: _Body, pipeline: Pipeline, outputs: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return parameters by stage; only what the body has, so that an engine's own defaults hold for the rest."""
    sampling = _given(read_fields(_Sampling, body))
    if fields.max_completion_tokens is not None:
        sampling["max_tokens"] = fields.max_completion_tokens
    if "seed" in sampling:
        sampling["seed"] %= _MAX_SEED + 1
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    speech = _given(read_fields(_Speech, body))
    if fields.speaker is not None:
        speech.setdefault("voice", fields.speaker)
    speakers = [edge.source for edge in pipeline.edges if edge.target == OUT and edge.kind == "audio"]
    if speech and not speakers:
        name = "speaker" if "speaker" in body and "voice" not in body else next(iter(speech))
        raise refusal(name, body.get(name), f"null, as {pipeline.serve_as} makes no audio")
    params: dict[str, dict[str, Any]] = {}
    for edge in pipeline.edges:
        if edge.source == IN and edge.source_port == MESSAGES and sampling:
            params[edge.target] = params.get(edge.target, {}) | sampling
    if "audio" in outputs and speech:
        for stage in speakers:
            params[stage] = params.get(stage, {}) | speech
    return params | _stage_params(fields.sampling_params_list or [], pipeline)


def _stage_params(given: list[dict[str, Any] | None], pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """Return the parameters that the body gives stage by stage, in the pipeline's order; they replace all others."""
    stages = pipeline.stages
    if len(given) > len(stages):
        raise refusal("sampling_params_list", given, f"at most {len(stages)} objects, for {', '.join(stages)}")
    for i, params in enumerate(given):
        try:
            msgspec.msgpack.encode(params)
        except OverflowError:
            raise refusal(f"sampling_params_list[{i}]", params, "an object whose integers have 64 bits") from None
    return {stage: params for stage, params in zip(stages, given, strict=False) if params is not None}


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


# --- messages -----------------------------------------------------------------------------------------------


def _message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise refusal(place, message, "an object with 'role' and 'content'")
    role = message.get("role")
    if role not in ROLES:
        raise refusal(f"{place}.role", role, ", ".join(ROLES))
    if role == "tool":
        raise refusal(f"{place}.role", role, "system, developer, user or assistant: this server calls no tools")
    for name in ("tool_calls", "function_call", "tool_call_id", "name"):
        if message.get(name) not in (None, []):
            raise refusal(f"{place}.{name}", message[name], "null")
    return {"role": role, "content": _content(message, place)}


def _content(message: dict[str, Any], place: str) -> str:
    content = message.get("content")
    audio = message.get("audio")
    if content is None and message.get("role") == "assistant" and isinstance(audio, dict):
        # An earlier answer of ours that was only spoken, as SDKs send it back; what was said is in its transcript.
        content = audio.get("transcript") or None
    match content:
        case str():
            return content
        case [_, *_]:
            return "".join([_part(part, f"{place}.content[{i}]") for i, part in enumerate(content)])
        case _:
            raise refusal(f"{place}.content", content, "a string or a list of text parts")


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise refusal(place, part, "an object with 'type' and 'text'")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        if kind is None:  # shorthand parts name their type by their key
            kind = next((key for key in ("image_url", "audio_url", "video_url", "input_audio") if key in part), None)
        came = shown(kind)
        raise BadInput(
            f"{place}.type: {came} came (allowed: 'text', as this model takes nothing else)", field=f"{place}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise refusal(f"{place}.text", text, "a string")
    return text
