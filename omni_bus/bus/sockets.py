"""The only place where sockets are made and their options set: addresses, limits, heartbeats, keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import zmq

from omni_bus.errors import BadInput, StartFailed

if TYPE_CHECKING:
    from omni_bus.bus.curve import Curve

MAX_IPC_PATH_BYTES = 107
"""``sun_path`` in ``sockaddr_un`` has 108 bytes, the last one NUL (unix(7))."""

ZAP_DOMAIN = b"omni-bus"
"""Named, so that ZeroMQ refuses a connection which it can't ask anybody about (ZMQ_ZAP_ENFORCE_DOMAIN)."""

RECONNECT_MS = 2000
"""Longest pause between two attempts to connect, up to which it doubles from 50 ms."""

RECONNECT_LOCAL_MS = 200
"""Where the kernel says at once that nobody listens. A coordinator that is started again within a second or two would
else be alone for as long after that, and may be dead again before anybody has found it."""

WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "[::]", "::"})


class SocketLimits(msgspec.Struct, frozen=True):
    """What one socket may hold.

    The high-water marks count messages per peer inside ZeroMQ. The bulk is bounded by flow control above (credit in
    bytes); these catch a peer that doesn't read at all. `receive_hwm` is generous because ZeroMQ (4.3) loses what the
    kernel still holds when a sender closes while the receiver is at its mark. `max_message_bytes` is the longest
    single part: a peer that announces a longer one is disconnected before a byte of it is stored.
    """

    send_hwm: int = 1000
    receive_hwm: int = 10_000
    max_message_bytes: int = 1 << 30


DEFAULT_SOCKET_LIMITS = SocketLimits()


class DealerKeys(NamedTuple):
    """Our own pair, and the public key that the other end must have."""

    public: bytes
    secret: bytes
    server: bytes


def check_endpoint(endpoint: str) -> None:
    """Refuse an address that no socket of ours can use.

    Raises:
        BadInput: neither ``ipc://PATH`` nor ``tcp://HOST:PORT``, or a path longer than the system allows.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not rest:
        raise BadInput(f"endpoint '{endpoint}' is neither ipc://PATH nor tcp://HOST:PORT", field="endpoint")
    if scheme == "ipc" and len(rest.encode()) > MAX_IPC_PATH_BYTES:
        raise BadInput(
            f"ipc path '{rest}' has {len(rest.encode())} bytes, the system allows {MAX_IPC_PATH_BYTES}: "
            "use a shorter directory",
            field="endpoint",
        )
    host, colon, port = rest.rpartition(":")
    if scheme == "tcp" and not (host and colon and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise BadInput(f"endpoint '{endpoint}' needs HOST:PORT with a port from 0 to 65535", field="endpoint")


def make_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, limits: SocketLimits, curve: Curve | None = None
) -> zmq.Socket[bytes]:
    """Return a ROUTER for `bind`.

    With keys, which only a TCP socket uses, somebody in the context answers who may connect (`Authenticator`).

    Raises:
        BadInput: the address is malformed.
    """
    check_endpoint(endpoint)
    router = context.socket(zmq.ROUTER)
    _set_options(router, endpoint, limits)
    # A peer that reconnects before its broken connection is noticed must not be locked out by its own old self.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    # Every actor of a deployment may connect in the same moment.
    router.setsockopt(zmq.BACKLOG, 1024)
    if curve is not None and is_tcp(endpoint):
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return router


def bind(router: zmq.Socket[bytes], endpoint: str) -> None:
    """Listen; closes the socket if that can't be.

    Raises:
        StartFailed: the address can't be bound (in use, no such directory or interface, no permission).
    """
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close(0)
        raise StartFailed(f"can't listen on {endpoint}: {zmq.strerror(error.errno or 0)}", field="endpoint") from error


def make_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    routing_id: bytes,
    endpoint: str,
    limits: SocketLimits,
    keys: DealerKeys | None = None,
) -> zmq.Socket[bytes]:
    """Return a DEALER for `connect` that introduces itself as `routing_id`; only a TCP socket uses the keys.

    Raises:
        BadInput: the address is malformed.
    """
    check_endpoint(endpoint)
    dealer = context.socket(zmq.DEALER)
    _set_options(dealer, endpoint, limits)
    dealer.setsockopt(zmq.ROUTING_ID, routing_id)
    # Nobody answers on this socket; whoever tries anyway fills one slot.
    dealer.setsockopt(zmq.RCVHWM, 1)
    if keys is not None and is_tcp(endpoint):
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    return dealer


def connect(dealer: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect in the background; closes the socket if that can't be.

    Raises:
        BadInput: the address has no meaning on this host.
    """
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        dealer.close(0)
        raise BadInput(f"can't connect to {endpoint}: {zmq.strerror(error.errno or 0)}", field="endpoint") from error


def is_tcp(endpoint: str) -> bool:
    """Whether the address is one of TCP."""
    return endpoint.startswith("tcp://")


def descriptor_of(socket: zmq.Socket[bytes]) -> int:
    """Return the descriptor that becomes readable when ZeroMQ's I/O thread has something to tell the socket."""
    return cast("int", socket.getsockopt(zmq.FD))


def _set_options(socket: zmq.Socket[bytes], endpoint: str, limits: SocketLimits) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, limits.send_hwm)
    socket.setsockopt(zmq.RCVHWM, limits.receive_hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS if is_tcp(endpoint) else RECONNECT_LOCAL_MS)
    if not is_tcp(endpoint):
        return  # the kernel reports a dead process at the other end of a unix socket at once; a paused one is not dead
    # Only where it is meant: with it on, ZeroMQ may take a name's IPv6 address where the other end listens on IPv4.
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    # A host that vanished says nothing. The heartbeat runs on ZeroMQ's I/O thread, so a busy actor still answers; 30 s
    # is longer than a pause for a debugger's snapshot or a stalled disk, and shorter than TCP's own minutes.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    # Who drops packets would else be waited for for minutes. A handshake needs the other end's loop, which a model that
    # loads may hold up.
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
