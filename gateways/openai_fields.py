"""Fields that OpenAI's text routes share: each declared once, for the reader of bodies and for the schema of them.

A field is passed on, or harmless, or refused by name; none is taken and then ignored, and none that nobody knows is
taken at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateways.fields import read_fields, refusal
from gateways.http import MAX_SESSION_CHARACTERS
from gateways.openapi import nullable
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline

MAX_SEED = 2**32 - 2
"""What engines take; OpenAI's seeds have 64 bits and are folded into it."""

MAX_CHOICES = 128
"""Of one prompt; OpenAI's limit."""

MAX_LOGPROBS = 20
"""Candidates for each token: OpenAI's limit, and the engines'."""

_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
Bool = Annotated[bool, Meta(description="true or false")]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1, description=f"an integer from 1 to {2**31 - 1}")]
String = Annotated[str, Meta(min_length=1, max_length=4096, description="a string of 1 to 4096 characters")]
Object = Annotated[dict[str, Any], Meta(description="an object")]
Candidates = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")]
SESSION_WORDS = f"1 to {MAX_SESSION_CHARACTERS} printable characters"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, where it is given, to the stages that read the prompt. Names are those of the engines."""

    temperature: Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="an integer, at least 1; 0 or -1 for all")] | None = (
        None
    )
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] | None = None
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
        Annotated[list[_TokenId], Meta(max_length=64, description="a list of at most 64 token ids, each at least 0")]
        | None
    ) = None
    ignore_eos: Bool | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10, description="a number from 0.01 to 10")] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1024, description="an object of at most 1024 token ids and numbers from -100 to 100"),
        ]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[_StopString],
            Meta(max_length=64, description="a list of at most 64 strings, each of 1 to 256 characters"),
        ]
        | None
    ) = None
    prompt_logprobs: Candidates | None = None
    skip_special_tokens: Bool | None = None
    include_stop_str_in_output: Bool | None = None
    cache_salt: (
        Annotated[
            str,
            Meta(
                min_length=1, max_length=128, pattern=r"^[^@/\\]*$", description="1 to 128 characters, none of @ / \\"
            ),
        ]
        | None
    ) = None


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, where it is given, to the stage that makes the sound."""

    voice: String | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4, description="a number from 0.25 to 4")] | None = None
    language: String | None = None
    instructions: String | None = None


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What every route that generates text reads besides."""

    model: String | None = None
    stream: Bool = False
    stream_options: Object | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")] = 1
    response_format: Object | None = None
    structured_outputs: Object | None = None
    return_token_ids: Bool = False
    sampling_params_list: (
        Annotated[list[dict[str, Any] | None], Meta(description="a list of objects, one for each stage")] | None
    ) = None
    extra_body: Object = msgspec.field(default_factory=dict[str, Any])
    request_id: (
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$", description="1 to 128 letters, digits or . _ : -")]
        | None
    ) = None
    session_id: (
        Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARACTERS, description=SESSION_WORDS)] | None
    ) = None
    """Its requests stay with their replicas; the header ``X-Session-ID`` goes first."""
    priority: Annotated[int, Meta(ge=-1000, le=1000, description="an integer from -1000 to 1000")] | None = None
    """As in vLLM: lower numbers go first."""
    return_stage_metrics: Annotated[bool | str, Meta(description="true, false, or one of '1', 'yes', 'on'")] = False
    user: Annotated[str, Meta(max_length=4096, description="a string of at most 4096 characters")] | None = None
    """Whom the caller asks for: nothing here depends on it."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the field of this name."""

    include_usage: Bool = False
    continuous_usage_stats: Bool = False


ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((), "null; 'tools' takes functions"),
    "function_call": (("none",), "'none'; 'tool_choice' says which tool is called"),
    "prediction": ((), "null"),
    "web_search_options": ((), "null"),
    "use_beam_search": ((False,), "false"),
    "length_penalty": ((1, 1.0), "1: only beams have one"),
    "early_stopping": ((False,), "false"),
    "spaces_between_special_tokens": ((True,), "true"),
    "truncate_prompt_tokens": ((), "null: a prompt is never cut"),
    "allowed_token_ids": ((), "null"),
    "logits_processors": ((), "null"),
    "vllm_xargs": (({},), "an empty object"),
    "kv_transfer_params": ((), "null"),
    "media_io_kwargs": (({},), "an empty object"),
    "return_tokens_as_token_ids": ((False,), "false"),
    "store": ((False,), "false: answers are not kept"),
    "service_tier": (("auto", "default"), "'auto', 'default'"),
    "verbosity": (("medium",), "'medium'"),
    "ref_audio": ((), "null"),
    "ref_text": ((), "null"),
    "task_type": ((), "null"),
    "additional_information": (({},), "an empty object"),
}
"""Fields that would change the answer and that nothing here honours: the values that ask for nothing."""

SHAPE = ("structure", "logprobs", "prompt_logprobs", "token_ids", *Speech.__struct_fields__)
"""Parameters of engines that say what an answer consists of, and who speaks it."""

