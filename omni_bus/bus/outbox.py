"""DEALERs opened when first needed, one per peer: everything that an actor sends."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import zmq

from omni_bus.bus.monitor import MECHANISM_MISMATCH, Monitor
from omni_bus.bus.sockets import (
    DEFAULT_SOCKET_LIMITS,
    DealerKeys,
    SocketLimits,
    connect,
    descriptor_of,
    is_tcp,
    make_dealer,
)
from omni_bus.errors import BadInput, InputTooLarge, OmniBusError
from omni_bus.ids import MAX_ACTOR_NAME_BYTES
from omni_bus.wire.codec import Codec, DeviceReference, Reference
from omni_bus.wire.device import DeviceBlob
from omni_bus.wire.frames import Chunk, Close, Confirm, Offer, Open
from omni_bus.wire.payloads import Hidden, Image, Latents, Media, Record, Tensor, Text, Video

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_bus.bus.arena import Arena
    from omni_bus.bus.cuda_ipc import CudaArena
    from omni_bus.bus.curve import Curve
    from omni_bus.ids import Peer, Sender
    from omni_bus.wire.frames import AnyFrame
    from omni_bus.wire.payloads import Blob

    Lent = Reference | DeviceReference

    Part = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)

COPY_BELOW_BYTES = 32768
"""Blobs shorter than this are copied into ZeroMQ, longer ones lent to it.

