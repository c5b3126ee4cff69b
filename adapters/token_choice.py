"""Choosing a request's next token from logits, by its sampling parameters.

Each request has its own random generator and is handled on its own row, so who else is in the batch has no influence.
What transformers' `generate` can do is done by its own processors, in its order: repetition penalty, minimum length,
temperature, top-k, top-p, min-p; bad words and biases come right after the repetition penalty. A structure's mask is
laid on the logits before all of them. The frequency and presence penalties are OpenAI's: ``logit - frequency * count -
presence * (count > 0)`` over generated tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from adapters.sampling import SamplingParams
    from adapters.structure import TokenMask


GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: dividing by them leaves the range of 32-bit floats, and no token would be chosen."""


class TokenChoice:
    """The choice of one request, with its random state and the counts of what it generated."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: frozenset[int],
        device: Any,
        *,
        bad_words: Sequence[Sequence[int]] = (),
        mask: TokenMask | None = None,
    ) -> None:
        """Prepare for a request.

        Args:
            params: checked sampling parameters.
            prompt: the request's prompt, for the repetition penalty.
            ends: tokens that end the text, not chosen before `params.min_tokens`.
            device: where the logits are.
            bad_words: tokens of texts that are never written.
            mask: what the structure allows; it is told what was chosen.
        """
        import torch

        if params.temperature < GREEDY_BELOW:
            params = msgspec.structs.replace(params, temperature=0)
        self._is_greedy = params.temperature == 0
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._counts: torch.Tensor | None = None
        self._mask = mask
        self._processors, self._needs_history = _processors(params, len(prompt), ends, device, bad_words)
        self._history = torch.tensor([prompt], dtype=torch.long, device=device) if self._needs_history else None
        self._generator = torch.Generator(device=device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def is_argmax(self) -> bool:
        """Whether the most probable token is always chosen, so that rows can be handled together."""
        has_penalty = self._frequency or self._presence
        return self._is_greedy and self._mask is None and not self._processors and not has_penalty

    @property
    def is_complete(self) -> bool:
        """Whether the structure is whole and nothing can follow."""
        return self._mask is not None and self._mask.is_complete

    def choose(self, logits: torch.Tensor, *, is_free: bool = False) -> int:
        """Return the next token.

        Args:
            logits: (vocabulary,), unchanged afterwards.
            is_free: this token is not yet part of the structure.

        Raises:
            BadInput: what the structure allows is forbidden by other parameters.
        """
        import torch

        mask = None if is_free else self._mask
        logits = logits.float() if mask is None else mask.apply(logits.float())
        scores = self._penalised(logits)[None]
        for process in self._processors:
            scores = process(self._history, scores)
        if mask is not None and not scores.isfinite().any():
            raise BadInput(
                "structure: bad_words or min_tokens forbid every token that it allows (allowed: parameters that "
                "leave one)",
                field="structure",
            )
        if self._is_greedy:
            token = scores.argmax(dim=-1)
        else:
            token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator)[0]
        self._remember(token)
        if mask is not None:
            mask.consume(int(token))
        return int(token)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        if not (self._frequency or self._presence):
            return logits
        if self._counts is None:
            self._counts = logits.new_zeros(logits.shape)
        return logits - self._frequency * self._counts - self._presence * (self._counts > 0)

    def _remember(self, token: torch.Tensor) -> None:
        import torch

        if self._counts is not None:
            self._counts[token] += 1
        if self._history is not None:
            self._history = torch.cat([self._history, token.view(1, 1)], dim=1)


class _TopP:
    """transformers' top-p, four times faster where few tokens carry most of the probability.

    Sorting a vocabulary of 49,152 takes 4 ms of a step's 70, for each request; its few largest are found in a tenth
    of that.
    """

    NUM_LARGEST = 512

    def __init__(self, top_p: float) -> None:
        from transformers.generation.logits_process import TopPLogitsWarper

        self._top_p = top_p
        self._by_sorting: Any = TopPLogitsWarper(top_p)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, (1, vocabulary), with -inf outside the smallest set of tokens that reaches `top_p`."""
        probabilities = scores.softmax(dim=-1)
        largest = probabilities.topk(min(self.NUM_LARGEST, scores.shape[-1])).values
        before = largest.cumsum(dim=-1) - largest
        # The first is always kept: a `top_p` below the smallest 32-bit float compares as zero.
        num_kept = max(1, int((before < self._top_p).sum()))
        if num_kept == largest.shape[-1]:
            return self._by_sorting(input_ids, scores)
        return scores.masked_fill(probabilities < largest[:, num_kept - 1 : num_kept], float("-inf"))


def _processors(
    params: SamplingParams,
    prompt_length: int,
    ends: frozenset[int],
    device: Any,
    bad_words: Sequence[Sequence[int]],
) -> tuple[list[Any], bool]:
    """Return transformers' processors for these parameters, and whether they look at the tokens so far.

    They are called one by one: transformers' own list of them inspects each one's signature at each token, which takes
    longer than the processors.
    """
    from transformers.generation import logits_process as g

    chain: list[Any] = []
    if params.repetition_penalty != 1:
        chain.append(g.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        chain.append(g.SequenceBiasLogitsProcessor([[[int(id_)], bias] for id_, bias in params.logit_bias.items()]))
    if bad_words:
        chain.append(g.NoBadWordsLogitsProcessor([list(ids) for ids in bad_words]))
    if params.min_tokens and ends:
        chain.append(g.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, sorted(ends), device=device))
    needs_history = bool(chain)
    if params.temperature not in (0, 1):
        chain.append(g.TemperatureLogitsWarper(float(params.temperature)))
    if params.temperature and params.top_k > 0:
        chain.append(g.TopKLogitsWarper(params.top_k))
    if params.temperature and params.top_p < 1:
        chain.append(_TopP(params.top_p))
    if params.temperature and params.min_p > 0:
        chain.append(g.MinPLogitsWarper(params.min_p))
    return chain, needs_history
