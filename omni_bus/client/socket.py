"""A WebSocket to a gateway: JSON events as text, and in some protocols sound as binary messages.

There is no queue here. What the caller does not take stays in aiohttp's buffer of 128 KiB, then in the kernel's, and
then the server waits: a slow reader slows its own connection and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import WSMsgType
from yarl import URL

from omni_bus.client.failures import ABNORMAL, ConnectFailed, ConnectionLost
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Twice what our gateways take; a longer message ends the connection with 1009."""

CLOSE_S = 2.0
"""The server may take so long to say goodbye."""

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}

_CLOSED = 1000


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client waits.

    Args:
        open_s: for the connection and the server's first event.
        silence_s: for a message, before the server is asked for a sign of life, and again so long for that.
    """

    open_s: float = 30.0
    silence_s: float = 30.0


PATIENCE = Patience()


class EventSocket:
    """An open connection; see `open_socket`."""

    def __init__(
        self, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, silence_s: float, alive: str | None
    ) -> None:
        self._http = http
        self._socket = socket
        self._silence_s = silence_s
        self._alive = alive
        self._reason = ""
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """This side is done with it."""
        return self._is_closed

    async def send(self, event: Mapping[str, Any]) -> None:
        """Send an event; waits while the server takes nothing.

        Raises:
            ConnectionLost: the connection is over; nothing of the event was sent.
        """
        await self._send(msgspec.json.encode(event).decode())

    async def send_bytes(self, data: bytes) -> None:
        """Send a binary message; waits and raises as `send` does."""
        try:
            await self._socket.send_bytes(data)
        except ConnectionError:
            raise self._lost() from None

    async def receive(self) -> str | bytes | None:
        """Return the next message; None once the connection has ended as it should (1000).

        Raises:
            ConnectionLost: it ended otherwise, or the server gives no sign of life.
        """
        is_asked = False
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await self._socket.receive()
                    if message.type is WSMsgType.PING:
                        await self._socket.pong(message.data)
            except TimeoutError:
                if is_asked:
                    await self.close()
                    raise ConnectionLost(f"nothing came for {2 * self._silence_s:g} s") from None
                is_asked = True
                await self._ask()
                continue
            match message.type:
                case WSMsgType.TEXT | WSMsgType.BINARY:
                    return message.data
                case WSMsgType.PING | WSMsgType.PONG:
                    is_asked = False
                case WSMsgType.CLOSE:
                    self._reason = message.extra or ""
                    return self._ended()
                case _:
                    return self._ended()

    async def close(self) -> None:
        """Say goodbye; what was not received is dropped. Harmless when closed."""
        self._is_closed = True
        try:
            await self._socket.close()
        finally:
            await self._http.close()

    async def _ask(self) -> None:
        """Ask for a sign of life; on a connection that is over, the next `receive` says so."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(self._silence_s):
                await (self._socket.ping() if self._alive is None else self._socket.send_str(self._alive))

    async def _send(self, text: str) -> None:
        try:
            await self._socket.send_str(text)
        except ConnectionError:
            raise self._lost() from None

    def _ended(self) -> None:
        if not self._is_closed and self._socket.close_code != _CLOSED:
            raise self._lost()

    def _lost(self) -> ConnectionLost:
        code = self._socket.close_code or ABNORMAL
        why = f": {self._reason}" if self._reason else ""
        return ConnectionLost(f"the connection ended with close code {code}{why}", close_code=code, reason=self._reason)


async def open_socket(
    url: URL, api_key: str | None, patience: Patience, *, alive: Mapping[str, Any] | None = None
) -> EventSocket:
    """Connect.

    Args:
        url: from `address`.
        api_key: sent as a bearer token.
        patience: how long to wait.
        alive: the event that asks the server for a sign of life; None sends a ping.

    Raises:
        ConnectFailed: nobody answers there in time, or not with a WebSocket.
        BadInput: no header can hold the key.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise BadInput("api_key: it has characters that no header holds (allowed: printable ASCII)", field="api_key")
    http = aiohttp.ClientSession(headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    try:
        async with asyncio.timeout(patience.open_s):
            # Pings are answered above: whoever reads slowly would else be taken for dead.
            socket = await http.ws_connect(
                url,
                autoping=False,
                max_msg_size=MAX_MESSAGE_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),  # pyright: ignore[reportCallIssue] (attrs without types)
            )
    except BaseException as error:
        await http.close()
        if isinstance(error, aiohttp.WSServerHandshakeError):
            hint = " (it wants a key)" if error.status in (401, 403) else ""
            raise ConnectFailed(
                f"{url}: {error.status} came instead of a WebSocket{hint}", status=error.status
            ) from error
        if isinstance(error, TimeoutError):
            raise ConnectFailed(f"{url}: nobody answered within {patience.open_s:g} s") from error
        if isinstance(error, aiohttp.ClientError | OSError):
            raise ConnectFailed(f"{url}: {error or type(error).__name__}") from error
        raise
    return EventSocket(http, socket, patience.silence_s, None if alive is None else msgspec.json.encode(alive).decode())


def address(url: str, path: str, **query: str | None) -> URL:
    """Return where a WebSocket is.

    Args:
        url: of the server, ``http://HOST:PORT`` with or without ``/v1``, or of the WebSocket itself.
        path: the WebSocket's, ``/v1/…``.
        query: added to the address's own; None is left out.

    Raises:
        BadInput: it is no address.
    """
    try:
        found = URL(url)
    except ValueError:
        found = URL()
    if found.scheme not in SCHEMES or not found.host:
        raise BadInput(f"url: {url!r} came (allowed: http://HOST:PORT, https, ws or wss)", field="url")
    found = found.with_scheme(SCHEMES[found.scheme])
    if found.path.rstrip("/") in ("", "/v1"):
        found = found.with_path(path).with_query(found.query)
    return found.update_query({name: value for name, value in query.items() if value is not None})
