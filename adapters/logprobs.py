"""Log-probabilities of tokens: natural logs of the model's own distribution, before any sampling parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_candidates: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Return for each row the token's log-probability, and the most probable tokens with theirs, best first.

    Args:
        logits: (rows, vocabulary).
        token_ids: one for each row.
        num_candidates: how many of the most probable ones; 0 and more.
    """
    import torch

    logs = logits.float().log_softmax(dim=-1)
    chosen = logs.gather(1, torch.tensor(token_ids, device=logs.device)[:, None])[:, 0].tolist()
    if not num_candidates:
        return [(logprob, []) for logprob in chosen]
    values, ids = logs.topk(min(num_candidates, logs.shape[-1]), dim=-1)
    rows = zip(chosen, ids.tolist(), values.tolist(), strict=True)
    return [(logprob, list(zip(ids, values, strict=True))) for logprob, ids, values in rows]


def with_token_first(token_id: int, logprob: float, candidates: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the candidates with the token itself in front, and not a second time."""
    return [(token_id, logprob), *((other, log) for other, log in candidates if other != token_id)]
