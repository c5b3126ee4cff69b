"""The body of ``POST /v1/chat/completions``: checked field by field, turned into what the bus runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.images import chat_body
from gateways.openai_fields import (
    INERT,
    ONLY,
    Bool,
    Candidates,
    Count,
    Object,
    Sampling,
    Shared,
    Speech,
    StreamOptions,
    String,
    check_numbers,
    flatten,
    given,
    harmless_properties,
    optional,
    properties_of,
    read_session,
    read_stream_options,
    refuse_unhonoured,
    sampling_params,
    stage_params,
    wants_metrics,
)
from gateways.openai_messages import Conversation, message_schema, read_messages
from gateways.openai_models import (
    DEFAULT_VOICE,
    IMAGE,
    MESSAGES,
    MODALITIES,
    SOUND,
    can_chat,
    can_draw,
    find_model,
    inputs_for,
)
from gateways.openai_structure import Tools, read_structure, read_tools
from omni_bus.errors import BadInput
from omni_bus.media.encoder import FORMATS, Format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from omni_bus.core.pipeline import Pipeline


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of chat besides those that it shares."""

    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")]
    modalities: Annotated[list[str], Meta(description="a list of strings")] | None = None
    audio: Object | None = None
    speaker: String | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: Bool = False
    top_logprobs: Candidates | None = None
    include_reasoning: Bool = True
    echo: Bool = False
    return_prompt_text: Bool = False


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's chat template is given; as in `omni_bus.wire.prompt.Prompt`, where it is set."""

    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    add_special_tokens: Bool | None = None
    documents: (
        Annotated[list[dict[str, Any]], Meta(max_length=1024, description="a list of at most 1024 objects")] | None
    ) = None
    chat_template: (
        Annotated[str, Meta(min_length=1, max_length=65_536, description="a string of 1 to 65536 characters")] | None
    ) = None
    chat_template_kwargs: Object | None = None
    reasoning_effort: (
        Annotated[str, Meta(min_length=1, max_length=64, description="none, low, medium, high")] | None
    ) = None
    mm_processor_kwargs: Object | None = None


class AudioOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the field ``audio``. The voice is the one at the top level; SDKs must send one here, and it does nothing."""

    format: Annotated[Format, Meta(description=", ".join(FORMATS))] = "wav"
    voice: Any = None


_STRUCTS = (ChatFields, Template, Tools, Shared, Sampling, Speech)

KNOWN = names_of(*_STRUCTS) | ONLY.keys() | set(INERT)
"""Every field of a chat body."""


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request."""

    pipeline: Pipeline
    conversation: Conversation
    prompt: dict[str, Any]
    """Of a `omni_bus.wire.prompt.Prompt`, all but the messages."""
    modalities: tuple[str, ...]
    """Of ``text`` and ``audio``, those that are wanted."""
    outputs: tuple[str, ...]
    """Wanted output ports."""
    params: dict[str, dict[str, Any]]
    """Parameters by stage."""
    n: int = 1
    is_streamed: bool = False
    stream_options: StreamOptions = StreamOptions()
    audio_format: Format = "wav"
    id_suffix: str | None = None
    session: str = ""
    priority: int = 0
    """The bus's: higher goes first."""
    logprobs: int | None = None
    """Candidates for each token; None for no log-probabilities."""
    echo: str = ""
    """What the answer begins with."""
    structure_field: str = "response_format"
    """Where the body says what the answer must be."""
    returns_token_ids: bool = False
    returns_prompt_text: bool = False
    has_metrics: bool = False


