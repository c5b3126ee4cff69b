"""A model's vocabulary: tokens as bytes and as they are spelt, for payloads and for grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_bus.wire.payloads import Candidate, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Vocabulary:
    """The tokens of a tokenizer of transformers that has a fast form."""

    def __init__(self, tokenizer: Any, size: int, ends: Collection[int]) -> None:
        """Read the tokenizer, in a quarter of a second for 49,152 tokens.

        Args:
            tokenizer: a fast tokenizer of transformers.
            size: how many logits the model has; more than the tokenizer knows where they were rounded up.
            ends: tokens that end a text.
        """
        self.tokenizer = tokenizer
        self.size = size
        self.ends = frozenset(ends)
        self.grammar_tokenizer = _grammar_tokenizer(tokenizer, size, self.ends)
        """The same tokens as llguidance knows them; None for kinds of tokenizers that it doesn't read."""

    def raw(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; of a special one its name's."""
        if self.grammar_tokenizer is not None:
            return self.grammar_tokenizer.decode_bytes([token_id])
        return self.tokenizer.decode([token_id]).encode()

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; ids beyond it, which some models have, are empty."""
        return [string or "" for string in self.tokenizer.convert_ids_to_tokens(list(token_ids))]

    def candidate(self, token_id: int, logprob: float) -> Candidate:
        """Return a token that might have been chosen."""
        return Candidate(token_id, logprob, self.raw(token_id))

    def token(self, token_id: int, logprob: float | None, candidates: Sequence[tuple[int, float]] = ()) -> Token:
        """Return a token that was chosen."""
        return Token(
            token_id, self.raw(token_id), logprob, tuple(self.candidate(*candidate) for candidate in candidates)
        )


def _grammar_tokenizer(tokenizer: Any, size: int, ends: frozenset[int]) -> Any:
    import copy

    from llguidance import LLTokenizer

    backend = copy.copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    try:
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(ends) or None)
    except ValueError:  # decoders other than byte-level and byte-fallback ones
        return None
