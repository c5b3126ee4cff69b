"""The wish to stop, as a value: the first SIGTERM asks to drain, a second one to leave at once."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Stop:
    """What a process waits on.

    Args:
        with_interrupt: whether Ctrl-C counts too. Children of a supervisor ignore it: it is for their supervisor, which
            tells them in order.
    """

    def __init__(self, *, with_interrupt: bool = False) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.request)
        if with_interrupt:
            loop.add_signal_handler(signal.SIGINT, self.request)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def request(self) -> None:
        """Ask to drain; asked again, to leave at once."""
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()

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