def parse(
    body: dict[str, Any],
    models: Mapping[str, Pipeline],
    *,
    trusts_templates: bool = False,
    uploaded: Mapping[str, str] | None = None,
    prefix: str = "messages",
) -> Chat:
    """Check a body.

    Args:
        body: the JSON object.
        models: pipelines by every name that clients may use; the first one that chats is the default.
        trusts_templates: whether a request may bring a chat template.
        uploaded: the input port of each uploaded file that the messages name.
        prefix: where the messages are, for refusals.

    Raises:
        BadInput: a field that can't be honoured, by name.
        Problem: 404 for a model that is not served.
    """
    body = flatten(body)
    refuse_unhonoured(body)
    refuse_unknown(body, KNOWN)
    fields, shared = read_fields(ChatFields, body), read_fields(Shared, body)
    template = read_template(body, trusts_templates=trusts_templates)
    pipeline = find_model(shared.model, models, can_chat, "answers messages")
    modalities = _modalities(fields.modalities, pipeline)
    tools = read_tools(body)
    options = read_stream_options(shared)
    outputs = _outputs(body, fields, shared, pipeline, modalities, has_tools=bool(tools))
    conversation = read_messages(
        fields.messages, pipeline, inputs_for(pipeline, outputs), prefix=prefix, uploaded=uploaded
    )
    return Chat(
        pipeline=pipeline,
        conversation=conversation,
        prompt=template | tools,
        modalities=modalities,
        outputs=outputs,
        params=_params(body, fields, shared, pipeline, modalities),
        n=shared.n,
        is_streamed=shared.stream,
        stream_options=options,
        audio_format=_audio(fields.audio).format,
        id_suffix=shared.request_id,
        session=read_session(shared),
        priority=-(shared.priority or 0),
        logprobs=_logprobs(fields, modalities),
        echo=_echo(fields, conversation),
        structure_field="response_format" if shared.structured_outputs is None else "structured_outputs",
        returns_token_ids=shared.return_token_ids,
        returns_prompt_text=fields.return_prompt_text,
        has_metrics=wants_metrics(shared),
    )


def read_template(body: dict[str, Any], *, trusts_templates: bool) -> dict[str, Any]:
    """Return what a body tells the chat template.

    Raises:
        BadInput: a field has another type or value, contradicts another, or wants trust that is not there.
    """
    fields = read_fields(Template, body)
    if fields.chat_template is not None and not trusts_templates:
        raise refusal("chat_template", fields.chat_template, "null: this server runs its models' own templates only")
    if fields.continue_final_message and fields.add_generation_prompt:
        raise refusal("continue_final_message", True, "false, where add_generation_prompt is true")
    found = given(fields)
    for name, value in found.items():
        check_numbers(name, value)
    if fields.continue_final_message:
        found["add_generation_prompt"] = False
    return found


def _modalities(wanted: list[str] | None, pipeline: Pipeline) -> tuple[str, ...]:
    """Return the wanted ones in the pipeline's order; no list and an empty one mean all."""
    supported = tuple(port for port in pipeline.outputs if port in MODALITIES)
    for modality in wanted or ():
        if modality not in supported:
            raise refusal("modalities", modality, f"{', '.join(supported)}, as {pipeline.serve_as} makes nothing else")
    return tuple(port for port in supported if not wanted or port in wanted)


def _outputs(
    body: dict[str, Any],
    fields: ChatFields,
    shared: Shared,
    pipeline: Pipeline,
    modalities: tuple[str, ...],
    *,
    has_tools: bool,
) -> tuple[str, ...]:
    """Return the output ports that the answer needs; what needs one that the pipeline doesn't have is refused."""
    makes = pipeline.outputs
    found = list(modalities)
    if has_tools:
        if "tool_calls" not in makes:
            raise refusal("tools", body["tools"], f"null, as {pipeline.serve_as} calls no tools")
        found.append("tool_calls")
    if "text" in modalities and "reasoning" in makes and fields.include_reasoning:
        found.append("reasoning")
    wants_counts = bool(shared.stream_options and shared.stream_options.get("continuous_usage_stats"))
    for name, value in (
        ("return_token_ids", shared.return_token_ids),
        ("return_prompt_text", fields.return_prompt_text),
        ("prompt_logprobs", body.get("prompt_logprobs")),
        ("stream_options.continuous_usage_stats", wants_counts),
    ):
        if value is None or value is False:
            continue
        if "rendered" not in makes:
            raise refusal(name, value, f"null, as {pipeline.serve_as} does not tell its prompts' tokens")
        if name == "prompt_logprobs" and shared.stream:
            raise refusal(name, value, "null, with stream")
        if "rendered" not in found:
            found.append("rendered")
    return tuple(found)


def _audio(options: dict[str, Any] | None) -> AudioOptions:
    refuse_unknown(options or {}, names_of(AudioOptions), prefix="audio.")
    return read_fields(AudioOptions, options or {}, prefix="audio.")


