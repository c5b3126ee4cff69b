"""Who may connect to this process: answers ZeroMQ's question at each handshake, and tells the operator of refused ones.

ZeroMQ asks over ZAP (its RFC 27): a request has the parts version, request id, domain, address, identity, mechanism and
credentials, the reply version, request id, status, text, user id and metadata. Whoever fails before that question, for
want of a key or with a wrong one of ours, shows up in the inbox's monitor.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

import zmq

from omni_bus.bus.curve import DEPLOYMENT
from omni_bus.bus.monitor import MECHANISM_MISMATCH, Monitor
from omni_bus.bus.reader import Reader
from omni_bus.bus.sockets import ZAP_DOMAIN

if TYPE_CHECKING:
    from omni_bus.bus.curve import Curve

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"

MAX_ADDRESSES_LOGGED = 1000
"""Addresses that are named in the log, once each; a stranger may have any number of them."""

UNKNOWN = "an address that was gone before it could be asked for"

_SEPARATOR = " "
"""Between name and key in the user id that ZeroMQ gives each message of a client."""

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Authenticator:
    """Answers for all sockets of a context; made before the first of them is bound.

    Args:
        context: of the process's sockets.
        curve: the keys of the sockets, and whose may connect.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> None:
        self.curve = curve
        self._addresses: dict[int, str] = {}
        self._connections: dict[int, tuple[str, object]] = {}
        """Those of clients that have sent something: user id and address, by descriptor."""
        self._failure = ""
        self._logged: set[str] = set()
        self.num_refused = 0
        self._monitor: Monitor | None = None
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._reader = Reader(self._socket, self._answer)

    def watch(self, router: zmq.Socket[bytes]) -> None:
        """Tell of handshakes that fail at this socket, which is not bound yet."""
        self._monitor = Monitor(router, int(_EVENTS), self._on_event)

    def unwatch(self) -> None:
        """Forget the socket, which is about to be closed."""
        if self._monitor is not None:
            self._monitor.close()

    def may_send(self, user_id: str, descriptor: int) -> bool:
        """Whether a message counts that came over a connection; call it for each one of a client.

        Args:
            user_id: of the message.
            descriptor: of the connection, which is closed if its key was removed.
        """
        if self._connections.get(descriptor, ("", None))[0] != user_id:
            self._connections[descriptor] = user_id, _far_end(descriptor)
        if self._may_stay(user_id):
            return True
        self._cut(descriptor)
        return False

    def recheck(self) -> None:
        """Close the connections of clients whose key was removed or replaced; call it when the folder has changed."""
        self.curve.refresh()
        for descriptor, (user_id, _) in list(self._connections.items()):
            if not self._may_stay(user_id):
                self._cut(descriptor)

    def _may_stay(self, user_id: str) -> bool:
        user, _, key = user_id.partition(_SEPARATOR)
        return self.curve.may_stay(user, bytes.fromhex(key))

    def _cut(self, descriptor: int) -> None:
        """End a connection: ZeroMQ sees the end of its stream, and the other end has to prove its key anew."""
        user_id, far_end = self._connections.pop(descriptor)
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                # ZeroMQ may have closed it meanwhile, and its number may be another one's.
                if far_end is not None and connection.getpeername() == far_end:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        logger.warning("cut a connection of '%s': its key was removed", name_of(user_id))

    def close(self) -> None:
        """Answer nothing any more; sockets of the context that still listen let nobody in."""
        self.unwatch()
        self._reader.close()
        self._socket.close(0)

    def _answer(self, parts: list[bytes]) -> None:
        version, request, domain, address, _, mechanism, *credentials = parts
        user = None
        if (version, domain, mechanism, len(credentials)) == (ZAP_VERSION, ZAP_DOMAIN, b"CURVE", 1):
            user = self.curve.user_of(credentials[0])
        status, text = (b"200", b"OK") if user is not None else (b"400", b"this key may not connect")
        user_id = user if user in (None, DEPLOYMENT) else f"{user}{_SEPARATOR}{credentials[0].hex()}"
        self._socket.send_multipart([ZAP_VERSION, request, status, text, (user_id or "").encode(), b""])
        if user is None:
            self._refused(address.decode(errors="replace"), "its key is not allowed")

    def _on_event(self, event: int, value: int, endpoint: bytes) -> None:
        """Follow connections by their descriptors, which ZeroMQ names; failure and end of one come in a row."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._addresses[value] = _peer_address(value, endpoint)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._failure = "it has no key" if value == MECHANISM_MISMATCH else "it has no key of this deployment"
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # Who wants no keys may hang up before all of its greeting is here.
                self._failure = "it left before it had shown a key"
            case _:
                address = self._addresses.pop(value, UNKNOWN)
                self._connections.pop(value, None)
                if self._failure:
                    self._refused(address, self._failure)
                self._failure = ""

    def _refused(self, address: str, reason: str) -> None:
        self.num_refused += 1
        if address not in self._logged and len(self._logged) < MAX_ADDRESSES_LOGGED:
            self._logged.add(address)
            logger.warning("refused a connection from %s: %s (further ones are only counted)", address, reason)


def name_of(user_id: str) -> str:
    """Return whose connection a message with this user id came over (`Curve.user_of`)."""
    return user_id.partition(_SEPARATOR)[0]


def _far_end(descriptor: int) -> object:
    """Return the address at the other end of a connection; None if it is gone."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return connection.getpeername()
    except OSError:
        return None


def _peer_address(descriptor: int, endpoint: bytes) -> str:
    """Return the address at the other end of a connection to `endpoint`.

    ZeroMQ's I/O thread may have closed it meanwhile, and its number may be another one's.
    """
    port = int(endpoint.rpartition(b":")[2])
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            is_ours = connection.getsockname()[1] == port
            return connection.getpeername()[0] if is_ours else UNKNOWN
    except (OSError, IndexError):
        return UNKNOWN
