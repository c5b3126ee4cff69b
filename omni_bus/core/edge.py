"""The two ends of one edge of one request: order, completeness and credit. Stages and clients use the same ones."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from omni_bus.core.credit import Grant, ReceiveCredit, SendCredit, Window
from omni_bus.errors import BadFrame, LinkBroken
from omni_bus.wire.frames import Chunk, Close, Credit, Finish, Open
from omni_bus.wire.payloads import TYPE_OF, Unreadable, charge, kind_of, size_of

if TYPE_CHECKING:
    from omni_bus.ids import EdgeId
    from omni_bus.wire.frames import DataFrame, Route
    from omni_bus.wire.payloads import Payload


class OutEdge:
    """The sending end. Frames that credit forbids wait in order; the owner stops producing while `is_blocked`."""

    __slots__ = (
        "_credit",
        "_finish",
        "_is_closed",
        "_is_open",
        "_params",
        "_pending",
        "_request",
        "_route",
        "edge",
        "kind",
        "num_bytes",
        "num_sent",
        "target",
    )

    def __init__(self, route: Route, edge: EdgeId, params: dict[str, dict[str, Any]]) -> None:
        spec = route.edges[edge]
        self.edge = edge
        self.kind = spec.kind
        """The payload kind that the edge carries."""
        self.target = route.target(edge)
        """Who receives."""
        self.num_sent = 0
        self.num_bytes = 0
        """Size of what was to be sent."""
        self._request = route.request
        self._route = route
        self._params = params
        self._is_open = False
        self._is_closed = False
        self._pending: deque[tuple[Payload, int]] = deque()
        self._finish: Finish | None = None
        self._credit = SendCredit(Window(spec.window_chunks, spec.window_bytes))

    @property
    def is_blocked(self) -> bool:
        """Payloads wait for credit."""
        return bool(self._pending)

    @property
    def is_closed(self) -> bool:
        """`Close` was sent."""
        return self._is_closed

    @property
    def pending_bytes(self) -> int:
        """Size of the payloads that wait."""
        return sum(size for _, size in self._pending)

    @property
    def credit_left(self) -> Grant:
        """What may still be sent."""
        return self._credit.left

    def push(self, payload: Payload) -> list[DataFrame]:
        """Send a payload, now or when credit allows; return the frames to send now."""
        size = charge(payload)
        self.num_bytes += size
        if self._is_open and not self._pending and self._credit.spend(size):
            return [self._chunk(payload)]
        self._pending.append((payload, size))
        return self._flush()

    def finish(self, finish: Finish) -> list[DataFrame]:
        """End the edge after what is pending."""
        self._finish = finish
        return self._flush()

    def abandon(self) -> list[DataFrame]:
        """End the edge now, without what is pending: nobody needs it any more."""
        self._pending.clear()
        return self.finish(Finish())

    def grant(self, credit: Credit) -> list[DataFrame]:
        """Take credit.

        Raises:
            BadFrame: more than the window allows.
        """
        self._credit.grant(Grant(credit.chunks, credit.bytes))
        return self._flush()

    def _flush(self) -> list[DataFrame]:
        frames: list[DataFrame] = []
        if not self._is_open:
            self._is_open = True
            frames.append(Open(self._route, self.edge, self._params))
        while self._pending and self._credit.spend(self._pending[0][1]):
            frames.append(self._chunk(self._pending.popleft()[0]))
        if self._finish is not None and not self._pending and not self._is_closed:
            self._is_closed = True
            frames.append(Close(self._request, self.edge, self.num_sent, self._finish, self.kind))
        return frames

    def _chunk(self, payload: Payload) -> Chunk:
        chunk = Chunk(self._request, self.edge, self.num_sent, payload)
        self.num_sent += 1
        return chunk


class InEdge:
    """The receiving end. A gap, a repeat, a chunk beyond credit or of another kind is the sender's fault."""

    __slots__ = ("_credit", "_request", "_route", "_type", "edge", "finish", "num_received", "port", "sender", "source")

    def __init__(self, route: Route, edge: EdgeId) -> None:
        spec = route.edges[edge]
        self.edge = edge
        self.port = spec.target_port
        """The input port that the edge feeds."""
        self.source = route.source(edge)
        """Who sends."""
        self.sender = self.source.sender
        """The identity of its frames."""
        self.num_received = 0
        self.finish: Finish | None = None
        self._type = TYPE_OF.get(spec.kind)
        self._request = route.request
        self._route = route
        self._credit = ReceiveCredit(Window(spec.window_chunks, spec.window_bytes))

    @property
    def is_closed(self) -> bool:
        """`Close` came."""
        return self.finish is not None

    @property
    def buffered(self) -> Grant:
        """Chunks and charged bytes that wait to be consumed."""
        return self._credit.buffered

    @property
    def num_unconsumed(self) -> int:
        """Chunks that wait to be consumed."""
        return self._credit.num_buffered

    def accept(self, chunk: Chunk) -> None:
        """Take the next chunk.

        Raises:
            BadFrame: a payload that can't be read, a repeat, another kind than the edge's, no credit, or the edge is
                closed.
            LinkBroken: chunks before it are missing.
        """
        payload = chunk.payload
        if chunk.seq != self.num_received or type(payload) is not self._type or self.finish is not None:
            self._refuse(chunk)
        self._credit.receive(size_of(payload))
        self.num_received += 1

    def _refuse(self, chunk: Chunk) -> NoReturn:
        if isinstance(chunk.payload, Unreadable):
            raise BadFrame(f"{self._name()}: chunk {chunk.seq} can't be read: {chunk.payload.reason}")
        if self.finish is not None:
            raise BadFrame(f"{self._name()}: chunk {chunk.seq} came after the end")
        if chunk.seq > self.num_received:
            raise LinkBroken(f"{self._name()}: chunk {chunk.seq} came where {self.num_received} was due: some are lost")
        if chunk.seq < self.num_received:
            raise BadFrame(f"{self._name()}: chunk {chunk.seq} came where {self.num_received} was due")
        declared = self._route.edges[self.edge].kind
        raise BadFrame(f"{self._name()}: a {kind_of(chunk.payload)} came where {declared} was declared")

    def close(self, close: Close) -> None:
        """Take the end.

        Raises:
            BadFrame: it counts fewer chunks than came, or the edge is closed already.
            LinkBroken: chunks are missing.
        """
        if not self.is_closed and close.num_chunks > self.num_received:
            lost = close.num_chunks - self.num_received
            raise LinkBroken(f"{self._name()}: {lost} of {close.num_chunks} chunks are lost")
        if self.is_closed or close.num_chunks != self.num_received:
            raise BadFrame(f"{self._name()}: end after {close.num_chunks} chunks, {self.num_received} came")
        self.finish = close.finish

    def consume(self, payload: Payload) -> Credit | None:
        """Account for a chunk that was used; return the credit to send, if it is time."""
        grant = self._credit.consume(size_of(payload))
        if grant is None or self.is_closed:
            return None
        return Credit(self._request, self.edge, grant.chunks, grant.bytes)

    def discard(self) -> Credit | None:
        """Count all that came as used; return the credit to send, if there is any."""
        grant = self._credit.consume_all()
        if grant is None or self.is_closed:
            return None
        return Credit(self._request, self.edge, grant.chunks, grant.bytes)

    def _name(self) -> str:
        spec = self._route.edges[self.edge]
        return f"edge {spec.source}.{spec.source_port} -> {spec.target}.{spec.target_port}"