INERT = ("metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields of OpenAI that describe a request to its operator; they ask for nothing."""


def flatten(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the fields of a literal ``extra_body`` among its own: both are places for extensions.

    Raises:
        BadInput: a field is in both, or ``extra_body`` is no object.
    """
    extra = body.get("extra_body")
    if extra is None:
        return body
    if not isinstance(extra, dict):
        raise refusal("extra_body", extra, "an object")
    for name in extra:
        if name in body or name == "extra_body":
            place = f"extra_body.{name[:80]}"
            raise BadInput(f"{place}: also at {name[:80]} (allowed: one of them)", field=place)
    return {key: value for key, value in body.items() if key != "extra_body"} | extra


def refuse_unhonoured(body: dict[str, Any], only: Mapping[str, tuple[tuple[Any, ...], str]] = ONLY) -> None:
    """Refuse what asks for something that nothing here does.

    Raises:
        BadInput: names the field.
    """
    for name, value in body.items():
        rule = only.get(name)
        if rule is None or value is None:
            continue
        harmless, allowed = rule
        if not any(type(value) is type(same) and value == same for same in harmless):
            raise refusal(name, value, allowed)


def read_stream_options(fields: Shared) -> StreamOptions:
    """Return the options of a stream.

    Raises:
        BadInput: they come without one, or contradict each other.
    """
    if fields.stream_options is None:
        return StreamOptions()
    if not fields.stream:
        raise refusal("stream_options", fields.stream_options, "null, unless stream is true")
    for name, value in fields.stream_options.items():
        if name == "include_obfuscation" and value in (False, None):
            continue  # OpenAI's filling against listeners; TLS is the proxy's
        if name not in StreamOptions.__struct_fields__ and value is not None:
            raise refusal(f"stream_options.{name[:80]}", value, "null; known: include_usage, continuous_usage_stats")
    options = read_fields(StreamOptions, fields.stream_options, prefix="stream_options.")
    if options.continuous_usage_stats and not options.include_usage:
        raise refusal("stream_options.continuous_usage_stats", True, "false, unless include_usage is true")
    return options


def read_session(fields: Shared) -> str:
    """Return the session that a body names; empty for none.

    Raises:
        BadInput: what it names can't be printed.
    """
    name = fields.session_id or ""
    if not name.isprintable():
        raise refusal("session_id", name, SESSION_WORDS)
    return name


def wants_metrics(fields: Shared) -> bool:
    """Whether the answer tells what its stages did.

    Raises:
        BadInput: a word that says neither yes nor no.
    """
    match fields.return_stage_metrics:
        case bool() as said:
            return said
        case str() as word if word.lower() in ("1", "true", "yes", "on"):
            return True
        case str() as word if word.lower() in ("", "0", "false", "no", "off"):
            return False
        case word:
            raise refusal("return_stage_metrics", word, "true, false, or one of '1', 'yes', 'on'")


def sampling_params(body: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """Return what a body says about sampling; only what it has, so that an engine's own defaults hold for the rest.

    Raises:
        BadInput: a field has another type or value.
    """
    found = given(read_fields(Sampling, body))
    if max_tokens is not None:
        found["max_tokens"] = max_tokens
    if "seed" in found:
        found["seed"] %= MAX_SEED + 1
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    return found


def stage_params(
    listed: list[dict[str, Any] | None] | None, pipeline: Pipeline, params: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return parameters by stage; what a body gives stage by stage replaces how a stage's tokens are chosen.

    What the answer consists of (`SHAPE`) stays as the body's other fields say.

    Args:
        listed: the body's, in the pipeline's order.
        pipeline: whose stages they are.
        params: what the body's other fields come to, by stage.

    Raises:
        BadInput: there are more of them than stages, or one can't be sent.
    """
    stages = pipeline.stages
    listed = listed or []
    if len(listed) > len(stages):
        raise refusal("sampling_params_list", listed, f"at most {len(stages)} objects, for {', '.join(stages)}")
    found = dict(params)
    for i, (stage, own) in enumerate(zip(stages, listed, strict=False)):
        if own is not None:
            check_numbers(f"sampling_params_list[{i}]", own)
            found[stage] = {name: value for name, value in params.get(stage, {}).items() if name in SHAPE} | own
    return found


def for_choice(
    params: dict[str, dict[str, Any]], index: int, without: tuple[str, ...] = ()
) -> dict[str, dict[str, Any]]:
    """Return the parameters of a prompt's choice at `index`: with a seed each draws numbers of its own.

    Args:
        params: of the first choice, by stage.
        index: of the choice.
        without: parameters that only the first choice has.
    """
    return {stage: _for_choice(own, index, without) for stage, own in params.items()} if index else params


def _for_choice(own: dict[str, Any], index: int, without: tuple[str, ...]) -> dict[str, Any]:
    found = {name: value for name, value in own.items() if name not in without}
    if isinstance(found.get("seed"), int):
        found["seed"] = (found["seed"] + index) % (MAX_SEED + 1)
    return found


def check_numbers(name: str, value: Any) -> None:
    """Refuse a value of any form whose numbers have none on the wire.

    Raises:
        BadInput: names the field.
    """
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise refusal(name, value, "a value whose integers have 64 bits") from None


def given(struct: msgspec.Struct) -> dict[str, Any]:
    """Return a Struct's fields that are not None."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


def optional(properties: dict[str, Any]) -> dict[str, Any]:
    """Return properties of a JSON Schema that may be null, which means absent."""
    return {
        name: nullable({key: value for key, value in schema.items() if key != "default"})
        for name, schema in properties.items()
    }


def properties_of(*structs: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the properties of Structs that are read from one object, as schemas without references."""
    _, found = msgspec.json.schema_components(structs)
    return {name: schema for struct in structs for name, schema in found[struct.__name__]["properties"].items()}


def harmless_properties(only: Mapping[str, tuple[tuple[Any, ...], str]] = ONLY) -> dict[str, Any]:
    """Return the schemas of fields that may only ask for nothing."""
    found: dict[str, Any] = {
        name: {"enum": list(harmless), "description": f"only {words}"} for name, (harmless, words) in only.items()
    }
    return found | {name: {"description": "asks for nothing"} for name in INERT}
