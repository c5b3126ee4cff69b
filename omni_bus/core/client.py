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
from omni_bus.core.kept import KeptInput
from omni_bus.core.member import Running
from omni_bus.core.pipeline import IN, OUT
from omni_bus.errors import (
    BadFrame,
    BadInput,
    LinkBroken,
    OmniBusError,
    StageLost,
    Unavailable,
    from_info,
    unknown_name,
)
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
    Reroute,
    Route,
    Submit,
)
from omni_bus.wire.payloads import charge, kind_of

if TYPE_CHECKING:
    from omni_bus.ids import EdgeId, Peer, RequestId, Sender
    from omni_bus.wire.payloads import Payload


class _Call:
    """One request of ours."""

    def __init__(self, submit: Submit, params: dict[str, dict[str, Any]], now: float) -> None:
        self.submit = submit
        self.submitted_at = now
        self.id = submit.request
        self.name = submit.request
        """What the application calls it, also after its route was lost and it runs under another id."""
        self.params = params
        self.route: Route | None = None
        self.since = 0.0
        self.out_edges: dict[EdgeId, OutEdge] = {}
        self.in_ports: dict[str, list[OutEdge]] = {}
        self.in_edges: dict[EdgeId, InEdge | None] = {}
        self.kept: KeptInput | None = KeptInput()
        """None once it has put something out, or sent more than is kept: then it can't run anew."""
        self.is_rerouted = False
        """Its route was lost, and its successor waits to be admitted; the edges are the former ones."""

    def next_attempt(self, now: float) -> Submit:
        """Return the submit to repeat, with what is left of its time."""
        timeout_s = self.submit.timeout_s
        if timeout_s is not None:
            timeout_s -= now - self.submitted_at
        self.submitted_at = now
        self.submit = replace(self.submit, timeout_s=timeout_s, attempt=self.submit.attempt + 1)
        return self.submit

    def is_asked_by(self, attempt: int) -> bool:
        """Whether an answer to this attempt counts: to the last one, or of a successor, which nobody submitted."""
        return self.is_rerouted or attempt == self.submit.attempt

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
        self._renamed: dict[RequestId, RequestId] = {}
        """By the application's name, of those that run under another id."""
        self._cancelling: dict[RequestId, Running] = {}
        self._asked: set[int] = set()
        self._is_coordinator_silent = False
        self.num_stale_frames = 0

    @property
    def running(self) -> tuple[Running, ...]:
        """The admitted requests that have not ended, and those whose cancel is not answered yet."""
        live = (
            Running(call.route, call.since, call.in_edges) for call in self._calls.values() if call.route is not None
        )
        return (*live, *self._cancelling.values())

    @property
    def num_live(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._calls)

    # --- the application's wishes -------------------------------------------------------------------------

    def submit(self, submit: Submit, params: dict[str, dict[str, Any]], now: float) -> list[ClientEffect]:
        """Ask for a request; `params` are parameters by stage name."""
        if self._is_coordinator_silent:
            return [Ended(submit.request, _unanswered("the coordinator does not answer"))]
        self._calls[submit.request] = _Call(submit, params, now)
        return [Send(self._coordinator, submit)]

    def send(self, request: RequestId, port: str, payload: Payload) -> list[ClientEffect]:
        """Send input; only between `Admitted` and `Ended`. What credit forbids waits in order.

        Raises:
            UnknownName: no edge of this request begins at that port.
            BadInput: the port's edges carry another kind.
        """
        call = self._call(request)
        if call is None:
            return []
        edges = self._port(call, port)
        for edge in edges:
            if kind_of(payload) != edge.kind:
                raise BadInput(f"input '{port}' got a {kind_of(payload)} (allowed: {edge.kind})", field=port)
        effects: list[ClientEffect] = []
        for edge in edges if not call.is_rerouted else ():
            effects += self._frames(call, edge, edge.push(payload))
        if call.kept is not None:
            call.kept.add(port, payload, charge(payload))
            if call.kept.is_too_large and not call.is_rerouted:  # then it is here only, and not sent yet
                call.kept = None
        return effects

    def finish(self, request: RequestId, port: str) -> list[ClientEffect]:
        """End an input port."""
        call = self._call(request)
        if call is None:
            return []
        effects: list[ClientEffect] = []
        for edge in self._port(call, port):
            if not call.is_rerouted:
                effects += self._frames(call, edge, edge.finish(Finish()))
        if call.kept is not None:
            call.kept.finish(port)
        return effects

    def is_blocked(self, request: RequestId, port: str) -> bool:
        """Whether input waits for credit on this port; the application should wait for `Writable`."""
        call = self._call(request)
        return call is not None and (call.is_rerouted or any(edge.is_blocked for edge in self._port(call, port)))

    def consume(self, request: RequestId, port: str, payload: Payload) -> list[ClientEffect]:
        """Say that a delivered payload was used; its sender gets the credit back."""
        call = self._calls.get(self._renamed.get(request, request))
        if call is None or call.route is None:
            return []
        for edge in call.in_edges.values():
            if edge is not None and edge.port == port:
                credit = edge.consume(payload)
                return [] if credit is None else [Send(edge.source, credit)]
        return []

    def cancel(self, request: RequestId, reason: str) -> list[ClientEffect]:
        """End a request of ours; nothing more is delivered for it."""
        call = self._call(request)
        if call is None:
            return []
        self._forget(call)
        return [self._cancel(call, reason)]

    def on_unsent(self, request: RequestId, error: OmniBusError) -> list[ClientEffect]:
        """A frame of the request could not be sent (input that can't be encoded): the request ends with that error."""
        call = self._calls.get(request)
        return [] if call is None else self._break_off(call, error)

    def admin(self, call: int, op: str, args: dict[str, Any]) -> list[ClientEffect]:
        """Ask the coordinator for an operation; `Answered` brings the result."""
        if self._is_coordinator_silent:
            return [Answered(call, None, _unanswered("the coordinator does not answer"))]
        self._asked.add(call)
        return [Send(self._coordinator, Admin(call, op, args))]

    def on_coordinator_changed(self, now: float) -> list[ClientEffect]:
        """The coordinator does not know us, so it is new or had given us up; call it with each `Introduce`.

        Carry the effects out after the `Hello` that answers it. What was not admitted is submitted again, and an answer
        to the former attempt no longer counts; its time limit runs on. What was asked is lost, and ends as
        `Unavailable`, safe to retry, and so does what waits for a successor. Admitted requests go on; cancels without
        an answer are repeated.
        """
        effects: list[ClientEffect] = [
            Send(self._coordinator, Cancel(request, "again")) for request in self._cancelling
        ]
        waiting = [call for call in self._calls.values() if call.route is None and not call.is_rerouted]
        effects += [Send(self._coordinator, call.next_attempt(now)) for call in waiting]
        rerouted = [call for call in self._calls.values() if call.route is None and call.is_rerouted]
        return effects + self._end_unanswered("the coordinator was lost before it answered", rerouted)

    def on_coordinator_silent(self) -> list[ClientEffect]:
        """The coordinator answers no heartbeats: nobody waits for it any longer, and admitted requests go on.

        Call it with each heartbeat while that lasts, and `on_coordinator_heard` with whatever comes from it. A request
        that ran when it fell silent may have been rerouted since, and wait for its successor.
        """
        self._is_coordinator_silent = True
        waiting = [call for call in self._calls.values() if call.route is None]
        effects = self._end_unanswered("the coordinator does not answer", waiting)
        # It may only have been stopped for a while, and would admit them then.
        return effects + [Send(self._coordinator, Cancel(call.id, "no longer wanted")) for call in waiting]

    def on_coordinator_heard(self) -> None:
        """It answers again."""
        self._is_coordinator_silent = False

    def _end_unanswered(self, message: str, calls: list[_Call]) -> list[ClientEffect]:
        """End requests that wait for the coordinator, and whatever was asked of it."""
        effects: list[ClientEffect] = []
        for call in calls:
            effects += self._end(call, _unanswered(message))
        effects += [Answered(number, None, _unanswered(message)) for number in sorted(self._asked)]
        self._asked.clear()
        return effects

    def on_peer_lost(self, peer: Peer) -> list[ClientEffect]:
        """An actor is gone; call it with the peer of each `Lost`.

        The coordinator ends the requests that the actor worked on. Where it had finished its work, only its last frames
        may be missing, which nobody but us can tell.
        """
        return self._end_incomplete(peer, StageLost, "was lost before all of its output came")

    def on_link_broken(self, source: Peer) -> list[ClientEffect]:
        """The connection from an actor to us broke; call it with the source of each `Broken` whose target we are.

        As `on_peer_lost`: the actor's last frames may be lost.
        """
        return self._end_incomplete(source, LinkBroken, "lost its connection before all of its output came")

    def _end_incomplete(self, peer: Peer, kind: type[StageLost], what: str) -> list[ClientEffect]:
        """End the requests to which output of a peer may be missing for ever."""
        effects: list[ClientEffect] = []
        for call in list(self._calls.values()):
            route = call.route
            if route is None:
                continue
            for number, edge in call.in_edges.items():
                if route.source(number) == peer and (edge is None or not edge.is_closed):
                    stage = route.edges[number].source
                    error = kind(f"stage '{stage}' (actor {peer.actor}) {what}", stage=stage)
                    effects += self._break_off(call, error)
                    break
        return effects

    # --- frames -------------------------------------------------------------------------------------------

    def on_frame(
        self,
        sender: Sender,
        frame: Admit | Reroute | Reject | Failed | Cancelled | Inquire | AdminReply | Open | Chunk | Close | Credit,
        now: float,
    ) -> list[ClientEffect]:
        """Take a frame; a request that it breaks ends with `BadFrame` and is cancelled."""
        match frame:
            case Chunk():  # nearly all of them, so by the shortest way
                return self._on_chunk(sender, frame)
            case Credit() | Open() | Close():
                return self._on_data(sender, frame)
            case AdminReply(call=call, result=result, error=error):
                if call not in self._asked:
                    return []
                self._asked.discard(call)
                return [Answered(call, result, None if error is None else from_info(error))]
            case Admit(route=route, attempt=attempt):
                return self._on_admit(route, attempt, now)
            case Reroute():
                return self._on_reroute(frame)
            case Reject(request=request, error=error, attempt=attempt):
                call = self._calls.get(request)
                return [] if call is None or not call.is_asked_by(attempt) else self._end(call, from_info(error))
            case Failed(request=request, error=error):
                call = self._calls.get(request)
                return [] if call is None else self._end(call, from_info(error))
            case Cancelled(request=request):
                self._cancelling.pop(request, None)
                return []
            case Inquire(request=request):
                return [] if request in self._calls else [Send(self._coordinator, Cancel(request, "ended"))]

    def _on_admit(self, route: Route, attempt: int, now: float) -> list[ClientEffect]:
        call = self._calls.get(route.request)
        if call is None:
            # Given up while the answer was under way; the coordinator has bound it and must let go.
            self._cancelling[route.request] = Running(route, now)
            return [Send(self._coordinator, Cancel(route.request, "no longer wanted"))]
        if call.route is not None or not call.is_asked_by(attempt):
            return []
        call.route, call.since = route, now
        call.in_edges = dict.fromkeys(route.incoming(OUT))
        call.out_edges, call.in_ports = {}, {}
        for number in route.outgoing(IN):
            edge = OutEdge(route, number, call.params)
            call.out_edges[number] = edge
            call.in_ports.setdefault(route.edges[number].source_port, []).append(edge)
        effects: list[ClientEffect] = [Admitted(call.name, route)]
        return effects + self._replay(call) if call.is_rerouted else effects

    def _on_reroute(self, frame: Reroute) -> list[ClientEffect]:
        """Let a request go on as its successor; one that has put something out, or lost its input, ends instead."""
        call = self._calls.get(frame.request)
        if call is None or call.kept is None:
            ended = [] if call is None else self._end(call, from_info(frame.error))
            return [*ended, Send(self._coordinator, Cancel(frame.successor, "not wanted"))]
        self._forget(call)
        call.id = frame.successor
        self._calls[call.id] = call
        self._renamed[call.name] = call.id
        call.route = None
        call.is_rerouted = True
        return []

    def _replay(self, call: _Call) -> list[ClientEffect]:
        """Send all that was kept over the new route. It is not kept any longer: nothing is rerouted twice."""
        kept, call.kept = call.kept, None
        call.is_rerouted = False
        effects: list[ClientEffect] = []
        for port, payload in kept or ():
            for edge in self._port(call, port):
                frames = edge.finish(Finish()) if payload is None else edge.push(payload)
                effects += self._frames(call, edge, frames)
        writable = [port for port in call.in_ports if not self.is_blocked(call.name, port)]
        return effects + [Writable(call.name, port) for port in writable]

    def _on_chunk(self, sender: Sender, chunk: Chunk) -> list[ClientEffect]:
        call = self._calls.get(chunk.request)
        if call is None or call.route is None:
            return []
        edge = call.in_edges.get(chunk.edge)
        if edge is None or edge.sender != sender:
            self.num_stale_frames += 1
            return []
        call.kept = None
        try:
            edge.accept(chunk)
        except OmniBusError as error:
            return self._break_off(call, error)
        return [Deliver(call.name, edge.port, chunk.payload)]

    def _on_data(self, sender: Sender, frame: Open | Close | Credit) -> list[ClientEffect]:
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
            call.kept = None
            edge.close(frame)
            effects: list[ClientEffect] = [PortEnded(call.name, edge.port, frame.finish)]
            return effects + self._end(call, None) if call.is_complete else effects
        except OmniBusError as error:
            return self._break_off(call, error)

    def _on_open(self, call: _Call, sender: Sender, frame: Open) -> list[ClientEffect]:
        if call.route is None or frame.edge not in call.in_edges or call.route.source(frame.edge).sender != sender:
            self.num_stale_frames += 1
            return []
        if call.in_edges[frame.edge] is not None:
            raise BadFrame(f"edge {frame.edge} of {frame.route.request} was opened twice")
        call.in_edges[frame.edge] = InEdge(call.route, frame.edge)
        return []

    def _on_credit(self, call: _Call, sender: Sender, frame: Credit) -> list[ClientEffect]:
        edge = call.out_edges.get(frame.edge)
        if edge is None or call.route is None or call.route.target(frame.edge).sender != sender:
            self.num_stale_frames += 1
            return []
        port = call.route.edges[frame.edge].source_port
        was_blocked = self.is_blocked(call.name, port)
        effects = self._frames(call, edge, edge.grant(frame))
        if was_blocked and not self.is_blocked(call.name, port):
            effects.append(Writable(call.name, port))
        return effects

    # --- inside -------------------------------------------------------------------------------------------

    def _call(self, name: RequestId) -> _Call | None:
        """Return the request that the application calls so."""
        return self._calls.get(self._renamed.get(name, name))

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.id, None)
        self._renamed.pop(call.name, None)

    def _cancel(self, call: _Call, reason: str) -> Send:
        """Tell the coordinator; a routed request is remembered until it answers, in case it is lost with the cancel."""
        if call.route is not None:
            self._cancelling[call.id] = Running(call.route, call.since)
        return Send(self._coordinator, Cancel(call.id, reason))

    def _break_off(self, call: _Call, error: OmniBusError) -> list[ClientEffect]:
        """End a request that the coordinator takes for a good one."""
        return [*self._end(call, error), self._cancel(call, error.message)]

    def _port(self, call: _Call, port: str) -> list[OutEdge]:
        edges = call.in_ports.get(port)
        if edges is None:
            raise unknown_name("input", port, call.in_ports, field=port)
        return edges

    def _frames(self, call: _Call, edge: OutEdge, frames: list[Any]) -> list[ClientEffect]:
        assert call.route is not None
        target = call.route.target(edge.edge)
        return [Send(target, frame) for frame in frames]

    def _end(self, call: _Call, error: OmniBusError | None) -> list[ClientEffect]:
        """The one place where a request that was not cancelled by us leaves."""
        self._forget(call)
        effects: list[ClientEffect] = [Ended(call.name, error)]
        if error is None:
            for edge in call.out_edges.values():
                effects += self._frames(call, edge, edge.abandon())
        return effects


def _unanswered(message: str) -> Unavailable:
    return Unavailable(message, is_retry_safe=True, retry_after_s=RETRY_AFTER_S)
