"""Whether there is a coordinator that could answer: asked while somebody waits for its answer, and only then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from omni_bus.ids import RequestId

ANSWER_S = 2.0
"""A submit that is unanswered for so long waits in a queue, or for a coordinator that is gone; it is asked which, and
gets so long to answer that. A round trip takes a millisecond."""


class Vigil:
    """Ends the wait of those whom nobody will answer.

    Args:
        waiting: returns the requests that wait for an answer now.
        ask: asks the coordinator anything; what it answers does not matter.
        give_up: told the requests that wait since before a question that nobody answered.
    """

    def __init__(
        self,
        *,
        waiting: Callable[[], set[RequestId]],
        ask: Callable[[], Coroutine[Any, Any, Any]],
        give_up: Callable[[set[RequestId]], None],
    ) -> None:
        self._waiting = waiting
        self._ask = ask
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None
        self._question: asyncio.Task[Any] | None = None
        self._askers: set[RequestId] = set()

    def begin(self) -> None:
        """Somebody waits from now on; harmless if others do already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ANSWER_S, self._look)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_question()

    def _look(self) -> None:
        self._timer = None
        is_silent = self._question is not None and not self._question.done()
        self._drop_question()
        if is_silent:
            self._give_up(self._askers & self._waiting())
        self._askers = self._waiting()
        if self._askers:
            self._question = asyncio.create_task(self._ask())
            self.begin()

    def _drop_question(self) -> None:
        question, self._question = self._question, None
        if question is None:
            return
        question.cancel()
        if question.done() and not question.cancelled():
            question.exception()  # an error is an answer too
