"""The client's side of requests: what a gateway, a session or a benchmark holds of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from omni_bus.core.admission import RETRY_AFTER_S
from omni_bus.core.edge import InEdge, OutEdge
from omni_bus.core.effects import (
    Admitted,
    Answered,
    ClientEffect,
    Deliver,
    Ended,
    PortEnded,
    Send,
    Writable,
)
from omni_bus.core.pipeline import IN, OUT
from omni_bus.errors import BadInput, OmniBusError, StageLost, Unavailable, from_info, unknown_name
from omni_bus.wire.frames import (
    Admin,
    AdminReply,
    Admit,
    Cancel,
    Cancelled,
    Chunk,
    Close,
    Credit,
    Failed,
    Finish,
    Inquire,
    Open,
    Reject,
    Route,
    Submit,
)
from omni_bus.wire.payloads import kind_of

if TYPE_CHECKING:
    from omni_bus.ids import EdgeId, Peer, RequestId, Sender
    from omni_bus.wire.payloads import Payload


class _Call:
    """One request of ours."""

    def __init__(self, submit: Submit, params: dict[str, dict[str, Any]]) -> None:
        self.submit = submit
        self.params = params
        self.route: Route | None = None
        self.out_edges: dict[EdgeId, OutEdge] = {}
        self.in_ports: dict[str, list[OutEdge]] = {}
        self.in_edges: dict[EdgeId, InEdge | None] = {}

    @property
    def is_complete(self) -> bool:
        return all(edge is not None and edge.is_closed for edge in self.in_edges.values())


class ClientCore:
    """Frames and the application's wishes in, effects out.

    Each request ends once, with `Ended`: after the last output port ended, or with an error.
    """

    def __init__(self, coordinator: Peer) -> None:
        self._coordinator = coordinator
        self._calls: dict[RequestId, _Call] = {}
        self._cancelling: dict[RequestId, Route] = {}
        self._asked: set[int] = set()
        self.num_stale_frames = 0

    @property
    def live_routes(self) -> tuple[Route, ...]:
        """Routes of the admitted requests that have not ended, and of those whose cancel is not answered yet."""
        live = (call.route for call in self._calls.values() if call.route is not None)
        return (*live, *self._cancelling.values())

    @property
    def num_live(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._calls)

    # --- the application's wishes -------------------------------------------------------------------------

    def submit(self, submit: Submit, params: dict[str, dict[str, Any]]) -> list[ClientEffect]:
        """Ask for a request; `params` are parameters by stage name."""
        self._calls[submit.request] = _Call(submit, params)
        return [Send(self._coordinator, submit)]

    def send(self, request: RequestId, port: str, payload: Payload) -> list[ClientEffect]:
        """Send input; only between `Admitted` and `Ended`. What credit forbids waits in order.

        Raises:
            UnknownName: no edge of this request begins at that port.
            BadInput: the port's edges carry another kind.
        """
        call = self._calls.get(request)
        if call is None:
            return []
        edges = self._port(call, port)
        for edge in edges:
            if kind_of(payload) != edge.kind:
                raise BadInput(f"input '{port}' got a {kind_of(payload)} (allowed: {edge.kind})", field=port)
        effects: list[ClientEffect] = []
        for edge in edges:
            effects += self._frames(call, edge, edge.push(payload))
        return effects

    def finish(self, request: RequestId, port: str) -> list[ClientEffect]:
        """End an input port."""
        call = self._calls.get(request)
        if call is None:
            return []
        effects: list[ClientEffect] = []
        for edge in self._port(call, port):
            effects += self._frames(call, edge, edge.finish(Finish()))
        return effects

    def is_blocked(self, request: RequestId, port: str) -> bool:
        """Whether input waits for credit on this port; the application should wait for `Writable`."""
        call = self._calls.get(request)
        return call is not None and any(edge.is_blocked for edge in self._port(call, port))

    def consume(self, request: RequestId, port: str, payload: Payload) -> list[ClientEffect]:
        """Say that a delivered payload was used; its sender gets the credit back."""
        call = self._calls.get(request)
        if call is None or call.route is None:
            return []
        for edge in call.in_edges.values():
            if edge is not None and edge.port == port:
                credit = edge.consume(payload)
                return [] if credit is None else [Send(edge.source, credit)]
        return []

    def cancel(self, request: RequestId, reason: str) -> list[ClientEffect]:
        """End a request of ours; nothing more is delivered for it."""
        call = self._calls.pop(request, None)
        return [] if call is None else [self._cancel(request, call.route, reason)]

    def on_unsent(self, request: RequestId, error: OmniBusError) -> list[ClientEffect]:
        """A frame of the request could not be sent (input that can't be encoded): the request ends with that error."""
        call = self._calls.get(request)
        return [] if call is None else [*self._end(request, error), self._cancel(request, call.route, error.message)]

    def admin(self, call: int, op: str, args: dict[str, Any]) -> list[ClientEffect]:
        """Ask the coordinator for an operation; `Answered` brings the result."""
        self._asked.add(call)
        return [Send(self._coordinator, Admin(call, op, args))]

    def on_coordinator_changed(self) -> list[ClientEffect]:
        """The coordinator does not know us, so it is new or had given us up; call it with each `Introduce`.

        Carry the effects out after the `Hello` that answers it. What was not admitted is submitted again, and an answer
        to the former attempt no longer counts. What was asked is lost, and ends as `Unavailable`, safe to retry;
        admitted requests go on; cancels without an answer are repeated.
        """
        effects: list[ClientEffect] = [
            Send(self._coordinator, Cancel(request, "again")) for request in self._cancelling
        ]
        for call in self._calls.values():
            if call.route is None:
                call.submit = replace(call.submit, attempt=call.submit.attempt + 1)
                effects.append(Send(self._coordinator, call.submit))
        effects += [Answered(call, None, self._coordinator_lost()) for call in sorted(self._asked)]
        self._asked.clear()
        return effects

    def on_peer_lost(self, peer: Peer) -> list[ClientEffect]:
        """An actor is gone; call it with the peer of each `Lost`.

        The coordinator ends the requests that the actor worked on. Where it had finished its work, only its last frames
        may be missing, which nobody but us can tell.
        """
        effects: list[ClientEffect] = []
        for request, call in list(self._calls.items()):
            route = call.route
            if route is None:
                continue
            for number, edge in call.in_edges.items():
                if route.source(number) == peer and (edge is None or not edge.is_closed):
                    stage = route.edges[number].source
                    error = StageLost(
                        f"stage '{stage}' (actor {peer.actor}) was lost before all of its output came", stage=stage
                    )
                    effects += [*self._end(request, error), self._cancel(request, route, error.message)]
                    break
        return effects

    def _coordinator_lost(self) -> Unavailable:
        return Unavailable(
            "the coordinator was lost before it answered", is_retry_safe=True, retry_after_s=RETRY_AFTER_S
        )

    # --- frames -------------------------------------------------------------------------------------------

    def on_frame(
        self,
        sender: Sender,
        frame: Admit | Reject | Failed | Cancelled | Inquire | AdminReply | Open | Chunk | Close | Credit,
    ) -> list[ClientEffect]:
        """Take a frame; a request that it breaks ends with `BadFrame` and is cancelled."""
        match frame:
            case Chunk() | Credit() | Open() | Close():
                return self._on_data(sender, frame)
            case AdminReply(call=call, result=result, error=error):
                if call not in self._asked:
                    return []
                self._asked.discard(call)
                return [Answered(call, result, None if error is None else from_info(error))]
            case Admit(route=route, attempt=attempt):
                return self._on_admit(route, attempt)
            case Reject(request=request, error=error, attempt=attempt):
                call = self._calls.get(request)
                return [] if call is None or attempt != call.submit.attempt else self._end(request, from_info(error))
            case Failed(request=request, error=error):
                return self._end(request, from_info(error))
            case Cancelled(request=request):
                self._cancelling.pop(request, None)
                return []
            case Inquire(request=request):
                return [] if request in self._calls else [Send(self._coordinator, Cancel(request, "ended"))]

    def _on_admit(self, route: Route, attempt: int) -> list[ClientEffect]:
        call = self._calls.get(route.request)
        if call is None:
            # Given up while the answer was under way; the coordinator has bound it and must let go.
            return [self._cancel(route.request, route, "no longer wanted")]
        if call.route is not None or attempt != call.submit.attempt:
            return []
        call.route = route
        call.in_edges = dict.fromkeys(route.incoming(OUT))
        for number in route.outgoing(IN):
            edge = OutEdge(route, number, call.params)
            call.out_edges[number] = edge
            call.in_ports.setdefault(route.edges[number].source_port, []).append(edge)
        return [Admitted(route.request, route)]

    def _on_data(self, sender: Sender, frame: Open | Chunk | Close | Credit) -> list[ClientEffect]:
        request = frame.route.request if isinstance(frame, Open) else frame.request
        call = self._calls.get(request)
        if call is None or call.route is None:
            return []
        try:
            if isinstance(frame, Credit):
                return self._on_credit(call, sender, frame)
            if isinstance(frame, Open):
                return self._on_open(call, sender, frame)
            edge = call.in_edges.get(frame.edge)
            if edge is None or edge.sender != sender:
                self.num_stale_frames += 1
                return []
            if isinstance(frame, Chunk):
                edge.accept(frame)
                return [Deliver(request, edge.port, frame.payload)]
            edge.close(frame)
            effects: list[ClientEffect] = [PortEnded(request, edge.port, frame.finish)]
            return effects + self._end(request, None) if call.is_complete else effects
        except OmniBusError as error:
            return [*self._end(request, error), self._cancel(request, call.route, error.message)]

    def _on_open(self, call: _Call, sender: Sender, frame: Open) -> list[ClientEffect]:
        if call.route is None or frame.edge not in call.in_edges or call.route.source(frame.edge).sender != sender:
            self.num_stale_frames += 1
            return []
        if call.in_edges[frame.edge] is not None:
            raise BadInput(f"edge {frame.edge} of {frame.route.request} was opened twice")
        call.in_edges[frame.edge] = InEdge(call.route, frame.edge)
        return []

    def _on_credit(self, call: _Call, sender: Sender, frame: Credit) -> list[ClientEffect]:
        edge = call.out_edges.get(frame.edge)
        if edge is None or call.route is None or call.route.target(frame.edge).sender != sender:
            self.num_stale_frames += 1
            return []
        port = call.route.edges[frame.edge].source_port
        was_blocked = self.is_blocked(frame.request, port)
        effects = self._frames(call, edge, edge.grant(frame))
        if was_blocked and not self.is_blocked(frame.request, port):
            effects.append(Writable(frame.request, port))
        return effects

    # --- inside -------------------------------------------------------------------------------------------

    def _cancel(self, request: RequestId, route: Route | None, reason: str) -> Send:
        """Tell the coordinator; a routed request is remembered until it answers, in case it is lost with the cancel."""
        if route is not None:
            self._cancelling[request] = route
        return Send(self._coordinator, Cancel(request, reason))

    def _port(self, call: _Call, port: str) -> list[OutEdge]:
        edges = call.in_ports.get(port)
        if edges is None:
            raise unknown_name("input", port, call.in_ports, field=port)
        return edges

    def _frames(self, call: _Call, edge: OutEdge, frames: list[Any]) -> list[ClientEffect]:
        assert call.route is not None
        target = call.route.target(edge.edge)
        return [Send(target, frame) for frame in frames]

    def _end(self, request: RequestId, error: OmniBusError | None) -> list[ClientEffect]:
        """The one place where a request that was not cancelled by us leaves."""
        call = self._calls.pop(request, None)
        if call is None:
            return []
        effects: list[ClientEffect] = [Ended(request, error)]
        if error is None:
            for edge in call.out_edges.values():
                effects += self._frames(call, edge, edge.abandon())
        return effects
