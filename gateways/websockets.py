"""What WebSocket routes share: the upgrade, and refusals in the protocol's own form.

Before the upgrade a refusal is an HTTP response like any other: the handler raises it. After `upgrade` the edge of
`HttpGateway` closes the socket with the code of what was raised and its message as the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aiohttp import WSCloseCode, web

from gateways.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

SOCKET = web.RequestKey("socket", web.WebSocketResponse)
"""The request's socket, once it is open."""

KEY_PROTOCOL = "openai-insecure-api-key."
"""What begins the subprotocol by which browsers, which can't set headers, send a key (OpenAI's Realtime API)."""

HANDSHAKE = (
    "Connection",
    "Upgrade",
    "Sec-WebSocket-Version",
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Protocol",
    "Sec-WebSocket-Extensions",
)

MAX_REASON_BYTES = 123
"""Of a close frame (RFC 6455, sections 5.5 and 5.5.1: 125 bytes, two of them the code)."""


class Closing(NamedTuple):
    """How a socket is closed."""

    code: int
    reason: str


def closing_of(problem: Problem) -> Closing:
    """Return the close code and reason of a refusal.

    Codes are those of RFC 6455, section 7.4.1, and of IANA's "WebSocket Close Code Number Registry": 1008 (policy
    violation) for what the caller must change, keys and quotas too; 1009 (message too big); 1013 (try again later) for
    missing capacity and for time limits that it caused; 1011 (internal error) for what is the server's fault.
    """
    match problem.status:
        case 413:
            code = WSCloseCode.MESSAGE_TOO_BIG
        case 503 | 504:
            code = WSCloseCode.TRY_AGAIN_LATER
        case status if status >= 500:
            code = WSCloseCode.INTERNAL_ERROR
        case _:
            code = WSCloseCode.POLICY_VIOLATION
    # A cut through the middle of a character would be no UTF-8, which a client must answer by failing the connection.
    reason = problem.message.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    return Closing(int(code), reason)


async def close(socket: web.WebSocketResponse, problem: Problem) -> None:
    """Close an open socket with a refusal; harmless on a closed one."""
    code, reason = closing_of(problem)
    await socket.close(code=code, message=reason.encode())


def is_upgrade(request: web.BaseRequest) -> bool:
    """Whether a request asks for a WebSocket."""
    return request.headers.get("Upgrade", "").strip().lower() == "websocket"


def offered(request: web.BaseRequest) -> list[str]:
    """Return the subprotocols that the client offers."""
    lines = request.headers.getall("Sec-WebSocket-Protocol", [])
    return [protocol.strip() for line in lines for protocol in line.split(",") if protocol.strip()]


async def upgrade(
    request: web.Request, *, max_message_bytes: int, protocols: Sequence[str] = (), may_compress: bool = True
) -> web.WebSocketResponse:
    """Open the socket; what the handler raises from now on closes it.

    Args:
        request: checked and authorised.
        max_message_bytes: a longer message closes the socket with 1009.
        protocols: subprotocols that are spoken, the best first; one that the client offers too is agreed on.
        may_compress: messages are compressed if the client offers it (RFC 7692), which sound only pays for.

    Raises:
        Problem: 400, the handshake is not one.
    """
    if not is_upgrade(request):
        came = request.headers.get("Upgrade", "")[:40] or "none"
        raise Problem(400, f"Upgrade: {came} came (allowed: websocket)", param="Upgrade")
    for name in HANDSHAKE:
        if not request.headers.get(name, "").isascii():  # aiohttp can neither read nor repeat it
            raise Problem(400, f"{name}: bytes beyond ASCII came (allowed: what RFC 6455 says)")
    socket = web.WebSocketResponse(protocols=protocols, max_msg_size=max_message_bytes, compress=may_compress)
    await socket.prepare(request)
    request[SOCKET] = socket
    return socket
