"""A thread of an engine's own, for a streaming engine whose work blocks: calls of all its requests take turns on it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class OwnThread:
    """One thread; close it with the engine.

    Args:
        name: of the thread, for those who look at the process.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    def run_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call and wait for it; for `Engine.load`, which may block."""
        return self._executor.submit(function, *args, **kwargs).result()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call; a cancel waits for one that has begun, so that nothing is left running."""
        call = self._executor.submit(function, *args, **kwargs)
        future = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not call.cancel():
                await asyncio.wait([future])
                if not future.cancelled():
                    future.exception()  # seen, so that nothing is logged of it
            raise

    def close(self) -> None:
        """End the thread after its last call."""
        self._executor.shutdown()
