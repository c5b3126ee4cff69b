"""A library's long call, run step by step: it goes on only while the engine says so.

The generation loops of transformers run to their end in one call. On a thread that waits at each token for its next
turn, such a call becomes a request of a `StepEngine`: one turn is one step, a suspended request holds its state and
computes nothing, and only one thread computes at a time, so that random numbers can be a request's own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

ItemT = TypeVar("ItemT")


class _Closed(BaseException):
    """The call is over; no `Exception`, so that the library's handlers let it through."""


class SteppedCall(Generic[ItemT]):
    """A call that gives out items, one a turn.

    Args:
        pool: whose thread it occupies from the first turn to its end; there must be one for every open call.
        function: the call; it hands each item to its argument, which returns when the next turn begins.
    """

    def __init__(self, pool: ThreadPoolExecutor, function: Callable[[Callable[[ItemT], None]], None]) -> None:
        self._pool = pool
        self._function: Callable[[Callable[[ItemT], None]], None] | None = function
        self._turn = threading.Semaphore(0)
        self._came = threading.Semaphore(0)
        self._item: ItemT | None = None
        self._error: Exception | None = None
        self._has_begun = False
        self._is_over = False
        self._is_closed = False

    def advance(self) -> ItemT | None:
        """Let it go on to its next item; None at the end.

        Raises:
            Exception: what the call raised.
        """
        if self._is_over:
            return None
        self._item = None
        if self._has_begun:
            self._turn.release()
        else:
            self._has_begun = True
            self._pool.submit(self._run)
        self._came.acquire()
        error, self._error = self._error, None
        if error is None:
            return self._item
        try:
            raise error
        finally:
            del error  # whose traceback has this frame

    def close(self) -> None:
        """End the call where it waits; its thread is free when this returns."""
        if self._has_begun and not self._is_over:
            self._is_closed = True
            self._turn.release()
            self._came.acquire()
        self._is_over = True
        self._function = None

    def _run(self) -> None:
        # Not ours any more: it knows us, and a ring would keep what it holds, large tensors as a rule, until the
        # collector comes by.
        function, self._function = self._function, None
        assert function is not None
        try:
            function(self._put)
        except _Closed:
            pass
        except Exception as error:  # noqa: BLE001 (it is raised where the call is advanced)
            self._error = error
        finally:
            self._is_over = True
            self._came.release()

    def _put(self, item: ItemT) -> None:
        self._item = item
        self._came.release()
        self._turn.acquire()
        self._item = None
        if self._is_closed:
            raise _Closed
