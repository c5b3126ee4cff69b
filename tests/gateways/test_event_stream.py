"""How a stream's bytes reach the client's connection: each write is a system call, and wakes whoever reads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from gateways.event_stream import EventStream
from gateways.http import REQUEST_ID

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PLAIN = b"data: a\n\ndata: b\n\ndata: c\n\ndata: d\n\ndata: [DONE]\n\n"
CHUNKED = b"12\r\ndata: a\n\ndata: b\n\n\r\n9\r\ndata: c\n\n\r\n17\r\ndata: d\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ENOUGH_BYTES = 16 << 20
"""More than the kernel keeps of a connection whose client does not read."""


class Noting:
    """A transport that notes what is written to it."""

    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport = transport
        self._written = written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._written.append(bytes(data))
        self._transport.write(data)


@contextlib.asynccontextmanager
async def served(
    stream_of: Callable[[EventStream], Awaitable[None]], write_timeout_s: float = 10
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Serve one stream on every path; yield the port, and what is written."""
    written: list[bytes] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = "r"
        assert request.transport is not None
        request.protocol.transport = Noting(request.transport, written)  # type: ignore[assignment]
        stream = EventStream(request, write_timeout_s)
        await stream_of(stream)
        return stream.response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1], written
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("version", "body"), [("1.0", PLAIN), ("1.1", CHUNKED)])
async def test_a_beginning_and_an_end_are_one_write_each(version: str, body: bytes) -> None:
    async def stream_of(stream: EventStream) -> None:
        assert not stream.try_send(b"before the head")
        await stream.send(b"a", b"b")
        assert stream.try_send(b"c")
        await stream.send_last(b"d", b"[DONE]")

    async with served(stream_of) as (port, written):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET / HTTP/{version}\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
        head, _, came = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    assert head.startswith(f"HTTP/{version} 200 OK".encode())
    assert came == body
    assert [piece.count(b"data:") for piece in written] == [2, 1, 2]


async def test_last_events_wait_no_longer_than_others_for_a_client_that_takes_nothing() -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def stream_of(stream: EventStream) -> None:
        await stream.send(b"begun")
        try:
            await stream.send_last(bytes(ENOUGH_BYTES))
        except ConnectionError as error:
            ended.set_result(str(error))
            raise

    async with served(stream_of, write_timeout_s=0.05) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert await ended == "the client took nothing for 0.05 s"
        writer.close()
