"""Whose turn it is to be spoken to: the listener's who runs out of sound first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Listener:
    """One who plays sound from the first piece on, as it comes.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs_dry_at = clock()

    def gets(self, seconds: float) -> None:
        """Count sound that goes to the listener now."""
        self._runs_dry_at = self.runs_dry_at() + seconds

    def runs_dry_at(self) -> float:
        """Return when there is nothing left to play; now for one who has nothing, however long that has been so.

        Who was silent, or took nothing, for a minute is not due a minute's sound before everybody else.
        """
        return max(self._clock(), self._runs_dry_at)


class Turns:
    """One at a time; of those that wait, the one with the earliest moment goes next, of equals the first that came.

    Nobody waits for ever: a moment that has come is before those of all who come later.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, due_at: float) -> AsyncIterator[None]:
        """Wait for a turn, have it, pass it on."""
        await self._take(due_at)
        try:
            yield
        finally:
            # Not at once: who had it may ask for the next one before it runs again, and be the most urgent.
            asyncio.get_running_loop().call_soon(self._pass_on)

    async def _take(self, due_at: float) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        gets_it = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (due_at, next(self._numbers), gets_it))
        try:
            await gets_it
        except asyncio.CancelledError:
            if gets_it.done() and not gets_it.cancelled():  # it came at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, gets_it = heapq.heappop(self._waiting)
            if not gets_it.done():
                gets_it.set_result(None)
                return
        self._is_taken = False
