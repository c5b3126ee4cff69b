"""The one ROUTER of an actor: everything that anybody sends to it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import zmq

from omni_bus.bus.authenticator import name_of
from omni_bus.bus.curve import DEPLOYMENT, may_speak_as
from omni_bus.bus.sockets import (
    DEFAULT_SOCKET_LIMITS,
    WILDCARD_HOSTS,
    SocketLimits,
    bind,
    descriptor_of,
    is_tcp,
    make_router,
)
from omni_bus.errors import BadFrame, BadInput, StartFailed
from omni_bus.ids import Sender, parse_sender
from omni_bus.wire.codec import MAX_PARTS, BadChunk, Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omni_bus.bus.authenticator import Authenticator
    from omni_bus.wire.codec import DeviceReference, Reference
    from omni_bus.wire.payloads import Blob

    Deliver = Callable[[Sender, Any], None]
    Fetch = Callable[[Sender, Reference | DeviceReference], memoryview | Blob]
    Part = bytes | memoryview

_log = logging.getLogger(__name__)

COPY_BELOW_BYTES = 8192
"""Blobs shorter than this are copied out of the message, longer ones viewed in place.

ZeroMQ reads from a connection in 8 KiB buffers and lets short messages share one, so a view of a short blob would pin
all of it; longer messages get memory of their own. Measured on loopback TCP, copying costs 0.1 us more than viewing at
4 KiB, 2 us at 64 KiB, 35 us at 1 MiB.
"""

MAX_KNOWN_PEERS = 4096
"""Routing ids remembered, parsed ones and those of bad peers each: a stranger can invent any number of them."""

MAX_BATCH_S = 0.001
"""A frame that makes its receiver send large tensors takes as long as 128 words: timers and other descriptors wait no
longer for either (audio beside video: 50 ms without this limit, `scripts/bench_link.py`)."""

_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class InboxStatistics(NamedTuple):
    """What came since the start: messages delivered, and messages dropped in all and by routing id."""

    delivered: int
    bad: int
    bad_by_peer: dict[bytes, int]


class Inbox:
    """Receives, decodes and delivers; never sends.

    The socket's descriptor wakes the loop, and each wake-up takes messages without blocking until there are none,
    `max_batch` of them were delivered or `MAX_BATCH_S` is over; then the loop gets a turn before the rest. `deliver`
    runs on the loop and must not block. If it raises, the loop's exception handler is told and the next message is
    delivered.

    Messages that are no frames, or come from a socket that is no actor's, are counted, logged once per peer and
    dropped. A chunk whose payload can't be read is counted and logged too, but delivered with `Unreadable` in its
    place, so that its request fails.

    On a TCP socket with keys, messages of an actor come over a connection of its own key only (`may_speak_as`).

    Args:
        context: where the socket is made; its owner terminates it.
        endpoint: ``ipc://PATH`` or ``tcp://ADDRESS:PORT``; port 0 takes a free one.
        deliver: called with each frame and who sent it.
        handlers: called instead of `deliver` with frames of these types.
        fetch: views what a sender's reference means; raises `ValueError`. Without it a reference is no frame.
        advertise_host: what others connect to when `endpoint` listens on all interfaces.
        limits: of the socket.
        max_batch: messages per turn of the loop.
        authenticator: who may connect, if `endpoint` is an address of TCP; without it, everybody may.

    Raises:
        BadInput: an address that is malformed, too long, or that others could not connect to.
        StartFailed: the address can't be bound.
        RuntimeError: no running loop.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        deliver: Deliver,
        *,
        handlers: Mapping[type, Deliver] = MappingProxyType({}),
        fetch: Fetch | None = None,
        advertise_host: str = "",
        limits: SocketLimits = DEFAULT_SOCKET_LIMITS,
        max_batch: int = 128,
        authenticator: Authenticator | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._max_batch = max_batch
        self._handlers = handlers
        self._fetch = fetch
        self._sender: Sender | None = None
        self._decode = Codec(fetch=None if fetch is None else self._fetch_for_sender).decode
        self._senders: dict[bytes, Sender] = {}
        self._users: dict[bytes, str] = {}
        """Who last spoke under a routing id, and may."""
        self._num_delivered = 0
        self._num_bad = 0
        self._bad_by_peer: Counter[bytes] = Counter()
        self._is_draining = False
        if not advertise_host and is_tcp(endpoint):
            _refuse_wildcard(endpoint)
        self._authenticator = authenticator if is_tcp(endpoint) else None
        curve = None if self._authenticator is None else self._authenticator.curve
        self._socket = make_router(context, endpoint, limits, curve)
        if self._authenticator is not None:
            self._authenticator.watch(self._socket)
        try:
            bind(self._socket, endpoint)
        except StartFailed:
            if self._authenticator is not None:
                self._authenticator.unwatch()
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = _connectable(bound, advertise_host)
        self._recv = self._socket.recv
        self.handle = self._decode_and_deliver
        """Takes each message; `omni_bus.bus.faulty` puts itself before it."""
        # pyzmq's own goes through an enum
        self._get = cast("Callable[[int], int]", super(zmq.Socket, self._socket).get)
        self._is_open = True
        self._descriptor = descriptor_of(self._socket)
        self._loop.add_reader(self._descriptor, self._on_readable)
        # The descriptor tells of changes only: what came before the loop watched it must be looked for.
        self._is_draining = True
        self._loop.call_soon(self._drain)

    def statistics(self) -> InboxStatistics:
        """Return the counts so far."""
        return InboxStatistics(self._num_delivered, self._num_bad, dict(self._bad_by_peer))

    def close(self) -> None:
        """Stop listening at once; what was not delivered is lost. May be called again, and from `deliver`."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._descriptor)
        if self._authenticator is not None:
            self._authenticator.unwatch()
        self._socket.close(0)

    def _on_readable(self) -> None:
        if not self._is_draining:
            self._drain()

    def _drain(self) -> None:
        """Deliver up to a batch.

        A receive that would block has made ZeroMQ look at all that its I/O thread told it, and has reset the
        descriptor; after it, the next message makes the descriptor readable again. Stopping earlier without coming
        back by ourselves would lose that edge. Asking for the socket's events does the same; after the first message,
        which often is the only one, that takes 2 us where the exception of a receive takes 5.
        """
        recv = self._recv
        self._is_draining = False
        enough_at = monotonic() + MAX_BATCH_S
        for i in range(self._max_batch):
            if not self._is_open or (i == 1 and not self._get(_EVENTS) & _POLLIN):
                return
            try:
                routing_id = recv(_NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:
                self.close()  # the context is gone; without this the descriptor would wake the loop for ever
                raise
            self._take(routing_id)
            if monotonic() > enough_at:
                break
        if self._is_open:
            self._is_draining = True
            self._loop.call_soon(self._drain)

    def _take(self, routing_id: bytes) -> None:
        """Receive the rest of a message and handle it.

        It is all there: ZeroMQ hands over whole messages, and a ROUTER's have at least two parts.
        """
        # As a message object, which knows whether more follows: asking the socket goes through an enum and is slower.
        header = self._recv(_NOBLOCK, copy=False)
        parts: list[Part] = [header.bytes]
        if header.more:
            self._take_blobs(parts)
        if self._authenticator is None or self._is_allowed(routing_id, header):
            self.handle(routing_id, parts)

    def _is_allowed(self, routing_id: bytes, header: zmq.Frame) -> bool:
        """Judge each message: the next one of the same routing id may come over another connection."""
        user = cast("str", header.get(b"User-Id"))
        if user != DEPLOYMENT and self._authenticator is not None:
            if not self._authenticator.may_send(user, cast("int", header.get(zmq.SRCFD))):
                self._drop(routing_id, f"the key of '{name_of(user)}' was removed")
                return False
            user = name_of(user)
        if self._users.get(routing_id) == user:
            return True
        sender = self._senders.get(routing_id) or self._learn(routing_id)
        if sender is None:
            return True
        if may_speak_as(user, sender.actor):
            self._users[routing_id] = user
            return True
        self._drop(routing_id, f"a connection of '{user}' may not speak for it")
        return False

    def _decode_and_deliver(self, routing_id: bytes, parts: list[Part]) -> None:
        sender = self._senders.get(routing_id) or self._learn(routing_id)
        if sender is None:
            self._drop(routing_id, "the routing id is no actor's")
            return
        self._sender = sender
        try:
            frame = self._decode(parts)
        except BadFrame as error:
            self._drop(routing_id, error.message)
            if not isinstance(error, BadChunk):
                return
            frame = error.chunk
        self._num_delivered += 1
        try:
            self._handlers.get(type(frame), self._deliver)(sender, frame)
        except Exception as error:  # noqa: BLE001 (one message must not stop the next; the loop's handler decides)
            self._loop.call_exception_handler(
                {"message": f"delivering a {type(frame).__name__} from {sender.actor} failed", "exception": error}
            )

    def _fetch_for_sender(self, reference: Reference | DeviceReference) -> memoryview | Blob:
        assert self._fetch is not None
        assert self._sender is not None
        return self._fetch(self._sender, reference)

    def _take_blobs(self, parts: list[Part]) -> None:
        has_more = True
        while has_more:
            message = self._recv(_NOBLOCK, copy=False)
            has_more = message.more
            if len(parts) > MAX_PARTS:
                continue  # enough for the codec to refuse it
            parts.append(message.bytes if len(message) < COPY_BELOW_BYTES else message.buffer.toreadonly())

    def _learn(self, routing_id: bytes) -> Sender | None:
        sender = parse_sender(routing_id)
        if sender is not None:
            if len(self._senders) >= MAX_KNOWN_PEERS:
                self._senders.clear()
                self._users.clear()
            self._senders[routing_id] = sender
        return sender

    def _drop(self, routing_id: bytes, reason: str) -> None:
        self._num_bad += 1
        known = self._bad_by_peer
        if routing_id not in known:
            if len(known) >= MAX_KNOWN_PEERS:
                return
            _log.warning("dropped a message from %r: %s (further ones are only counted)", routing_id, reason)
        known[routing_id] += 1


def _refuse_wildcard(endpoint: str) -> None:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if host in WILDCARD_HOSTS:
        raise BadInput(
            f"endpoint '{endpoint}' listens on all interfaces; name the host that others connect to (advertise_host)",
            field="endpoint",
        )


def _connectable(bound: str, advertise_host: str) -> str:
    if not advertise_host or not bound.startswith("tcp://"):
        return bound
    return f"tcp://{advertise_host}:{bound.rpartition(':')[2]}"
