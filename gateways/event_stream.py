"""Answers that are sent as they are made, with backpressure: bytes, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateways.http import FAILURE, REQUEST_ID, log_failure
from gateways.problems import to_problem
from omni_bus.gateway import WRITE_BUFFER_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from gateways.problems import Problem


class _LateHead(web.StreamResponse):
    """A response whose head goes out with the first bytes of its body, as those of aiohttp's whole ones do."""

    _send_headers_immediately = False


class ByteStream:
    """An answer that is sent as it is made; it begins with its first bytes: an earlier failure has a real status.

    `write` returns when the client's connection has room again: whoever makes the next bytes after that is as slow as
    their reader.

    Args:
        request: whose answer it is.
        write_timeout_s: a client that takes nothing for so long is treated as gone.
        headers: of the answer; more may be added to `response` before it begins.
    """

    def __init__(self, request: web.Request, write_timeout_s: float, headers: Mapping[str, str]) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._writer = request.writer
        self._transport: asyncio.Transport | None = None
        """The client's connection, once the head is on it."""
        self._is_chunked = False
        self.response = _LateHead(
            headers={
                **headers,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # proxies that buffer would turn a stream into a lump
                "X-Request-Id": request[REQUEST_ID],
            }
        )

    @property
    def has_begun(self) -> bool:
        """Status and headers are sent."""
        return self.response.prepared

    async def write(self, data: bytes) -> None:
        """Send bytes and wait until the client has taken enough of what came before.

        Raises:
            ConnectionError: the client is gone, or took nothing for `write_timeout_s`.
        """
        if self.try_write(data):
            return
        if not self.has_begun:
            await self.response.prepare(self._request)
            self._is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write(data)
                await self._request.writer.drain()
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"the client took nothing for {self._write_timeout_s:g} s") from None
        self._transport = self._request.transport

    def try_write(self, data: bytes) -> bool:
        """Send bytes if that needs no waiting: the answer has begun, and the client has room; else False, and nothing.

        Most events of a stream are a token long and find room, so they take no way that could wait: past aiohttp's
        writer, whose buffer is empty once the head is sent, to the connection.
        """
        transport = self._transport
        if transport is None or not data or not self._has_room(transport, len(data)):
            return False
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)  # RFC 9112, section 7.1
        transport.write(data)
        self._writer.output_size += len(data)
        return True

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes and end the response well; waits, and raises, as `write` does."""
        if data and (self._transport is None or not self._has_room(self._transport, len(data))):
            await self.write(data)
            data = b""
        await self.response.write_eof(data)

    def _has_room(self, transport: asyncio.Transport, num_bytes: int) -> bool:
        return not transport.is_closing() and transport.get_write_buffer_size() + num_bytes < WRITE_BUFFER_BYTES


class EventStream(ByteStream):
    """Server-sent events with backpressure."""

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        super().__init__(request, write_timeout_s, {"Content-Type": "text/event-stream; charset=utf-8"})

    async def send(self, *data: bytes, event: str = "") -> None:
        """Send an event ``data: …`` for each, after ``event: …`` if it has a name, and wait as `write` does.

        Raises:
            ConnectionError: see `write`.
        """
        name = f"event: {event}\n".encode() if event else b""
        await self.write(name + _events(data))

    async def send_last(self, *data: bytes) -> None:
        """Send the last events and end the response well.

        Raises:
            ConnectionError: see `write`.
        """
        await self.end(_events(data))

    def try_send(self, data: bytes) -> bool:
        """Send ``data: …`` if that needs no waiting; else False, and nothing."""
        return self.try_write(b"data: %b\n\n" % data)

    @contextlib.asynccontextmanager
    async def telling_failures(self) -> AsyncIterator[None]:
        """Tell of what is raised inside in the stream, once it has begun; before, the edge does, with a real status."""
        try:
            yield
        except ConnectionError:
            raise
        except Exception as error:
            if not self.has_begun:
                raise
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        """Send one error event and close: after it comes no mark of success."""
        problem = to_problem(error)
        log_failure(problem, error, self._request[REQUEST_ID])
        self._request[FAILURE] = problem.status
        self.response.force_close()
        await self.send_problem(problem)
        await self.response.write_eof()

    async def send_problem(self, problem: Problem) -> None:
        """Send the event that tells of a failure."""
        await self.send(msgspec.json.encode(problem.document))


def _events(data: Iterable[bytes]) -> bytes:
    return b"".join(b"data: %b\n\n" % each for each in data)
