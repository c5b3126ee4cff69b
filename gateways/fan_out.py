"""Several requests on the bus for one of a client: samples, prompts, conversations; all of them or none."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gateways.routing import routing_of
from omni_bus.errors import RequestCancelled, Unavailable
from omni_bus.gateway import STOPPING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from gateways.http import Terms
    from omni_bus.client import BusClient, Request, RequestEvent
    from omni_bus.wire.payloads import Payload

MAX_AT_ONCE = 128
"""Requests of one client's request that are submitted at the same time; more wait here, as others end."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request on the bus."""

    pipeline: str
    outputs: tuple[str, ...]
    """Wanted output ports."""
    params: dict[str, dict[str, Any]]
    """Parameters by stage."""
    inputs: Mapping[str, Sequence[Payload]]
    """What goes to each input port; a port that gets nothing is ended."""
    priority: int = 0
    session: str = ""
    """Whose replicas it is to have, where the caller's terms don't say so."""
    wants_metrics: bool = False
    """The ends of its outputs say what its stages did."""


@asynccontextmanager
async def opened(client: BusClient, call: Call, terms: Terms) -> AsyncIterator[Request]:
    """Run one call: within the block it was admitted and is fed; leaving early cancels it."""
    async with await _submit(client, call, terms) as request, _fed(request, call):
        yield request


async def run_all(
    client: BusClient, calls: Sequence[Call], terms: Terms
) -> AsyncGenerator[tuple[int, RequestEvent], None]:
    """Run calls and yield what comes, each event with its call's index; the first error ends them all.

    Asking for the next event gives the last one's credit back, so that a slow reader slows down the calls and nothing
    else. Close the generator (`contextlib.aclosing`): that cancels what still runs.

    Raises:
        OmniBusError: the first that any of them ended with.
    """
    if len(calls) == 1:
        async with opened(client, calls[0], terms) as request:
            async for event in request:
                yield 0, event
        return
    # One place: with it each call has at most one event on its way here.
    arrivals: asyncio.Queue[tuple[int, RequestEvent | Exception | None]] = asyncio.Queue(1)
    turns = asyncio.Semaphore(MAX_AT_ONCE)
    share: Terms = {**terms, "input_bytes": terms["input_bytes"] // len(calls)}

    async def run(index: int, call: Call) -> None:
        try:
            async with turns, await _submit(client, call, share) as request, _fed(request, call):
                async for event in request:
                    await arrivals.put((index, event))
            await arrivals.put((index, None))
        except Exception as error:  # noqa: BLE001 (it is raised where the events are read)
            await arrivals.put((index, error))

    tasks = [asyncio.create_task(run(index, call)) for index, call in enumerate(calls)]
    num_open = len(tasks)
    try:
        while num_open:
            index, event = await arrivals.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_open -= 1
            else:
                yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Taker(Protocol):
    """What takes the events of several calls."""

    def take_now(self, index: int, event: RequestEvent) -> bool:
        """Take an event of the call `index` without waiting; False, and nothing, if that can't be."""
        ...

    async def take(self, index: int, event: RequestEvent) -> None:
        """Take an event that could not be taken without waiting."""
        ...


async def take_all(client: BusClient, calls: Sequence[Call], terms: Terms, taker: Taker) -> None:
    """Run calls and hand over what comes, as `run_all` yields it; where there is but one call, without a task for each.

    Raises:
        OmniBusError: the first that any of them ended with.
        Exception: what the taker raises.
    """
    if len(calls) == 1:
        async with await _submit(client, calls[0], terms) as request, _fed(request, calls[0]):
            await request.each(partial(taker.take_now, 0), partial(taker.take, 0))
        return
    async with aclosing(run_all(client, calls, terms)) as events:
        async for index, event in events:
            if not taker.take_now(index, event):
                await taker.take(index, event)


async def _submit(client: BusClient, call: Call, terms: Terms) -> Request:
    try:
        return await client.submit(
            call.pipeline,
            call.outputs,
            call.params,
            priority=call.priority,
            wants_metrics=call.wants_metrics,
            **{**terms, "session": terms["session"] or call.session},
            **routing_of(call),
        )
    except asyncio.CancelledError:
        # Either the client is gone and this task is cancelled, or the request was cancelled while it was queued.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable(STOPPING) from None


@asynccontextmanager
async def _fed(request: Request, call: Call) -> AsyncIterator[None]:
    """Send a request's input; where it comes in pieces, while its outputs are read, which may come before its end."""
    if all(len(payloads) <= 1 for payloads in call.inputs.values()):
        await _feed(request, call)
        yield
        return
    feeding = asyncio.create_task(_feed(request, call))
    feeding.add_done_callback(lambda task: _end_unfed(request, task))
    try:
        yield
    except RequestCancelled:
        if feeding.done() and not feeding.cancelled() and (why := feeding.exception()) is not None:
            raise why from None
        raise
    finally:
        feeding.cancel()
        await asyncio.wait({feeding})


def _end_unfed(request: Request, feeding: asyncio.Task[None]) -> None:
    """End a request whose input could not be sent; one that has ended by itself says why where it is read."""
    if not feeding.cancelled() and feeding.exception() is not None and not request.is_over:
        request.cancel("its input could not be sent")


async def _feed(request: Request, call: Call) -> None:
    for port, payloads in call.inputs.items():
        for payload in payloads:
            await request.send(port, payload)
        request.finish(port)
