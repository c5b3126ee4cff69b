"""Sampling parameters of one request, as text-generating adapters take them.

Names, meanings and defaults are the field's (OpenAI, vLLM, transformers). An adapter that can't honour a field says so
by name (`refuse_unhonoured`) instead of accepting a field that does nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from omni_bus.errors import BadInput

MAX_STOP_STRINGS = 4
"""OpenAI's limit."""

MAX_LOGPROBS = 20
"""Candidates for each token: OpenAI's limit, and vLLM's default one."""

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings: TypeAlias = Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text must be; exactly one field is set (vLLM's ``structured_outputs``, OpenAI's ``response_format``)."""

    json_object: bool = False
    """Any JSON object."""

    json: dict[str, Any] | bool | None = None
    """A value that this JSON Schema allows."""

    regex: str | None = None
    """A text that this regular expression matches as a whole."""

    choice: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1024)] | None = None
    """One of these texts."""

    grammar: str | None = None
    """A sentence of this grammar, in the engine's notation (Lark or GBNF)."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen, and when to stop."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    """0 is greedy: always the most probable token."""

    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the most probable tokens whose probabilities reach this sum; 1 keeps all."""

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    """Keep this many most probable tokens; 0 and -1 keep all."""

    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Keep tokens at least this fraction as probable as the most probable one; 0 keeps all."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens to generate at most; None goes on up to the context length."""

    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """The end of text and stop strings are not looked at before this many tokens."""

    seed: Annotated[int, Meta(ge=0, le=2**32 - 2)] | None = None
    """The same seed draws the same random numbers; None draws a fresh seed."""

    stop: StopStrings = ()
    """Generation ends before the first of these strings; it is not part of the output."""

    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """Generation ends at any of these tokens."""

    ignore_eos: bool = False
    """Go on after the model's end-of-text token."""

    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken from a token's logit for each time that it was generated."""

    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken from a token's logit once it was generated."""

    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 does nothing."""

    logit_bias: dict[Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]] = {}
    """Added to the logits of these tokens, by their ids in decimal."""

    bad_words: Annotated[tuple[StopString, ...], Meta(max_length=64)] = ()
    """Texts that are never written."""

    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the chosen tokens come with the text, each with this many of the most probable ones."""

    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """The same for the prompt's tokens, on the port ``rendered``."""

    token_ids: bool = False
    """The tokens' ids come with the text."""

    skip_special_tokens: bool = True
    """Special tokens are no part of the text."""

    include_stop_str_in_output: bool = False
    """The stop string or token that ended the text is part of it."""

    structure: Structure | None = None
    """What the text must be."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Cached prefixes are shared only between requests with the same salt."""

    lora: str | None = None
    """The name of the adapter to answer with; None is the base model."""


EXTRAS = (
    "logit_bias",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structure",
    "cache_salt",
    "lora",
)
"""What not every engine can do."""


def refuse_unhonoured(params: SamplingParams, names: tuple[str, ...], adapter: str) -> None:
    """Refuse the fields of `names` where they are set to more than their default.

    Raises:
        BadInput: names the first such field, its value and what is allowed.
    """
    defaults = SamplingParams()
    for name in names:
        value, default = getattr(params, name), getattr(defaults, name)
        if value != default:
            raise BadInput(f"{name}: {value!r} can't be honoured by {adapter} (allowed: {default!r})", field=name)
