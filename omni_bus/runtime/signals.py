"""The wish to stop, as a value: the first SIGTERM asks to drain, a second one to leave at once.

A process may also be asked to retire while the rest of its deployment goes on: others do its work from then on.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

ECHO_S = 0.2
"""The same signal again so soon after the first is the same wish: a program around this one (``timeout``, a package
runner) passes on what it was sent, and the process group has it anyway, so that one Ctrl-C or SIGTERM arrives twice."""


RETIRE = signal.SIGUSR1
"""From a supervisor to one of its processes: leave so that nobody misses you. A SIGTERM after it asks to drain."""


class Stop:
    """What a process waits on.

    Args:
        with_interrupt: whether Ctrl-C counts too. Children of a supervisor ignore it: it is for their supervisor, which
            tells them in order.
        clock: seconds; by default the loop's.
    """

    def __init__(self, *, with_interrupt: bool = False, clock: Callable[[], float] | None = None) -> None:
        self.requested = asyncio.Event()
        self.ordered = asyncio.Event()
        """By SIGTERM or Ctrl-C: the whole deployment stops."""
        self.forced = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._clock = clock if clock is not None else loop.time
        self._first = (0, 0.0)
        loop.add_signal_handler(signal.SIGTERM, self.request, signal.SIGTERM)
        if with_interrupt:
            loop.add_signal_handler(signal.SIGINT, self.request, signal.SIGINT)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            loop.add_signal_handler(RETIRE, self.requested.set)

    @property
    def is_retiring(self) -> bool:
        """Only this process is asked to leave."""
        return self.requested.is_set() and not self.ordered.is_set()

    def request(self, number: int) -> None:
        """Ask to drain; asked again, by another signal or after `ECHO_S`, to leave at once."""
        first, at_s = self._first
        if not self.ordered.is_set():
            self._first = (number, self._clock())
            self.ordered.set()
            self.requested.set()
        elif number != first or self._clock() - at_s > ECHO_S:
            self.forced.set()

    async def unless_ordered(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something until it is done or the whole deployment stops."""
        working = asyncio.create_task(work)
        ordered = asyncio.create_task(self.ordered.wait())
        await asyncio.wait({working, ordered}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        for task in (working, ordered):
            task.cancel()

    async def drained(self, drain: Coroutine[Any, Any, bool]) -> bool:
        """Drain until that is done, or until whoever asked for it asks to leave at once.

        Args:
            drain: returns whether all work finished by itself.

        Returns:
            What `drain` returned; False if it was cut short.
        """
        draining = asyncio.create_task(drain)
        forced = asyncio.create_task(self.forced.wait())
        await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
        is_clean = draining.done() and draining.result()
        for task in (draining, forced):
            task.cancel()
        return is_clean
