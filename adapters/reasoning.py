"""What a model thinks before it answers, told from the answer: text between ``<think>`` and ``</think>``."""

from __future__ import annotations

from typing import Literal, NamedTuple

from adapters.detokenize import longest_beginning

OPEN = "<think>"
CLOSE = "</think>"


class Piece(NamedTuple):
    """Text and where it belongs."""

    port: Literal["text", "reasoning"]
    text: str


class ThinkingFilter:
    """Splits a text as it comes; how it was cut into pieces makes no difference.

    Only a text that begins with ``<think>``, blanks apart, has reasoning in it; many chat templates begin it
    themselves. Blanks at both sides of the answer's begin and of the reasoning's ends are left out.
    """

    def __init__(self, *, is_open: bool) -> None:
        """Begin.

        Args:
            is_open: the prompt ended in ``<think>``.
        """
        self._state: Literal["before", "thinking", "after", "answer"] = "thinking" if is_open else "before"
        self._kept = ""
        self._has_thought = False

    @property
    def is_thinking(self) -> bool:
        """Whether the model is known to think."""
        return self._state == "thinking"

    def feed(self, text: str) -> list[Piece]:
        """Return what became certain."""
        self._kept += text
        pieces: list[Piece] = []
        if self._state == "before":
            self._begin()
        if self._state == "thinking":
            pieces += self._think()
        if self._state == "after" and (answer := self._kept.lstrip()):
            self._kept, self._state = answer, "answer"
        if self._state == "answer" and self._kept:
            pieces.append(Piece("text", self._kept))
            self._kept = ""
        return pieces

    def flush(self) -> list[Piece]:
        """Return what is kept back: no more text comes."""
        text, self._kept = self._kept, ""
        match self._state:
            case "thinking":
                text = text.rstrip() if self._has_thought else text.strip()
                return [Piece("reasoning", text)] if text else []
            case "before":
                return [Piece("text", text)] if text else []
            case _:
                return []

    def _begin(self) -> None:
        text = self._kept.lstrip()
        if text.startswith(OPEN):
            self._kept, self._state = text[len(OPEN) :], "thinking"
        elif not OPEN.startswith(text):
            self._state = "answer"

    def _think(self) -> list[Piece]:
        thought, tag, rest = self._kept.partition(CLOSE)
        if tag:
            self._kept, self._state = rest, "after"
            thought = thought.rstrip()
        else:
            certain = thought[: len(thought) - longest_beginning(thought, (CLOSE,))].rstrip()
            self._kept = thought[len(certain) :]
            thought = certain
        if not self._has_thought:
            thought = thought.lstrip()
        if not thought:
            return []
        self._has_thought = True
        return [Piece("reasoning", thought)]
