"""Between threads that compute and the loop that sends what they made."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

    from omni_bus.wire.payloads import Payload

T = TypeVar("T")

NUM_PIECES = 8
"""Pieces between the thread and the loop; more would only hide that the reader is slow."""


class Handover:
    """Payloads for output ports, a few at a time.

    The thread waits while the reader is behind; closing lets it go on, and tells it to stop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pieces: asyncio.Queue[tuple[str, Payload] | None] = asyncio.Queue()  # bounded by the semaphore
        self._room = threading.Semaphore(NUM_PIECES)
        self.is_closed = False

    def put_blocking(self, port: str, payload: Payload) -> None:
        """Hand a payload over from the thread."""
        self._room.acquire()
        if self.is_closed:
            self._room.release()  # for the next call, should there be one
            return
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, (port, payload))

    def end(self) -> None:
        """Say from the thread that nothing more comes."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, None)

    async def take(self) -> tuple[str, Payload] | None:
        """Return the next payload and its port, None after the last."""
        piece = await self._pieces.get()
        self._room.release()
        return piece

    def close(self) -> None:
        """Say from the loop that nothing more is taken."""
        self.is_closed = True
        self._room.release()


async def on_thread(pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
    """Run a call on a pool's thread; a cancel waits for its end there, so that nothing is left running."""
    call = pool.submit(function, *args)
    future = asyncio.wrap_future(call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not call.cancel():  # it has begun
            await error_of(future)  # what it raised is nobody's concern any more, and no news for the log
        raise


async def error_of(call: asyncio.Future[Any]) -> BaseException | None:
    """Wait for a call's end and return what it raised."""
    await asyncio.wait([call])
    return call.exception()


def start_threads(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Start all threads of a pool now; by itself it starts one whenever a request finds none idle."""
    meeting = threading.Barrier(num_threads)
    for call in [pool.submit(meeting.wait) for _ in range(num_threads)]:
        call.result()
