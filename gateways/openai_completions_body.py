"""The body of ``POST /v1/completions``: checked field by field, turned into what the bus runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.openai_fields import (
    INERT,
    MAX_CHOICES,
    ONLY,
    Bool,
    Candidates,
    Sampling,
    Shared,
    StreamOptions,
    flatten,
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
from gateways.openai_models import MESSAGES, can_write, find_model
from gateways.openai_structure import read_structure
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline

MAX_PROMPTS = 1024
"""Of one request, and texts to be generated for all of them together."""

ONLY_COMPLETIONS = ONLY | {
    "suffix": ((), "null: nothing here fills a gap"),
    "prompt_embeds": ((), "null"),
}

_PROMPT_WORDS = f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of completions besides those that are shared."""

    prompt: Annotated[
        str | list[Any],
        Meta(description=_PROMPT_WORDS),
    ]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1, description="an integer, at least 0")] = 16
    logprobs: Candidates | None = None
    echo: Bool = False
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description=f"an integer from n to {MAX_CHOICES}")] | None = None
    add_special_tokens: Bool | None = None


_STRUCTS = (CompletionFields, Shared, Sampling)

KNOWN = names_of(*_STRUCTS) | ONLY_COMPLETIONS.keys() | set(INERT)
"""Every field of a body."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request."""

    pipeline: Pipeline
    prompts: list[dict[str, Any]]
    """Each as a `omni_bus.wire.prompt.Prompt` has it."""
    outputs: tuple[str, ...]
    params: dict[str, dict[str, Any]]
    n: int
    best_of: int
    """Texts that are generated for each prompt; the `n` most probable ones are the answer."""
    is_streamed: bool
    stream_options: StreamOptions
    logprobs: int | None
    echo: bool
    id_suffix: str | None
    session: str
    priority: int
    returns_token_ids: bool
    returns_prompt_logprobs: bool
    structure_field: str
    has_metrics: bool


def parse(body: dict[str, Any], models: Mapping[str, Pipeline]) -> Completion:
    """Check a body.

    Raises:
        BadInput: a field that can't be honoured, by name.
        Problem: 404 for a model that is not served, or writes no text.
    """
    body = flatten(body)
    refuse_unhonoured(body, ONLY_COMPLETIONS)
    refuse_unknown(body, KNOWN)
    fields, shared = read_fields(CompletionFields, body), read_fields(Shared, body)
    pipeline = find_model(shared.model, models, can_write, "writes text")
    prompts = read_prompts("prompt", fields.prompt)
    best_of = shared.n if fields.best_of is None else fields.best_of
    _check_counts(fields, shared, len(prompts), best_of)
    if fields.add_special_tokens is not None:
        prompts = [prompt | {"add_special_tokens": fields.add_special_tokens} for prompt in prompts]
    sampling = sampling_params(body, fields.max_tokens or None)
    return Completion(
        pipeline=pipeline,
        prompts=prompts,
        outputs=_outputs(body, fields, shared, pipeline, is_text=isinstance(fields.prompt, str)),
        params=_params(sampling, fields, shared, pipeline, ranks=best_of > shared.n),
        n=shared.n,
        best_of=best_of,
        is_streamed=shared.stream,
        stream_options=read_stream_options(shared),
        logprobs=fields.logprobs,
        echo=fields.echo,
        id_suffix=shared.request_id,
        session=read_session(shared),
        priority=-(shared.priority or 0),
        returns_token_ids=shared.return_token_ids,
        returns_prompt_logprobs=body.get("prompt_logprobs") is not None,
        structure_field="response_format" if shared.structured_outputs is None else "structured_outputs",
        has_metrics=wants_metrics(shared),
    )


def read_prompts(name: str, prompt: Any) -> list[dict[str, Any]]:
    """Return prompts, each as a `omni_bus.wire.prompt.Prompt` has it: one text, one list of token ids, or several.

    Raises:
        BadInput: another form, an empty one, or too many; names the place.
    """
    if not isinstance(prompt, list):
        return [_prompt(name, prompt)]
    if prompt and all(type(each) is int for each in prompt):
        return [_prompt(name, prompt)]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise refusal(name, prompt, _PROMPT_WORDS)
    return [_prompt(f"{name}[{i}]", each) for i, each in enumerate(prompt)]


