"""Files whose time is over go: a store is swept as long as its gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Self

from omni_bus.errors import OmniBusError

if TYPE_CHECKING:
    from types import TracebackType

    from omni_bus.media.store import Store

SWEEP_S = 3600.0
"""Expired files of other processes are swept so often at the latest; nobody sees them in between."""


class Sweeper:
    """Sweeps a store when a file expires; a context manager."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._task: asyncio.Task[None] | None = None
        self.has_expiring = asyncio.Event()
        """Set when a file came whose time may end before the next sweep."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _sweep(self) -> None:
        while True:
            next_at = None
            with contextlib.suppress(OmniBusError):  # logged by the store; the next round may find its folder well
                next_at = await self._store.sweep()
            wait_s = SWEEP_S if next_at is None else min(SWEEP_S, max(0.0, next_at - time.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.has_expiring.wait()
            self.has_expiring.clear()
