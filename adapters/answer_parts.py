"""The parts of a written answer: its text, the reasoning before it and the calls of tools in it, each on its port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.reasoning import Piece
from adapters.tool_calls import Said

if TYPE_CHECKING:
    from adapters.reasoning import ThinkingFilter
    from adapters.tool_calls import CallFilter
    from omni_bus.wire.prompt import ToolCallDelta


class AnswerParts:
    """Splits a text as it comes; how it was cut into pieces makes no difference."""

    def __init__(self, thinking: ThinkingFilter | None = None, calls: CallFilter | None = None) -> None:
        """Begin.

        Args:
            thinking: tells reasoning from the answer, where the model's is read.
            calls: tells calls from the answer, where the request may have them.
        """
        self._thinking = thinking
        self._calls = calls

    @property
    def is_thinking(self) -> bool:
        """Whether the model is known to think."""
        return self._thinking is not None and self._thinking.is_thinking

    @property
    def num_calls(self) -> int:
        """Calls that were announced."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_full(self) -> bool:
        """Whether the last call that is allowed is complete."""
        return self._calls is not None and self._calls.is_full

    def feed(self, text: str) -> list[Piece | ToolCallDelta]:
        """Return what became certain."""
        pieces = [Piece("text", text)] if self._thinking is None else self._thinking.feed(text)
        return self._called(pieces)

    def flush(self) -> list[Piece | ToolCallDelta]:
        """Return what is kept back: no more text comes."""
        found = self._called([] if self._thinking is None else self._thinking.flush())
        if self._calls is not None:
            found += [_piece(item) for item in self._calls.flush()]
        return found

    def _called(self, pieces: list[Piece]) -> list[Piece | ToolCallDelta]:
        found: list[Piece | ToolCallDelta] = []
        for piece in pieces:
            if piece.port == "reasoning" or self._calls is None:
                found += [piece] if piece.text else []
            else:
                found += [_piece(item) for item in self._calls.feed(piece.text)]
        return found


def _piece(item: Said | ToolCallDelta) -> Piece | ToolCallDelta:
    return Piece("text", item.text) if isinstance(item, Said) else item