def _prompt(name: str, prompt: Any) -> dict[str, Any]:
    match prompt:
        case str() if prompt:
            return {"text": prompt}
        case [_, *_]:
            try:
                return {"token_ids": msgspec.convert(prompt, list[_TokenId])}
            except msgspec.ValidationError:
                raise refusal(name, prompt, f"a list of token ids, each from 0 to {2**31 - 1}") from None
        case _:
            raise refusal(name, prompt, "a text with something in it, or a list of token ids")


def _check_counts(fields: CompletionFields, shared: Shared, num_prompts: int, best_of: int) -> None:
    if best_of < shared.n:
        raise refusal("best_of", best_of, f"null or an integer from n, {shared.n}, to {MAX_CHOICES}")
    if best_of > shared.n and shared.stream:
        raise refusal("best_of", best_of, f"null or n, {shared.n}, with stream")
    if num_prompts * best_of > MAX_PROMPTS:
        name, value = ("n", shared.n) if fields.best_of is None else ("best_of", best_of)
        raise refusal(name, value, f"at most {MAX_PROMPTS // num_prompts} with {num_prompts} prompts")
    if fields.max_tokens == 0 and not fields.echo:
        raise refusal("max_tokens", 0, "an integer, at least 1, unless echo is true")


def _outputs(
    body: dict[str, Any], fields: CompletionFields, shared: Shared, pipeline: Pipeline, *, is_text: bool
) -> tuple[str, ...]:
    """Return the output ports that the answer needs; what needs one that the pipeline doesn't have is refused."""
    continuous = bool(shared.stream_options and shared.stream_options.get("continuous_usage_stats"))
    needs = {
        "echo": fields.echo and (not is_text or fields.logprobs is not None or fields.max_tokens == 0),
        "return_token_ids": shared.return_token_ids,
        "prompt_logprobs": body.get("prompt_logprobs") is not None,
        "stream_options.continuous_usage_stats": continuous,
    }
    wants_rendered = False
    for name, is_wanted in needs.items():
        if is_wanted and "rendered" not in pipeline.outputs:
            raise BadInput(f"{name}: {pipeline.serve_as} does not tell its prompts' tokens (allowed: null)", field=name)
        if is_wanted and name == "prompt_logprobs" and shared.stream:
            raise refusal(name, body[name], "null, with stream")
        wants_rendered |= is_wanted
    text = ("text",) if fields.max_tokens else ()
    return (*text, "rendered") if wants_rendered else text


def _params(
    sampling: dict[str, Any], fields: CompletionFields, shared: Shared, pipeline: Pipeline, *, ranks: bool
) -> dict[str, dict[str, Any]]:
    """Return parameters by stage."""
    structure = read_structure(shared)
    if structure is not None:
        sampling["structure"] = structure
    if fields.logprobs is not None or ranks:
        sampling["logprobs"] = fields.logprobs or 0
    if fields.echo and fields.logprobs is not None:
        sampling["prompt_logprobs"] = max(fields.logprobs, sampling.get("prompt_logprobs", 0))
    if shared.return_token_ids:
        sampling["token_ids"] = True
    params: dict[str, dict[str, Any]] = {stage: sampling for stage in pipeline.readers_of(MESSAGES) if sampling}
    return stage_params(shared.sampling_params_list, pipeline, params)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a body."""
    properties = properties_of(*_STRUCTS) | harmless_properties(ONLY_COMPLETIONS)
    del properties["prompt"]
    properties["stream_options"] = {"type": "object", "properties": optional(properties_of(StreamOptions))}
    return {
        "title": "CompletionRequest",
        "description": "Fields may be null, which means absent; others than these are refused.",
        "type": "object",
        "properties": {"prompt": prompt_schema(), **optional(properties)},
        "required": ["prompt"],
        "additionalProperties": {"type": "null"},
    }


def prompt_schema() -> dict[str, Any]:
    """Return the schema of prompts in all their forms."""
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [text, ids]}}
    return {"anyOf": [text, ids, several], "description": _PROMPT_WORDS}
