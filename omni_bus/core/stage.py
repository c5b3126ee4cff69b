"""The thinking of one stage: edges, inputs, outputs, credit and abort of its live requests."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.core.edge import InEdge, OutEdge
from omni_bus.core.effects import Abort, Add, Feed, Resume, Send, StageEffect, Start, Step, Suspend
from omni_bus.core.member import Running
from omni_bus.core.scheduler import Scheduler
from omni_bus.core.stage_request import StageRequest, State
from omni_bus.core.tombstones import Tombstones
from omni_bus.core.watchdog import Watchdog
from omni_bus.engine import EngineRequest, Failure, Finished, Output, Starved
from omni_bus.errors import BadFrame, InputTooLarge, OmniBusError, StageFailed
from omni_bus.wire.frames import (
    Cancel,
    Cancelled,
    Chunk,
    Close,
    Credit,
    Done,
    Failed,
    Finish,
    Inquire,
    Open,
    RequestStats,
    Route,
    StageStats,
    Unheard,
)
from omni_bus.wire.payloads import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.engine import Event
    from omni_bus.ids import EdgeId, Peer, RequestId, Sender
    from omni_bus.wire.frames import DataFrame
    from omni_bus.wire.payloads import Payload


class EngineShape(Enum):
    """How the engine is driven: the shapes of `omni_bus.engine`, told apart by when they take input."""

    STREAMING = "streaming"
    """Started with a slot, fed as input comes."""
    STEP = "step"
    """Added with its whole input, then stepped."""
    STEP_FED = "step_fed"
    """Added with a slot, fed and stepped: step engines that stream their input, and session engines."""


class StageCore:
    """Frames, engine events and time in, effects out.

    Args:
        stage: the stage's name in routes.
        coordinator: where `Done`, `Failed` and `Cancelled` go.
        shape: how the engine is driven.
        parse_params: from one request's raw parameters to the adapter's own type; raises `BadInput`.
        width: requests in one step, or running at once on a streaming engine.
        max_resident: requests that may hold engine memory at once.
        max_input_bytes: input that one request may hold here before it is refused.
        step_timeout_s: an engine that makes no progress for so long is stuck; 0: it may take for ever.
    """

    def __init__(
        self,
        stage: str,
        coordinator: Peer,
        shape: EngineShape,
        *,
        parse_params: Callable[[dict[str, Any]], Any],
        width: int,
        max_resident: int,
        max_input_bytes: int,
        step_timeout_s: float = 0.0,
    ) -> None:
        self.stage = stage
        self._coordinator = coordinator
        self._shape = shape
        self._parse_params = parse_params
        self._max_input_bytes = max_input_bytes
        self._live: dict[RequestId, StageRequest] = {}
        self._tombstones: Tombstones[Done | Failed | Cancelled] = Tombstones()
        self._scheduler = Scheduler(width, width if shape is EngineShape.STREAMING else max_resident)
        self._watchdog = Watchdog(stage, step_timeout_s)
        self._is_stepping = False
        self._stepping_since = 0.0
        self._batch: tuple[RequestId, ...] = ()
        self._num_steps = 0
        self._ended = {"done": 0, "failed": 0, "cancelled": 0}
        self.num_stale_frames = 0

    # --- what others may ask ------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[Running, ...]:
        """The requests whose end the coordinator waits for."""
        return tuple(
            Running(live.route, live.opened_at, live.in_edges) for live in self._live.values() if live.report is None
        )

    @property
    def is_empty(self) -> bool:
        """Neither this nor the engine holds anything of any request."""
        return not self._live

    @property
    def stats(self) -> StageStats:
        """Counts for health, status and tests."""
        counts = self._scheduler.counts
        pending = sum(edge.pending_bytes for live in self._live.values() for edge in live.out_edges.values())
        buffered = sum(live.input_bytes for live in self._live.values())
        return StageStats(
            active=counts.resident,
            waiting=counts.waiting,
            suspended=counts.suspended,
            steps=self._num_steps,
            buffered_bytes=pending + buffered,
            **self._ended,
        )

    # --- frames -------------------------------------------------------------------------------------------

    def on_frame(self, sender: Sender, frame: DataFrame | Cancel | Inquire, now: float) -> list[StageEffect]:
        """Take a frame; a request that it breaks fails alone."""
        request = frame.route.request if isinstance(frame, Open) else frame.request
        try:
            match frame:
                case Chunk():
                    return self._on_chunk(sender, frame, now)
                case Credit():
                    return self._on_credit(sender, frame, now)
                case Open():
                    return self._on_open(sender, frame, now)
                case Close():
                    return self._on_close(sender, frame, now)
                case Cancel():
                    return self._on_cancel(request, now)
                case Inquire():
                    return self._on_inquire(request)
        except OmniBusError as error:
            return self._fail(request, error, now)

    def _on_open(self, sender: Sender, frame: Open, now: float) -> list[StageEffect]:
        route = frame.route
        if frame.edge not in route.incoming(self.stage) or route.source(frame.edge).sender != sender:
            self.num_stale_frames += 1
            return []
        if route.request in self._tombstones:
            return self._on_late_open(route)
        live = self._live.get(route.request)
        effects: list[StageEffect] = []
        if live is None:
            live, effects = self._begin(route, frame.params, now)
        if live.in_edges[frame.edge] is not None:
            raise BadFrame(f"edge {frame.edge} of {route.request} was opened twice")
        live.in_edges[frame.edge] = InEdge(route, frame.edge)
        return effects

    def _on_late_open(self, route: Route) -> list[StageEffect]:
        """The request has ended here. Who opens it anew, under another coordinator, would wait for ever.

        A cancel by a former coordinator, of an attempt of which its client never heard, is what leaves such an end. A
        coordinator that knows of the end already ignores it.
        """
        report = self._tombstones.epitaph(route.request)
        return [Send(self._coordinator, report)] if isinstance(report, Cancelled) else []

    def _begin(
        self, route: Route, params: dict[str, dict[str, Any]], now: float
    ) -> tuple[StageRequest, list[StageEffect]]:
        state = State.GATHERING if self._shape is EngineShape.STEP else State.WAITING
        live = StageRequest(route, self.stage, now, state=state)
        self._live[route.request] = live
        for edge in route.outgoing(self.stage):
            out = OutEdge(route, edge, params)
            live.out_edges[edge] = out
            live.out_ports.setdefault(route.edges[edge].source_port, []).append(out)
        live.engine_request = EngineRequest(
            id=route.request,
            params=self._parse_params(params.get(self.stage, {})),
            outputs=frozenset(live.out_ports),
            priority=route.priority,
            deadline=None if route.timeout_s is None else now + route.timeout_s,
            inputs=frozenset(route.edges[edge].target_port for edge in live.in_edges),
        )
        if state is State.GATHERING:
            return live, []
        self._enqueue(live)
        return live, self._start(now)

    def _on_chunk(self, sender: Sender, frame: Chunk, now: float) -> list[StageEffect]:
        found = self._in_edge(sender, frame.request, frame.edge)
        if found is None:
            return []
        live, edge = found
        edge.accept(frame)
        if live.state is State.FLUSHING:
            return self._consumed(edge, frame.payload)
        if self._shape is not EngineShape.STEP:
            return self._feed(live, edge, (frame.payload,), now, is_last=False)
        live.input_bytes += size_of(frame.payload)
        if live.input_bytes > self._max_input_bytes:
            raise InputTooLarge(
                f"stage '{self.stage}' takes at most {self._max_input_bytes} bytes of input",
                field=edge.port,
                stage=self.stage,
            )
        live.inputs.setdefault(edge.port, []).append(frame.payload)
        return self._consumed(edge, frame.payload)

    def _on_close(self, sender: Sender, frame: Close, now: float) -> list[StageEffect]:
        found = self._in_edge(sender, frame.request, frame.edge)
        if found is None:
            return []
        live, edge = found
        edge.close(frame)
        if live.state is State.FLUSHING:
            return self._after_output(live, now)
        if self._shape is not EngineShape.STEP:
            return self._feed(live, edge, (), now, is_last=True)
        if not live.is_input_complete:
            return []
        live.move("input complete")
        self._enqueue(live)
        return self._start(now)

    def _on_credit(self, sender: Sender, frame: Credit, now: float) -> list[StageEffect]:
        live = self._live.get(frame.request)
        edge = None if live is None else live.out_edges.get(frame.edge)
        if live is None or edge is None or live.state is State.ABORTING:
            return []
        if edge.target.sender != sender:
            self.num_stale_frames += 1
            return []
        return _sent(edge, edge.grant(frame)) + self._after_output(live, now)

    def _on_cancel(self, request: RequestId, now: float) -> list[StageEffect]:
        live = self._live.get(request)
        if live is None:
            if request not in self._tombstones:
                self._tombstones.bury(request, Cancelled(request))
            return [Send(self._coordinator, Cancelled(request))]
        if live.state is State.ABORTING:
            live.is_cancel_owed = True
            return []
        if live.state is State.RUNNING:
            live.is_cancel_owed = True
            return [self._abort(live, "cancelled", now)]
        self._end(request, "cancelled", Cancelled(request))
        return [Send(self._coordinator, Cancelled(request)), *self._start(now)]

    def _on_inquire(self, request: RequestId) -> list[StageEffect]:
        """A new coordinator may have missed how the request ended, or wait for what has not begun."""
        live = self._live.get(request)
        if live is None and request not in self._tombstones:
            return [Send(self._coordinator, Unheard(request))]
        report = self._tombstones.epitaph(request) if live is None else live.report
        return [] if report is None else [Send(self._coordinator, report)]

    def on_unsent(self, request: RequestId, error: OmniBusError, now: float) -> list[StageEffect]:
        """A frame of the request could not be sent (a payload that can't be encoded): the request fails alone."""
        return self._fail(request, error, now)

    # --- the engine ---------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[StageEffect]:
        """The watchdog's timer is due."""
        owing = [self._stepping_since] if self._is_stepping else []
        is_idle = not self._is_stepping
        for live in self._live.values():
            if live.state is State.RUNNING or live.state is State.ABORTING:
                is_idle = False
            runs_by_itself = self._shape is EngineShape.STREAMING and live.state is State.RUNNING
            if live.state is State.ABORTING or (runs_by_itself and live.can_advance):
                owing.append(live.moved_at)
        return self._watchdog.on_timer(min(owing, default=None), now, is_idle=is_idle)

    def on_events(self, events: Iterable[Event], now: float) -> list[StageEffect]:
        """Take what the engine says of its requests."""
        effects: list[StageEffect] = []
        for event in events:
            live = self._live.get(event.request)
            if live is None or live.state is not State.RUNNING:
                continue
            live.moved_at = now
            try:
                effects += self._on_event(live, event, now)
            except Exception as error:  # noqa: BLE001 (an engine may yield anything; it costs one request, not the next event)
                effects += self._fail(event.request, stage_failed(error, self.stage), now)
        return effects

    def _on_event(self, live: StageRequest, event: Event, now: float) -> list[StageEffect]:
        match event:
            case Output(port=port, payload=payload):
                return self._on_output(live, port, payload, now)
            case Finished(finish=finish):
                return self._on_finished(live, finish, now)
            case Starved(request=request):
                # Said at the end of a step; input that came during it is news to the engine.
                if not live.is_fed:
                    self._scheduler.starve(request)
                return []
            case Failure(request=request, error=error):
                live.move("engine finished")
                return self._fail(request, error, now)

    def on_stepped(self, now: float) -> list[StageEffect]:
        """The step that was asked for is over."""
        self._is_stepping = False
        self._num_steps += 1
        effects: list[StageEffect] = []
        if self._shape is EngineShape.STEP_FED:
            for request in self._batch:
                live = self._live.get(request)
                if live is not None and live.state is State.RUNNING:
                    used, live.in_step = live.in_step, []
                    for edge, payload in used:
                        effects += self._consumed(edge, payload)
        self._batch = ()
        return effects + self._start(now)

    def on_aborted(self, request: RequestId, now: float) -> list[StageEffect]:
        """The engine holds nothing of the request any more."""
        live = self._live.get(request)
        if live is None or live.state is not State.ABORTING:
            return []
        live.move("engine let go")
        self._end(request, live.outcome, live.report or Cancelled(request, 1))
        owed: list[StageEffect] = [Send(self._coordinator, Cancelled(request, 1))] if live.is_cancel_owed else []
        return owed + self._start(now)

    def on_taken(self, request: RequestId, port: str, payload: Payload, now: float) -> list[StageEffect]:
        """A streaming engine took an input payload: its sender gets the credit back."""
        live = self._live.get(request)
        if live is None or live.state is not State.RUNNING:
            return []
        live.moved_at = now
        edge = next(edge for edge in live.in_edges.values() if edge is not None and edge.port == port)
        return self._consumed(edge, payload)

    def _on_output(self, live: StageRequest, port: str, payload: Payload, now: float) -> list[StageEffect]:
        if live.first_output_at is None:
            live.first_output_at = now
        effects: list[StageEffect] = []
        edges = live.out_ports.get(port, ())
        is_blocked = False
        for edge in edges:
            try:
                frames = edge.push(payload)
            except InputTooLarge as error:  # not the client's input: what the engine made of it
                raise StageFailed(f"stage '{self.stage}' failed: {error.message}", stage=self.stage) from error
            effects += [Send(edge.target, frame) for frame in frames]
            # A chunk by itself has gone out at once, as nearly all of them do.
            is_blocked = is_blocked or ((len(frames) != 1 or type(frames[0]) is not Chunk) and edge.is_blocked)
        if is_blocked == live.is_suspended:
            return effects
        return effects + self._after_output(live, now)

    def _on_finished(self, live: StageRequest, finish: Finish, now: float) -> list[StageEffect]:
        live.move("engine finished")
        live.finish = finish
        if live.route.wants_metrics:
            finish = self._with_metrics(live, finish, now)
        self._scheduler.remove(live.route.request)
        effects: list[StageEffect] = []
        for edge in live.out_edges.values():
            effects += _sent(edge, edge.finish(finish))
        for edge in live.in_edges.values():
            credit = None if edge is None else edge.discard()
            if edge is not None and credit is not None:
                effects.append(Send(edge.source, credit))
        return effects + self._after_output(live, now) + self._start(now)

    def _after_output(self, live: StageRequest, now: float) -> list[StageEffect]:
        """Suspend, resume or complete a request, by whether its outputs could be sent."""
        request = live.route.request
        if live.state is State.FLUSHING:
            if not live.is_input_complete or any(not edge.is_closed for edge in live.out_edges.values()):
                return []
            live.move("edges closed")
            stats = live.stats(now)
            done = Done(request, stats)
            self._end(request, "done", done)
            return [Send(self._coordinator, done)]
        if live.state is not State.RUNNING or live.is_blocked == live.is_suspended:
            return []
        live.is_suspended = live.is_blocked
        if live.is_suspended:
            self._scheduler.suspend(request)
        else:
            self._scheduler.resume(request)
        live.moved_at = now
        if self._shape is EngineShape.STREAMING:
            return [Suspend(request) if live.is_suspended else Resume(request)]
        return self._start(now)

    # --- inside -------------------------------------------------------------------------------------------

    def _enqueue(self, live: StageRequest) -> None:
        wanted = live.engine_request
        assert wanted is not None
        self._scheduler.add(wanted.id, wanted.priority, wanted.deadline)

    def engine_request(self, request: RequestId) -> EngineRequest:
        """The request as the engine sees it; only for one that an effect just named."""
        wanted = self._live[request].engine_request
        assert wanted is not None
        return wanted

    def _start(self, now: float) -> list[StageEffect]:
        """Give free slots to waiting requests, then step if there is something to step."""
        effects: list[StageEffect] = []
        for request in self._scheduler.start():
            live = self._live[request]
            live.move("slot free")
            live.moved_at = now
            effects += self._watchdog.watch(now)
            if self._shape is EngineShape.STREAMING:
                effects.append(Start(request))
            else:
                effects.append(Add(request, live.inputs if self._shape is EngineShape.STEP else {}))
            held, live.inputs, live.input_bytes = live.inputs, {}, 0
            if self._shape is not EngineShape.STEP:
                effects += self._feed_held(live, held)
        if self._shape is EngineShape.STREAMING or self._is_stepping:
            return effects
        batch = self._scheduler.batch()
        if batch:
            self._is_stepping = True
            self._stepping_since = now
            self._batch = batch
            if self._shape is EngineShape.STEP_FED:
                for request in batch:
                    live = self._live[request]
                    live.is_fed = False
                    live.in_step, live.untaken = live.untaken, []
            effects.append(Step(batch))
        return effects

    def _feed(
        self, live: StageRequest, edge: InEdge, payloads: tuple[Payload, ...], now: float, *, is_last: bool
    ) -> list[StageEffect]:
        """Bring input to an engine that takes it as it comes; before there is a slot, credit bounds what is held."""
        request = live.route.request
        if live.state is State.WAITING:
            live.inputs.setdefault(edge.port, []).extend(payloads)
            live.input_bytes += sum(size_of(payload) for payload in payloads)
            return []
        if live.state is not State.RUNNING:
            return []
        if edge.num_unconsumed == len(payloads):  # it may have waited for this
            live.moved_at = now
        effects: list[StageEffect] = [Feed(request, edge.port, payloads, is_last)]
        if self._shape is EngineShape.STREAMING:
            return effects
        self._scheduler.wake(request)
        self._give(live, edge, payloads)
        return effects + self._start(now)

    def _give(self, live: StageRequest, edge: InEdge, payloads: tuple[Payload, ...]) -> None:
        """Note input of a step-fed engine: its credit goes back after a step with it, not before.

        So a request that is suspended, or waits behind others, holds its senders back.
        """
        live.is_fed = True
        live.untaken += [(edge, payload) for payload in payloads]

    def _feed_held(self, live: StageRequest, held: dict[str, list[Payload]]) -> list[StageEffect]:
        effects: list[StageEffect] = []
        for edge in live.in_edges.values():
            if edge is None or (edge.port not in held and not edge.is_closed):
                continue
            payloads = tuple(held.get(edge.port, ()))
            effects.append(Feed(live.route.request, edge.port, payloads, edge.is_closed))
            if self._shape is EngineShape.STEP_FED:
                self._give(live, edge, payloads)
        return effects

    def _in_edge(self, sender: Sender, request: RequestId, edge: EdgeId) -> tuple[StageRequest, InEdge] | None:
        """Find the open edge of a data frame.

        None for a frame of a request that is not live (its cancel overtook it) or from somebody who is not the
        edge's source (a former incarnation).
        """
        live = self._live.get(request)
        if live is None:
            return None
        found = live.in_edges.get(edge)
        if found is None or found.sender != sender:
            self.num_stale_frames += 1
            return None
        return live, found

    def _consumed(self, edge: InEdge, payload: Payload) -> list[StageEffect]:
        credit = edge.consume(payload)
        return [] if credit is None else [Send(edge.source, credit)]

    def _fail(self, request: RequestId, error: OmniBusError, now: float) -> list[StageEffect]:
        """End a request with an error; what the engine still holds of it is aborted first."""
        live = self._live.get(request)
        if live is None:
            return []
        if live.state is State.ABORTING:
            return []
        error.stage = error.stage or self.stage
        report = live.report = Failed(request, error.to_info())
        effects: list[StageEffect] = [Send(self._coordinator, report)]
        if live.state is State.RUNNING:
            return [*effects, self._abort(live, "failed", now)]
        self._end(request, "failed", report)
        return effects + self._start(now)

    def _abort(self, live: StageRequest, outcome: str, now: float) -> Abort:
        """Take a request out of steps and have the engine drop it; its slot stays taken until it did."""
        live.move(outcome)
        live.outcome = outcome
        live.moved_at = now
        self._scheduler.starve(live.route.request)
        return Abort(live.route.request)

    def _end(self, request: RequestId, outcome: str, report: Done | Failed | Cancelled) -> None:
        """The one place where a request leaves this stage."""
        del self._live[request]
        self._scheduler.remove(request)
        self._tombstones.bury(request, report)
        self._ended[outcome] += 1

    def _with_metrics(self, live: StageRequest, finish: Finish, now: float) -> Finish:
        """Return an end that also says what this stage, and those before it, did for the request."""
        found: dict[str, Any] = {}
        for edge in live.in_edges.values():
            if edge is not None and edge.finish is not None:
                found |= edge.finish.detail.get("metrics", {})
        found[self.stage] = request_metrics(live.stats(now), finish.reason)
        return msgspec.structs.replace(finish, detail=finish.detail | {"metrics": found})


def request_metrics(stats: RequestStats, reason: str) -> dict[str, Any]:
    """Return a stage's account of a request as ends of outputs carry it."""
    return {
        "finish_reason": reason,
        "first_output_s": stats.first_output_s,
        "total_s": stats.total_s,
        "chunks_out": stats.chunks_out,
        "prompt_tokens": stats.usage.prompt_tokens,
        "completion_tokens": stats.usage.completion_tokens,
    }


def _sent(edge: OutEdge, frames: list[DataFrame]) -> list[StageEffect]:
    return [Send(edge.target, frame) for frame in frames]


def stage_failed(error: BaseException, stage: str) -> OmniBusError:
    """Return an engine's own exception as the error that its request ends with."""
    if isinstance(error, OmniBusError):
        return error
    try:
        said = f": {error}"
    except Exception:  # noqa: BLE001 (an engine's exception may not even be able to say what it is)
        said = ""
    return StageFailed(f"stage '{stage}' failed: {type(error).__name__}{said}", stage=stage)
