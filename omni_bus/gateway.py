"""What a gateway is, and the HTTP server that carries one.

A gateway turns a protocol into requests on the bus and back. It knows the deployment only through `BusClient`. Leaving
the ``async with`` block of a bus request cancels it, and `GatewayServer` cancels a handler whose client is gone; so no
handler has to watch its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http import HTTPStatus

    from omni_bus.client import BusClient
    from omni_bus.config.schema import CallerConfig
    from omni_bus.core.pipeline import Pipeline

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 32 * 1024
"""A handler waits once so much is buffered for its client; with `UNSENT_BYTES` the memory that a slow reader costs."""

UNSENT_BYTES = 128 * 1024
"""What the kernel may hold of a connection before it is sent (tcp(7), TCP_NOTSENT_LOWAT)."""

LINGER_S = 1.0
"""So long the rest of a refused body is read and dropped, so that the client sees the refusal and not a reset."""

CUT_S = 1.0
"""Time for open responses to say why they end, once the drain's time is up."""

IDLE_S = 2.0
"""A connection of a server that retires is closed once it has been idle for so long: a client that is about to use it
again does so within this, and reads in the answer that it was the last one."""

STOPPING = "the server is stopping"


class Gateway(ABC):
    """One protocol (or one family of them) over HTTP.

    Args:
        options: the gateway's own keys of its ``[gateways.NAME]`` table, as `Options`.
        client: the connection to the bus.
        pipelines: the pipelines to serve, by name; each passed `can_serve`.
        name: the table's name.
        callers: the deployment's ``[callers.NAME]`` tables: whose API keys are whose.
        state_dir: folder for what outlives the process; its own, made by whoever first writes there.
    """

    Options: ClassVar[type[msgspec.Struct]]
    """The gateway's own keys; refuses unknown ones."""

    def __init__(
        self,
        options: Any,
        client: BusClient,
        pipelines: Mapping[str, Pipeline],
        *,
        name: str = "gateway",
        callers: Mapping[str, CallerConfig] | None = None,
        state_dir: str = "",
        control: str = "",
        host: str = "",
    ) -> None:
        self.options = options
        self.client = client
        self.pipelines = dict(pipelines)
        self.name = name
        self.callers = dict(callers or {})
        self.state_dir = state_dir
        self.control = control
        """The socket file on which the deployment's supervisor takes orders (`omni_bus.runtime.control`)."""
        self.host = host
        """The address or name that it listens on."""
        self.draining = asyncio.Event()
        """Set once: open responses go on, new requests are refused, health says so, and sockets that wait for their
        clients close."""
        self.retiring = asyncio.Event()
        """Set once: a successor accepts on the same address, so sockets whose clients lose nothing by it may close."""

    @property
    def is_draining(self) -> bool:
        """Whether the gateway is about to stop."""
        return self.draining.is_set()

    @classmethod
    @abstractmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        """Whether the protocol can express this pipeline's inputs and outputs."""

    @classmethod
    def check(cls, options: Any) -> list[str]:
        """Return every reason why these options can't work, found without serving (a missing key file, say)."""
        return []

    @classmethod
    def is_guarded(cls, options: Any, callers: Mapping[str, CallerConfig]) -> bool:
        """Whether only those get in who have a key: of these options', or of the deployment's callers.

        A gateway that is not guarded listens off the loopback only in a deployment that is insecure, and says so.
        """
        return False

    @abstractmethod
    def app(self) -> web.Application:
        """Build the application: routes and middlewares."""

    @property
    def header_timeout_s(self) -> float:
        """A client may take so long to send a request's head."""
        return 20.0

    @property
    def keepalive_timeout_s(self) -> float:
        """An idle connection is closed after this."""
        return 75.0

    def refuse_head(self, status: HTTPStatus | int, message: str) -> web.Response:
        """Render the refusal of a request whose head could not be read."""
        return web.Response(status=int(status), text=message)

    async def before_answer(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Change the head of any answer before it is sent, those of streams and errors too."""

    async def idle(self) -> None:
        """Return when no work is left that no response waits for: jobs that outlive the request that made them."""

    def close(self) -> None:
        """Give everything back; called once, with no request left."""


class _Connection(web.RequestHandler):
    """aiohttp's connection, with five more rules.

    A head that does not come in time is answered with 408. A client that ends its side while a response is under way is
    gone, even if bytes for it wait in the buffer. Little is buffered for a slow reader. Heads that can't be parsed are
    refused in the protocol's own error shape. The server knows of each connection until it is lost.
    """

    __slots__ = ("_gateway", "_head_timer", "_open", "is_socket")

    def __init__(
        self, server: web.Server, gateway: Gateway, loop: asyncio.AbstractEventLoop, open_: OpenConnections
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=gateway.keepalive_timeout_s,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type] (that is how it is switched off)
        )
        self._gateway = gateway
        self._head_timer: asyncio.TimerHandle | None = None
        self._open = open_
        self.is_socket = False
        """It became a WebSocket."""

    @property
    def is_idle(self) -> bool:
        """No request is under way, not even a part of one."""
        is_waiting = self._waiter is not None and not self._waiter.done()
        return is_waiting and self._head_timer is None and not self._messages

    def close_if_idle(self) -> None:
        """Close it unless something is under way."""
        if self.is_idle:
            self.force_close()

    def close_after_request(self) -> None:
        """Take no further request. A WebSocket goes on: what its client says, its goodbye too, has to be heard."""
        if not self.is_socket:
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open.add(self)
        assert self.transport is not None
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):  # not a TCP socket
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # `_waiter` is pending exactly while no complete head has come: bytes that left it so are the start of one.
        is_head_open = bool(data) and self._waiter is not None and not self._waiter.done()
        if is_head_open and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._gateway.header_timeout_s, self._on_head_late)
        elif not is_head_open:
            self._drop_head_timer()

    def eof_received(self) -> None:
        if self._request_in_progress and self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._drop_head_timer()
        super().connection_lost(exc)
        self._open.discard(self)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):  # the client left while it was written to: no failure, and nobody to tell
            raise exc
        if status >= 500:
            self.log_exception("a request could not be handled", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun, an error can't be sent any more")
        first_line = (message or "the server failed").strip().splitlines()[0]
        response = self._gateway.refuse_head(status, first_line)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what aiohttp did not expect; a client's damaged body, met again while the rest is dropped, is no news."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _drop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_late(self) -> None:
        self._head_timer = None
        if self.transport is None or self._waiter is None or self._waiter.done():
            return
        message = f"the request's head did not come within {self._gateway.header_timeout_s:g} s"
        body = self._gateway.refuse_head(408, message).body
        assert isinstance(body, bytes)
        head = (
            "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.force_close()


class OpenConnections:
    """The connections of a server; `none` is set while there is none."""

    def __init__(self) -> None:
        self.all: set[_Connection] = set()
        self.none = asyncio.Event()
        self.none.set()

    def add(self, connection: _Connection) -> None:
        """One was accepted."""
        self.all.add(connection)
        self.none.clear()

    def discard(self, connection: _Connection) -> None:
        """One is closed."""
        self.all.discard(connection)
        if not self.all:
            self.none.set()


class GatewayServer:
    """Serves one gateway's application on sockets that are bound and listen already."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open = OpenConnections()
        self._is_retiring = False
        app = gateway.app()
        app.middlewares.insert(0, self._count)
        app.on_response_prepare.append(gateway.before_answer)
        app.on_response_prepare.append(self._say_last)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self._listeners: list[asyncio.Server] = []
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def start(self, sock: socket.socket) -> None:
        """Accept connections from `sock`, which becomes ours."""
        loop = asyncio.get_running_loop()
        if self._runner.server is None:
            await self._runner.setup()
        server = self._runner.server
        assert server is not None
        sock.setblocking(False)

        def connection() -> _Connection:
            return _Connection(server, self._gateway, loop, self._open)

        self._listeners.append(await loop.create_server(connection, sock=sock))

    async def retire(self) -> None:
        """Leave the socket to others and serve what is open until no connection is left; takes as long as that takes.

        Nobody is cut off or refused: also a request that comes on an open connection is served. Its answer says that it
        is the connection's last (RFC 9112, section 9.6).
        """
        self._is_retiring = True
        self._gateway.retiring.set()
        for listener in self._listeners:
            listener.close()
        await asyncio.sleep(0)  # connections accepted just now get their first callback
        loop = asyncio.get_running_loop()
        for connection in self._open.all:
            loop.call_later(IDLE_S, connection.close_if_idle)
        await self._open.none.wait()
        await self._gateway.idle()

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting, let open responses finish, end what is left, close every connection.

        Args:
            timeout_s: what has not finished by then is ended with an error that says why.

        Returns:
            Whether everything finished by itself.
        """
        self._gateway.draining.set()
        for listener in self._listeners:
            listener.close()
        server = self._runner.server
        if server is None:
            return True
        await asyncio.sleep(0)  # connections accepted just now get their first callback
        for connection in self._open.all:
            connection.close_after_request()
        ends_at = asyncio.get_running_loop().time() + timeout_s
        is_clean = await self._idle_within(timeout_s)
        if not is_clean:
            for request in list(self._gateway.client.requests.values()):
                request.cancel(STOPPING)
            await self._idle_within(CUT_S)
        # Handlers are done; what is left are bytes on their way to slow readers.
        await server.shutdown(max(CUT_S, ends_at - asyncio.get_running_loop().time()))
        await self._runner.cleanup()
        return is_clean

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
                await self._gateway.idle()
        except TimeoutError:
            return False
        return True

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self._num_open += 1
        self._is_idle.clear()
        try:
            return await handler(request)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_idle.set()
            if self._is_retiring and isinstance(request.protocol, _Connection):
                # Its head may have been sent before, and so have said nothing of an end.
                asyncio.get_running_loop().call_later(IDLE_S, request.protocol.close_if_idle)

    async def _say_last(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the client, in a head that is about to be sent, that the connection ends with this answer."""
        if isinstance(response, web.WebSocketResponse):
            if isinstance(request.protocol, _Connection):
                request.protocol.is_socket = True
        elif self._is_retiring:
            response.headers["Connection"] = "close"
            response.force_close()
