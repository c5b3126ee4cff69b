"""Log-probabilities as OpenAI's two routes of text have them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.wire.payloads import Token
    from omni_bus.wire.prompt import Rendered

LEAST = -9999.0
"""OpenAI's figure for what is all but impossible; JSON has none for minus infinity."""


def chat_logprobs(tokens: Sequence[Token], num_candidates: int) -> dict[str, Any]:
    """Return tokens as chat's ``logprobs``: `num_candidates` of the most probable beside each."""
    return {
        "content": [
            _entry(token.raw, token.logprob)
            | {"top_logprobs": [_entry(each.raw, each.logprob) for each in token.candidates[:num_candidates]]}
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": spelled(raw), "logprob": finite(logprob), "bytes": list(raw)}


def completion_logprobs(tokens: Sequence[Token], num_candidates: int, offset: int) -> dict[str, Any]:
    """Return tokens as completions' ``logprobs``.

    Args:
        tokens: of a piece of text.
        num_candidates: of the most probable ones beside each, the chosen one besides.
        offset: characters before the first one.
    """
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        top = {spelled(each.raw): finite(each.logprob) for each in token.candidates[:num_candidates]}
        top.setdefault(spelled(token.raw), finite(token.logprob))
        offset = _add(found, spelled(token.raw), finite(token.logprob), top, offset)
    return found


def rendered_logprobs(rendered: Rendered, num_candidates: int) -> dict[str, Any]:
    """Return a prompt's tokens as completions' ``logprobs``, for an answer that begins with it."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = 0
    for spelling, candidates in zip(rendered.token_strings, rendered.logprobs or (), strict=False):
        if candidates is None:
            offset = _add(found, spelling, None, None, offset)
            continue
        (_, logprob, raw), *others = candidates
        top = {spelled(other): finite(value) for _, value, other in others[:num_candidates]}
        top.setdefault(spelled(raw), finite(logprob))
        offset = _add(found, spelled(raw), finite(logprob), top, offset)
    return found


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return completions' ``logprobs`` one after the other."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(rendered: Rendered | None) -> list[dict[str, Any] | None] | None:
    """Return vLLM's ``prompt_logprobs``: for each token the candidates by id; None for the first one."""
    if rendered is None or rendered.logprobs is None:
        return None
    return [
        None
        if candidates is None
        else {
            str(token): {"logprob": finite(logprob), "rank": None, "decoded_token": spelled(raw)}
            for token, logprob, raw in candidates
        }
        for candidates in rendered.logprobs
    ]


def spelled(raw: bytes) -> str:
    """Return a token's bytes as text; what is no whole character is marked."""
    return raw.decode("utf-8", "replace")


def finite(logprob: float | None) -> float:
    """Return a log-probability that JSON can hold."""
    return LEAST if logprob is None or not math.isfinite(logprob) else max(logprob, LEAST)


def _add(found: dict[str, Any], token: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> int:
    found["tokens"].append(token)
    found["token_logprobs"].append(logprob)
    found["top_logprobs"].append(top)
    found["text_offset"].append(offset)
    return offset + len(token)
