"""What becomes of the tokens of one request: payloads on its ports, and the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from adapters.detokenize import Detokenizer, StopFilter
from adapters.logprobs import logprobs_of
from adapters.reasoning import Piece
from omni_bus.errors import StageFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Json, Payload, Text, Token

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from adapters.answer_parts import AnswerParts
    from adapters.sampling import SamplingParams
    from adapters.token_choice import TokenChoice
    from adapters.vocabulary import Vocabulary

Outputs: TypeAlias = list[tuple[str, Payload]]


class Limits(NamedTuple):
    """Where an answer ends at the latest."""

    num_prompt_tokens: int
    max_tokens: int
    ends: frozenset[int]
    """Tokens that end the text."""


class Answer:
    """The answer to one request, token by token."""

    def __init__(
        self,
        outputs: frozenset[str],
        params: SamplingParams,
        limits: Limits,
        *,
        vocabulary: Vocabulary,
        choice: TokenChoice,
        parts: AnswerParts,
    ) -> None:
        """Begin.

        Args:
            outputs: ports that are wanted.
            params: checked sampling parameters.
            limits: where it ends.
            vocabulary: of the tokens.
            choice: how the next one is chosen.
            parts: tells reasoning and calls from the answer.
        """
        self._outputs = outputs
        self._params = params
        self._limits = limits
        self._vocabulary = vocabulary
        self._choice = choice
        self._parts = parts
        self._is_free = parts.is_thinking
        self._detokenizer = Detokenizer(
            vocabulary.tokenizer.backend_tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopFilter(params.stop, is_passed_on=params.include_stop_str_in_output)
        self._has_tokens = params.token_ids or params.logprobs is not None
        self._unsent: list[Token] = []
        self._num_unsent = 0
        self.token_ids: list[int] = []
        """What was chosen so far."""
        self.num_cached_tokens = 0
        """Tokens of the prompt that needn't be computed, for the account."""

    @property
    def is_argmax(self) -> bool:
        """Whether the most probable token is always chosen, so that rows can be handled together."""
        return self._choice.is_argmax

    def advance(self, logits: torch.Tensor, best: float, argmax: int) -> tuple[Outputs, Finish | None]:
        """Choose the next token.

        Args:
            logits: (vocabulary,).
            best: the largest of them.
            argmax: whose it is.

        Returns:
            What became certain, and the end if this was the last token.

        Raises:
            StageFailed: the model computed no numbers, or the structure can't be followed.
            BadInput: the parameters leave no token to choose.
        """
        # max() passes NaN and infinity on, so this looks at the whole row.
        if not abs(best) < float("inf"):
            raise StageFailed(f"the model computed {best} as a logit")
        # A structure is the answer's: it begins after reasoning that the prompt began, and then holds to the end.
        self._is_free = self._is_free and self._parts.is_thinking
        token_id = argmax if self.is_argmax else self._choice.choose(logits, is_free=self._is_free)
        self.token_ids.append(token_id)
        self._num_unsent += 1
        if self._has_tokens:
            self._unsent.append(self._token(logits, token_id))
        return self._take(token_id)

    def _token(self, logits: torch.Tensor, token_id: int) -> Token:
        if self._params.logprobs is None:
            return self._vocabulary.token(token_id, None)
        [(logprob, candidates)] = logprobs_of(logits[None], [token_id], self._params.logprobs)
        return self._vocabulary.token(token_id, logprob, candidates)

    def _take(self, token_id: int) -> tuple[Outputs, Finish | None]:
        """Read a token: text that became certain, and the end if it is one."""
        is_long_enough = len(self.token_ids) >= self._params.min_tokens
        if token_id in self._limits.ends and is_long_enough:
            is_asked_for = token_id in self._params.stop_token_ids
            text = ""
            if self._params.include_stop_str_in_output:
                text = self._detokenizer.feed(token_id)
            return self._end(text, "stop", {"stop_reason": token_id} if is_asked_for else {})
        text = self._detokenizer.feed(token_id)
        if is_long_enough:
            text = self._stops.feed(text)
        if self._stops.found is not None:
            return self._close(text, "stop", {"stop_reason": self._stops.found})
        if self._choice.is_complete:
            return self._end(text, "stop", {})
        if len(self.token_ids) >= self._limits.max_tokens:
            return self._end(text, "length", {})
        outputs = self._sorted(text)
        if self._parts.is_full:
            rest, finish = self._close("", "stop", {})
            return outputs + rest, finish
        return outputs, None

    def _end(self, text: str, reason: str, detail: dict[str, Any]) -> tuple[Outputs, Finish]:
        """Close after the last token: nothing that is kept back is the beginning of something else."""
        return self._close(text + self._stops.feed(self._detokenizer.flush()) + self._stops.flush(), reason, detail)

    def _close(self, text: str, reason: str, detail: dict[str, Any]) -> tuple[Outputs, Finish]:
        outputs = self._sorted(text, is_last=True)
        if self._unsent and "text" in self._outputs:
            outputs += self._emitted("text", "")
        return outputs, self._finish(reason, detail)

    def _finish(self, reason: str, detail: dict[str, Any]) -> Finish:
        if reason == "stop" and self._parts.num_calls:
            reason = "tool_calls"
        usage = Usage(self._limits.num_prompt_tokens, len(self.token_ids), self.num_cached_tokens)
        return Finish(reason, usage, detail)

    def _sorted(self, text: str, *, is_last: bool = False) -> Outputs:
        """Return a text's parts, each on its port."""
        parts = self._parts.feed(text)
        if is_last:
            parts += self._parts.flush()
        outputs: Outputs = []
        for part in parts:
            if isinstance(part, Piece):
                outputs += self._emitted(part.port, part.text)
            elif "tool_calls" in self._outputs:
                outputs.append(("tool_calls", Json(msgspec.to_builtins(part))))
        return outputs

    def _emitted(self, port: str, text: str) -> Iterable[tuple[str, Payload]]:
        if port not in self._outputs:
            return []
        tokens, self._unsent = tuple(self._unsent), []
        num_tokens, self._num_unsent = self._num_unsent, 0
        return [(port, Text(text, num_tokens, tokens))]