def _logprobs(fields: ChatFields, modalities: tuple[str, ...]) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise refusal("top_logprobs", fields.top_logprobs, "null or 0, unless logprobs is true")
    if not fields.logprobs:
        return None
    if "text" not in modalities:
        raise refusal("logprobs", True, "false, without text among the modalities")
    return fields.top_logprobs or 0


def _echo(fields: ChatFields, conversation: Conversation) -> str:
    """Return the assistant's words that the conversation ends with, where they are to come back (vLLM's ``echo``)."""
    last = conversation.messages[-1]
    content = last.get("content")
    return content if fields.echo and last["role"] == "assistant" and isinstance(content, str) else ""


def _params(
    body: dict[str, Any], fields: ChatFields, shared: Shared, pipeline: Pipeline, modalities: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return parameters by stage."""
    newer = fields.max_completion_tokens
    sampling = sampling_params(body, fields.max_tokens if newer is None else newer)
    structure = read_structure(shared)
    if structure is not None:
        if body.get("tools") is not None and body.get("tool_choice") not in (None, "none", "auto"):
            raise BadInput(
                "response_format: it came with a tool that must be called (allowed: one of them)",
                field="response_format" if shared.response_format is not None else "structured_outputs",
            )
        sampling["structure"] = structure
    if fields.logprobs:
        sampling["logprobs"] = fields.top_logprobs or 0
    if shared.return_token_ids:
        sampling["token_ids"] = True
    params: dict[str, dict[str, Any]] = {stage: sampling for stage in pipeline.readers_of(MESSAGES) if sampling}
    speech = _speech(body, fields, pipeline)
    if "audio" in modalities and speech:
        for stage in pipeline.speakers_of(SOUND):
            params[stage] = params.get(stage, {}) | speech
    return stage_params(shared.sampling_params_list, pipeline, params)


def _speech(body: dict[str, Any], fields: ChatFields, pipeline: Pipeline) -> dict[str, Any]:
    speech = given(read_fields(Speech, body))
    if fields.speaker is not None:
        speech.setdefault("voice", fields.speaker)
    name = "speaker" if "speaker" in body and "voice" not in body else "voice"
    if speech and not pipeline.speakers_of(SOUND):
        name = name if "voice" in speech else next(iter(speech))
        raise refusal(name, body.get(name), f"null, as {pipeline.serve_as} makes no audio")
    voice = speech.get("voice", "").lower()
    if voice == DEFAULT_VOICE:
        del speech["voice"]
    elif voice and pipeline.voices and voice not in {known.lower() for known in pipeline.voices}:
        raise refusal(name, speech["voice"], ", ".join((*pipeline.voices, DEFAULT_VOICE)))
    return speech


# --- the schema ---------------------------------------------------------------------------------------------


def schema(pipelines: Iterable[Pipeline], title: str = "ChatCompletionRequest") -> dict[str, Any]:
    """Return the JSON Schema of a body; which outputs may be asked for depends on what is served."""
    pipelines = list(pipelines)
    properties = properties_of(*_STRUCTS)
    outputs = dict.fromkeys(port for pipeline in pipelines for port in pipeline.outputs if port in MODALITIES)
    if any(map(can_draw, pipelines)):
        outputs[IMAGE] = None
        properties = chat_body.properties() | properties
    ports = dict.fromkeys(port for pipeline in pipelines for port in pipeline.inputs)
    messages = {"type": "array", "minItems": 1, "items": message_schema(ports)}
    del properties["messages"]
    audio = optional(properties_of(AudioOptions))
    properties |= {
        "modalities": {"type": "array", "items": {"enum": list(outputs)}, "description": "empty and null: all"},
        "audio": {"type": "object", "properties": audio},
        "stream_options": {"type": "object", "properties": optional(properties_of(StreamOptions))},
    } | harmless_properties()
    return {
        "title": title,
        "description": "Fields may be null, which means absent; others than these are refused.",
        "type": "object",
        "properties": {"messages": messages, **optional(properties)},
        "required": ["messages"],
        "additionalProperties": {"type": "null"},
    }