Lending costs a fixed 3 to 4 us (bookkeeping of the loan, and its return through a thread of pyzmq's). Measured send
plus receive on loopback TCP: equal between 16 and 32 KiB (20 us), 37 against 29 us at 64 KiB, 470 against 130 us at 1
MiB.
"""

MAX_FLUSH = 256
"""Frames that one turn of the loop moves from a backlog to ZeroMQ."""

BULKY_TYPES = frozenset({Tensor, Image, Video, Hidden, Latents, Media, Record})
BULKY_KINDS = frozenset(str(cls.__struct_config__.tag) for cls in BULKY_TYPES)
"""Edges of these kinds have a socket of their own to each peer.

Messages queue whole in a socket. On one, 20 ms of sound waited for the 8 MiB video frames before it: 19 ms (ipc) and 14
ms (tcp on loopback) more at the 99th percentile, against 2 and 4 ms on two (`scripts/bench_link.py`).
"""

_WATCHED = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

MAX_FAILURES = 5
"""Attempts to connect that may fail before a peer counts as unreachable; they take a second and a half if refused."""

BREAKS_OFF = f"it wants keys, it seems: it broke {MAX_FAILURES} connections off at once"
"""Who wants keys and is busy reads our whole greeting before it sends its own, and closes without having said so."""

_NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLOUT = int(zmq.POLLOUT)


class BacklogLimits(NamedTuple):
    """What may wait for one peer outside ZeroMQ. A single frame longer than `max_bytes` may wait alone.

    A peer that lives must not count as stuck for what its own credit allows: all windows of 10,000 requests are 160,000
    chunks of text, which take 20 MB here.
    """

    max_frames: int = 200_000
    max_bytes: int = 256 << 20


DEFAULT_BACKLOG_LIMITS = BacklogLimits()


class OutboxStatistics(NamedTuple):
    """Peers with a lane, stuck ones among them; frames handed to ZeroMQ, waiting, and dropped; bytes waiting."""

    peers: int
    stuck: int
    handed_over: int
    waiting: int
    waiting_bytes: int
    dropped: int


class _Sharing(enum.Enum):
    """Whether a peer reads our arena."""

    UNASKED = enum.auto()
    OFFERED = enum.auto()
    MAPPED = enum.auto()
    NEVER = enum.auto()


class _Waiting(NamedTuple):
    """An encoded frame in a backlog, its length, and what it refers to in shared or device memory.

    A frame that is but a header waits as its bytes, which the garbage collector has no interest in: with an object for
    each, 100,000 waiting frames took three quarters of a sender's time (`scripts/results/profile_bus.txt`).
    """

    parts: Sequence[Part]
    num_bytes: int
    lent: tuple[Lent, ...]


class _Lane:
    """The way to one peer: a socket (None if it can't be opened) and the encoded frames that it would not take yet."""

    __slots__ = (
        "backlog",
        "backlog_bytes",
        "descriptor",
        "is_connected",
        "is_flushing",
        "is_stuck",
        "monitor",
        "num_broken_off",
        "num_failures",
        "peer",
        "reader",
        "send",
        "sharing",
        "socket",
    )

    def __init__(self, peer: Peer, socket: zmq.Socket[bytes] | None) -> None:
        self.peer = peer
        self.reader = peer.sender
        self.sharing = _Sharing.UNASKED if peer.endpoint.startswith("ipc://") else _Sharing.NEVER
        self.socket = socket
        self.backlog: deque[bytes | _Waiting] = deque()
        self.backlog_bytes = 0
        self.is_flushing = False
        self.is_stuck = False
        self.monitor: Monitor | None = None
        self.is_connected = False
        """As far as `monitor` tells; with the other end's word that it takes us."""
        self.num_failures = 0
        self.num_broken_off = 0
        """Of those, the ones that got as far as a connection."""
        """Attempts to connect, since the last one that went well."""
        self.descriptor = -1
        if socket is not None:
            socket.copy_threshold = COPY_BELOW_BYTES
            # pyzmq's own `send` wraps this one in Python to serve its draft sockets; it takes twice as long.
            self.send = super(zmq.Socket, socket).send
            self.descriptor = descriptor_of(socket)

    def try_push(self, parts: Sequence[Part]) -> bool:
        """Hand a whole message to ZeroMQ; False if it has no room.

        Only the first part can be refused: once it is taken, the rest of the message is.
        """
        send = self.send
        try:
            if len(parts) == 1:
                send(parts[0], _NOBLOCK)
                return True
            send(parts[0], _SNDMORE)
        except zmq.Again:
            return False
        last = len(parts) - 1
        for i in range(1, last + 1):
            part = parts[i]
            send(part, _SNDMORE if i < last else _NOBLOCK, copy=len(part) < COPY_BELOW_BYTES)
        return True

    def can_write(self) -> bool:
        """Whether ZeroMQ would take a message now.

        Asking makes it look at what its I/O thread told it, and resets the descriptor.
        """
        assert self.socket is not None
        return bool(cast("int", super(zmq.Socket, self.socket).get(_EVENTS)) & _POLLOUT)


class Outbox:
    """Sends frames to peers, in order for each edge, without ever blocking or losing one silently.

    Frames of edges whose kind is bulky (`BULKY_KINDS`) take a lane of their own, so that nothing else waits behind
    them; all others keep their order among each other.

    Frames that ZeroMQ has no room for wait in a bounded backlog per peer. When that is full the peer is *stuck*: the
    backlog and all later frames for it are dropped and counted, and `on_stuck` is called once, in a later turn of the
    loop. What ZeroMQ took before still goes out if the peer comes back, so a stuck peer sees a prefix of what was
    sent, never a gap. `forget` ends that state.

    A `Blob` must not be modified after `send`: its memory is lent until ZeroMQ has written it (which keeps it alive),
    it is not copied first. With an arena, blobs from the threshold on are copied into it for peers on this host, and
    the frame holds a reference. Such a peer is asked first whether it can read the arena (`Offer`); until it says so
    (`mapped`), and whenever there is no room, blobs travel in messages.

    A TCP connection may break while both ends live. ZeroMQ makes a new one, but what was under way is lost, and nobody
    can tell how much: `on_broken` is called once for each break. While no connection can be made, frames wait, and
    `on_unreachable` is called with each attempt that fails after the first few. A peer that refuses our key is given up
    as a stuck one is; `on_refused` is called instead.

    Not for use from several threads.

    Args:
        context: where the sockets are made; its owner terminates it.
        sender: the identity under which all frames leave.
        on_stuck: told the peer whose frames are being dropped (also one whose address makes no sense).
        limits: of each socket.
        backlog: of each peer.
        arena: where blobs are lent from, if at all.
        lend_from_bytes: shorter blobs are not lent.
        cuda: where blobs in device memory are lent from, if at all.
        curve: the keys for TCP sockets; without them, these are not encrypted.
        on_broken: told the peer to whom a TCP connection broke; frames sent before may be lost, later ones are not.
        on_unreachable: told the peer to whom no TCP connection can be made, again and again.
        on_refused: told the peer that takes no connection of ours, and why, which is not logged here.

    Raises:
        BadInput: the sender's name is too long for a routing id.
        RuntimeError: no running loop.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sender: Sender,
        *,
        on_stuck: Callable[[Peer], None],
        limits: SocketLimits = DEFAULT_SOCKET_LIMITS,
        backlog: BacklogLimits = DEFAULT_BACKLOG_LIMITS,
        arena: Arena | None = None,
        lend_from_bytes: int = 0,
        cuda: CudaArena | None = None,
        curve: Curve | None = None,
        on_broken: Callable[[Peer], None] | None = None,
        on_unreachable: Callable[[Peer], None] | None = None,
        on_refused: Callable[[Peer, str], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._curve = curve
        self._on_broken = on_broken
        self._on_unreachable = on_unreachable
        self._on_refused = on_refused or (lambda peer, _: on_stuck(peer))
        if len(sender.actor.encode()) > MAX_ACTOR_NAME_BYTES:
            raise BadInput(
                f"actor name '{sender.actor}' is too long (allowed: {MAX_ACTOR_NAME_BYTES} bytes)", field="actor"
            )
        self._sender = sender
        self._on_stuck = on_stuck
        self._limits = limits
        self._max_frames, self._max_bytes = backlog
        self._arena = arena
        self._lane: _Lane | None = None
        self._lend_from_bytes = lend_from_bytes
        self._cuda = cuda
        self._lent: list[Lent] = []
        store = None if arena is None and cuda is None else self._lend
        self._encode = Codec(store=store, store_from_bytes=lend_from_bytes).encode
        self._lanes: dict[Peer, _Lane] = {}
        self._bulk_lanes: dict[Peer, _Lane] = {}
        self._num_handed_over = 0
        self._num_dropped = 0
        self._is_closed = False
        self._flushed = asyncio.Event()

    def send(self, peer: Peer, frame: AnyFrame) -> None:
        """Send, or queue, or drop and count; returns at once.

        Raises:
            BadFrame: the frame can't be encoded (a value without a form on the wire).
            InputTooLarge: a blob is longer than a peer accepts.
        """
        is_text = type(frame) is Chunk and type(frame.payload) is Text  # as most frames are
        lanes = self._bulk_lanes if not is_text and _is_bulky(frame) else self._lanes
        lane = self._lane = lanes.get(peer) or self._open(peer, lanes)
        try:
            parts = self._encode(frame)
            if len(parts) > 1:
                self._check_sizes(parts)
        except OmniBusError:
            self._take_back(lane, self._unlent())
            raise
        lent = self._unlent() if self._lent else ()
        if lane.is_stuck:
            self._num_dropped += 1
        elif not lane.backlog and lane.try_push(parts):
            self._num_handed_over += 1
        else:
            self._queue(lane, parts, lent)

    def mapped(self, reader: Sender, reason: str) -> None:
        """Take a peer's answer to the `Offer`: it reads the arena, or doesn't for a reason."""
        for lane in self._all_lanes():
            if lane.reader == reader and lane.sharing is _Sharing.OFFERED:
                lane.sharing = _Sharing.NEVER if reason else _Sharing.MAPPED
                if reason:
                    _log.warning("%s can't read shared memory (sent in messages): %s", reader.actor, reason)

    def ways(self) -> list[tuple[Peer, bool]]:
        """Return the peers that were sent to and read, and whether that was on the way for bulky payloads."""
        lanes = ((self._lanes, False), (self._bulk_lanes, True))
        return [(peer, is_bulk) for of, is_bulk in lanes for peer, lane in of.items() if not lane.is_stuck]

    @property
    def peers(self) -> list[Peer]:
        """Those to whom there is a way, and who may hold memory that they were lent."""
        return list(self._lanes.keys() | self._bulk_lanes.keys())

    def forget(self, peer: Peer) -> None:
        """Close the way to a peer; what was not sent is dropped (what waited here is counted).

        Unknown peers are ignored.
        """
        for lanes in (self._lanes, self._bulk_lanes):
            lane = lanes.pop(peer, None)
            if lane is not None:
                self._close_lane(lane, linger_ms=0)
        if self._arena is not None:
            self._arena.forget(peer.sender)
        if self._cuda is not None:
            self._cuda.forget(peer.sender)

    async def close(self, linger_s: float) -> None:
        """Send what can be sent within `linger_s`, then close all sockets; the rest is dropped and counted.

        Returns within `linger_s`. ZeroMQ goes on with what it took until the same moment, and terminating the context
        waits for that, but no longer. A peer that is `receive_hwm` frames behind at the end may miss the last ones.
        Frames sent after this returned are dropped and counted. May be called again.
        """
        deadline = self._loop.time() + linger_s
        try:
            async with asyncio.timeout_at(deadline):
                while any(lane.backlog for lane in self._all_lanes()):
                    self._flushed.clear()
                    await self._flushed.wait()
        except TimeoutError:
            pass  # the rest is counted as dropped below
        finally:
            self._is_closed = True
            linger_ms = max(0, round((deadline - self._loop.time()) * 1000))
            for lane in self._all_lanes():
                self._close_lane(lane, linger_ms=0 if lane.is_stuck else linger_ms)
            self._lanes.clear()
            self._bulk_lanes.clear()

    def statistics(self) -> OutboxStatistics:
        """Return the counts since the start, and what waits now."""
        lanes = self._all_lanes()
        return OutboxStatistics(
            peers=len(self.peers),
            stuck=len({lane.peer for lane in lanes if lane.is_stuck}),
            handed_over=self._num_handed_over,
            waiting=sum(len(lane.backlog) for lane in lanes),
            waiting_bytes=sum(lane.backlog_bytes for lane in lanes),
            dropped=self._num_dropped,
        )

    def _all_lanes(self) -> list[_Lane]:
        return [*self._lanes.values(), *self._bulk_lanes.values()]

    def _open(self, peer: Peer, lanes: dict[Peer, _Lane]) -> _Lane:
        is_bulk = lanes is self._bulk_lanes
        sibling = (self._lanes if is_bulk else self._bulk_lanes).get(peer)
        if self._is_closed or (sibling is not None and sibling.is_stuck):
            lane = _Lane(peer, None)
            lane.is_stuck = True
            if not self._is_closed:
                lanes[peer] = lane
            return lane
        try:
            lane = self._connect(peer, self._sender.encode_bulk() if is_bulk else self._sender.encode())
        except BadInput as error:
            lane = _Lane(peer, None)
            self._give_up(lane, error.message)
        lanes[peer] = lane
        return lane

    def _connect(self, peer: Peer, routing_id: bytes) -> _Lane:
        """Return a lane whose socket connects in the background.

        Raises:
            BadInput: the address can't be used, or nobody of that name is allowed.
        """
        keys = None
        if self._curve is not None and is_tcp(peer.endpoint):
            server = self._curve.server_key(peer.actor)
            if server is None:
                raise BadInput(f"there is no allowed key of '{peer.actor}'", field="key_folder")
            keys = DealerKeys(self._curve.public, self._curve.secret, server)
        dealer = make_dealer(self._context, routing_id, peer.endpoint, self._limits, keys)
        lane = _Lane(peer, dealer)
        if is_tcp(peer.endpoint):
            lane.monitor = Monitor(dealer, _WATCHED, lambda event, value, _: self._on_event(lane, event, value))
        try:
            connect(dealer, peer.endpoint)
        except BadInput:
            if lane.monitor is not None:
                lane.monitor.close()
            raise
        return lane

    def _on_event(self, lane: _Lane, event: int, value: int) -> None:
        """Take what became of a lane's connection; ZeroMQ connects again by itself, except to whoever refused it."""
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                lane.is_connected, lane.num_failures, lane.num_broken_off = True, 0, 0
            case zmq.EVENT_DISCONNECTED:
                was_connected, lane.is_connected = lane.is_connected, False
                lane.num_broken_off += not was_connected
                if was_connected and not lane.is_stuck and self._on_broken is not None:
                    self._on_broken(lane.peer)
            case zmq.EVENT_CONNECT_RETRIED:
                lane.num_failures += 1
                if lane.num_broken_off >= MAX_FAILURES and self._curve is None:
                    self._give_up(lane, BREAKS_OFF, is_refused=True)
                    return
                if lane.num_failures == MAX_FAILURES:
                    # After a connection that was broken off at once, too: then the other end has another key.
                    _log.warning("can't connect to %s at %s; trying on", lane.peer.actor, lane.peer.endpoint)
                if lane.num_failures >= MAX_FAILURES and not lane.is_stuck and self._on_unreachable is not None:
                    self._on_unreachable(lane.peer)
            case _:
                self._give_up(lane, self._why_refused(event, value), is_refused=True)

    def _why_refused(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it does not allow our key"
        if value == MECHANISM_MISMATCH:
            return "it has no keys" if self._curve is not None else "it wants keys"
        return "it does not speak as we do"

    def _lend(self, blob: Blob) -> Lent | None:
        """Put a blob of the frame that is being encoded into the arena, if its peer reads that."""
        lane = self._lane
        assert lane is not None
        if self._cuda is not None and isinstance(blob, DeviceBlob) and not lane.is_stuck:
            on_device = self._cuda.lend(blob, lane.peer)
            if on_device is not None:
                self._lent.append(on_device)
                return on_device
        if self._arena is None or len(blob) < self._lend_from_bytes:
            return None
        if lane.sharing is _Sharing.UNASKED:
            lane.sharing = _Sharing.OFFERED
            self._loop.call_soon(self._offer, lane.peer)
        if lane.sharing is not _Sharing.MAPPED or lane.is_stuck:
            return None
        reference = self._arena.lend(blob, lane.reader)
        if reference is not None:
            self._lent.append(reference)
        return reference

    def _offer(self, peer: Peer) -> None:
        if self._arena is None or not (peer in self._lanes or peer in self._bulk_lanes):
            return  # forgotten in the same turn
        try:
            pid, fd = self._arena.address
        except OSError as error:
            self.mapped(peer.sender, f"there is none: {error}")
            return
        self.send(peer, Offer(self._arena.owner, pid, fd))

    def _unlent(self) -> tuple[Lent, ...]:
        """Return what the frame that was just encoded refers to."""
        lent = tuple(self._lent)
        self._lent.clear()
        return lent

    def _take_back(self, lane: _Lane, lent: Sequence[Lent]) -> None:
        """Free what a frame referred to that will never be sent."""
        for reference in lent:
            if isinstance(reference, DeviceReference):
                if self._cuda is not None:
                    self._cuda.release(lane.reader, reference.device, (reference.generation,))
            elif self._arena is not None:
                self._arena.release(lane.reader, (reference.generation,))

    def _check_sizes(self, parts: Sequence[Part]) -> None:
        longest = max(map(len, parts))
        if longest > self._limits.max_message_bytes:
            raise InputTooLarge(
                f"a blob of {longest} bytes can't be sent (allowed: {self._limits.max_message_bytes})", field="payload"
            )

    def _queue(self, lane: _Lane, parts: Sequence[Part], lent: tuple[Lent, ...]) -> None:
        is_small = len(parts) == 1 and not lent and isinstance(parts[0], bytes)
        num_bytes = len(parts[0]) if is_small else sum(map(len, parts))
        backlog = lane.backlog
        is_full = len(backlog) >= self._max_frames or lane.backlog_bytes + num_bytes > self._max_bytes
        if is_full and backlog:
            self._num_dropped += 1
            self._take_back(lane, lent)
            self._give_up(lane, f"{len(backlog)} frames ({lane.backlog_bytes} bytes) wait, it takes none")
            return
        backlog.append(cast("bytes", parts[0]) if is_small else _Waiting(parts, num_bytes, lent))
        lane.backlog_bytes += num_bytes
        if not lane.is_flushing:
            # From here on the descriptor is watched: it becomes readable when ZeroMQ's I/O thread has made room. If it
            # already was, the loop calls at once.
            lane.is_flushing = True
            self._loop.add_reader(lane.descriptor, self._flush, lane)

    def _flush(self, lane: _Lane) -> None:
        """Move waiting frames to ZeroMQ until it has no room; the descriptor tells when there is some again."""
        if not lane.is_flushing:
            return  # closed between the call and its turn
        backlog = lane.backlog
        for _ in range(MAX_FLUSH):
            waiting = backlog[0]
            if isinstance(waiting, bytes):
                parts, num_bytes = (waiting,), len(waiting)
            else:
                parts, num_bytes, _ = waiting
            # Looking after a refusal matters twice: what the I/O thread said since then counts, and the descriptor is
            # reset.
            if not lane.try_push(parts) and not (lane.can_write() and lane.try_push(parts)):
                return
            backlog.popleft()
            lane.backlog_bytes -= num_bytes
            self._num_handed_over += 1
            if not backlog:
                self._stop_flushing(lane)
                return
        self._loop.call_soon(self._flush, lane)

    def _stop_flushing(self, lane: _Lane) -> None:
        if lane.is_flushing:
            lane.is_flushing = False
            self._loop.remove_reader(lane.descriptor)
        self._flushed.set()

    def _give_up(self, lane: _Lane, reason: str, *, is_refused: bool = False) -> None:
        if not is_refused:
            _log.warning("gave up on %s at %s: %s", lane.peer.actor, lane.peer.endpoint, reason)
        for each in (lane, self._lanes.get(lane.peer), self._bulk_lanes.get(lane.peer)):
            if each is not None and not each.is_stuck:
                each.is_stuck = True
                self._drop_backlog(each)
        # Later, because the caller of `send` may be in the middle of something that the callback changes.
        if is_refused:
            self._loop.call_soon(self._on_refused, lane.peer, reason)
        else:
            self._loop.call_soon(self._on_stuck, lane.peer)

    def _drop_backlog(self, lane: _Lane) -> None:
        self._num_dropped += len(lane.backlog)
        for waiting in lane.backlog:
            if isinstance(waiting, _Waiting):
                self._take_back(lane, waiting.lent)
        lane.backlog.clear()
        lane.backlog_bytes = 0
        self._stop_flushing(lane)

    def _close_lane(self, lane: _Lane, *, linger_ms: int) -> None:
        self._drop_backlog(lane)
        if lane.monitor is not None:
            lane.monitor.close()
        if lane.socket is not None:
            lane.socket.close(linger_ms)


def _is_bulky(frame: Any) -> bool:
    """Whether a frame belongs to an edge of a bulky kind: each frame tells by itself, so nothing is remembered."""
    kind = type(frame)
    if kind is Chunk:
        return type(frame.payload) in BULKY_TYPES
    if kind is Open:
        edges = frame.route.edges
        return 0 <= frame.edge < len(edges) and edges[frame.edge].kind in BULKY_KINDS
    if kind is Close:
        return frame.kind in BULKY_KINDS
    return kind is Confirm and frame.is_bulk
