"""Text of a given structure: masks that leave only tokens with which a grammar can go on (the llguidance library)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from omni_bus.errors import BadInput, StageFailed

if TYPE_CHECKING:
    import torch

    from adapters.sampling import Structure
    from adapters.vocabulary import Vocabulary

WHITESPACE = r"[ \t\r\n]{0,20}"
"""Between the values of a JSON text. JSON itself has no limit, and small models write blanks until their tokens end."""


class TokenMask:
    """Where one request is in its grammar."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return self._matcher.is_stopped()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, (vocabulary,), with -inf where a token would break the structure.

        Raises:
            StageFailed: the grammar became too complex to follow.
        """
        import numpy as np
        import torch

        bits = self._matcher.compute_bitmask()
        self._check()
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=self._size)
        mask = torch.from_numpy(allowed).to(logits.device).bool()
        return logits.masked_fill(~mask, float("-inf"))

    def consume(self, token_id: int) -> None:
        """Go on by a token that the mask allowed.

        Raises:
            StageFailed: it doesn't fit.
        """
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StageFailed(f"the structure can't be followed: {_short(self._matcher.get_error())}")


def grammar_of(structure: Structure) -> tuple[str, str]:
    """Return which field says it, and the structure as a Lark grammar for llguidance.

    Raises:
        BadInput: none or several fields are set, or a JSON Schema allows nothing.
    """
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    named = {name: getattr(structure, name) for name in structure.__struct_fields__}
    given = [name for name, value in named.items() if value is not None and value is not False]
    if structure.json is False:
        raise BadInput("structure.json: false allows no value (allowed: a schema that does)", field="structure.json")
    if len(given) != 1:
        raise BadInput(
            f"structure: {' and '.join(given) or 'nothing'} came (allowed: one of {', '.join(named)})",
            field="structure",
        )
    [name] = given
    value = named[name]
    match name:
        case "json_object":
            grammar = json_grammar({"type": "object"})
        case "json":
            grammar = json_grammar({} if value is True else value)
        case "regex":
            grammar = f"start: /{regex_to_lark(value)}/"
        case "choice":
            grammar = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
        case _:
            try:
                grammar = any_to_lark(value)
            except Exception as error:  # whatever its reader of GBNF stumbles over is the text's fault
                raise BadInput(
                    f"structure.grammar: {_short(error)} (allowed: Lark or GBNF)", field="structure.grammar"
                ) from error
    return f"structure.{name}", grammar


def json_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of a JSON Schema's values."""
    return f"start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def compile_grammar(grammar: str, field: str, vocabulary: Vocabulary) -> TokenMask:
    """Return the mask at the beginning of a text.

    Args:
        grammar: a Lark grammar.
        field: who asked for it, for refusals.
        vocabulary: the model's.

    Raises:
        BadInput: it isn't a grammar, it asks for what the library can't do, or the vocabulary can't be masked.
    """
    from llguidance import LLMatcher

    if vocabulary.grammar_tokenizer is None:
        raise BadInput(f"{field}: this model's kind of tokenizer can't follow one (allowed: nothing)", field=field)
    matcher = LLMatcher(vocabulary.grammar_tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise _refused(field, matcher.get_error())
    return TokenMask(matcher, vocabulary.size)


def check_grammar(grammar: str, field: str) -> None:
    """Refuse a grammar that another engine would compile.

    Raises:
        BadInput: as `compile_grammar`.
    """
    from llguidance import LLMatcher

    if (reason := LLMatcher.validate_grammar(grammar)) and not reason.startswith("WARNING"):
        raise _refused(field, reason)


def _refused(field: str, reason: str) -> BadInput:
    return BadInput(f"{field}: can't be followed: {_short(reason)} (allowed: what llguidance compiles)", field=field)


def _short(error: Any) -> str:
    return " ".join(str(error).split())[:300]
