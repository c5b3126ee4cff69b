"""Sampling parameters of one request, as text-generating adapters take them.

Names, meanings and defaults are the field's (OpenAI, vLLM, transformers). An adapter that can't honour a field says so
by name (`refuse_unhonoured`) instead of accepting a field that does nothing.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from omni_bus.errors import BadInput

MAX_STOP_STRINGS = 4
"""OpenAI's limit."""

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings: TypeAlias = Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


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
