"""The actors of a virtual deployment: a real core each, and around it what a real process has, without sockets."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

from omni_bus.core.binding import tokens_of
from omni_bus.core.client import ClientCore
from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.effects import DropTimer, Forget, Leave, Report, Send, SetLevel, SetTimer, Stall
from omni_bus.core.member import COORDINATOR, Member, coordinator_peer
from omni_bus.core.recovery import needed_stages, origin
from omni_bus.core.request import State as RequestState
from omni_bus.core.resting import Resting
from omni_bus.core.stage import EngineShape, StageCore
from omni_bus.core.stage_request import State as StageState
from omni_bus.core.tombstones import MAX_TOMBSTONES
from omni_bus.core.watchdog import WATCH
from omni_bus.errors import BadInput, Unavailable
from omni_bus.ids import Peer, Sender
from omni_bus.sim.applications import Application
from omni_bus.sim.engines import MAX_OUTPUTS_PER_STEP, EngineEffect, ScriptedEngine
from omni_bus.sim.ledger import Violation
from omni_bus.sim.scenario import sources
from omni_bus.wire.frames import Broken, Introduce, Lost, Ping, Refused, Rest, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.core.edge import InEdge, OutEdge
    from omni_bus.core.effects import ClientEffect, Common, StageEffect, TimerKey
    from omni_bus.core.quota import Quota
    from omni_bus.core.request import Request
    from omni_bus.ids import RequestId
    from omni_bus.sim.scenario import RequestPlan
    from omni_bus.sim.world import World
    from omni_bus.wire.frames import AnyFrame
    from omni_bus.wire.payloads import Payload

MEMBER_FRAMES = (Welcome, Refused, Introduce, Ping, Lost, Broken)
_HOUSEKEEPING = frozenset({"heartbeat", "alive", "strangers"})

MAX_LATE_HOPS = 25
"""Mean delays that a submit, its admission and a hello may take together on links that don't stall."""

STEP_TIMEOUT_S = 2.0
"""Scripted steps take hundredths of seconds."""


class Process(ABC):
    """One process: its identity, its timers, and the way from effects to the world."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.peer = Peer(name, world.new_incarnation(), f"sim://{name}")
        self.is_alive = True
        self.has_retired = False
        self.is_settled = False
        """It has left, and all that it ever sent has arrived."""
        self.linked: dict[Peer, None] = {}
        """Whom it has sent something, and has not been told to forget since."""
        self._timers: dict[TimerKey, object] = {}

    @abstractmethod
    def start(self) -> None:
        """Say hello."""

    @abstractmethod
    def successor(self) -> Process:
        """Return the process that takes this one's place after its death."""

    @abstractmethod
    def on_frame(self, sender: Sender, frame: AnyFrame) -> None:
        """Take a frame."""

    @abstractmethod
    def on_timer(self, key: TimerKey) -> None:
        """Take a timer."""

    @abstractmethod
    def on_broken(self, peer: Peer) -> None:
        """Learn that a connection of this process broke."""

    @abstractmethod
    def held(self) -> str:
        """Tell what is held of any request; empty for nothing."""

    def die(self) -> None:
        """Stop at once."""
        self.is_alive = False

    def carry(self, effects: Iterable[Common | StageEffect | ClientEffect | SetLevel]) -> None:
        """Carry effects out, in order."""
        for effect in effects:
            match effect:
                case Send(peer=peer, frame=frame):
                    self.linked[peer] = None
                    self.world.send(self, peer, frame)
                case SetTimer(key=key, at=at):
                    mark = self._timers[key] = object()
                    is_due = key[0] not in _HOUSEKEEPING
                    self.world.at(max(at, self.world.now), self._fire, (key, mark), is_due=is_due)
                case DropTimer(key=key):
                    self._timers.pop(key, None)
                case Report() | Forget():
                    self.world.trace("   report by", self, effect)
                    if isinstance(effect, Forget):
                        self.linked.pop(effect.peer, None)
                    if isinstance(effect, Report):
                        self.world.on_report(effect.event, effect.fields.get("name", ""))
                case Leave(error=error):
                    raise Violation(f"{self.name} was told to leave: {error}")
                case _:
                    self._carry_own(effect)

    def _carry_own(self, effect: Any) -> None:
        raise Violation(f"{self.name} can't carry out {effect}")

    def _fire(self, key: TimerKey, mark: object) -> None:
        if self.is_alive and self._timers.get(key) is mark:
            del self._timers[key]
            self.world.trace("timer", self, key)
            self.on_timer(key)

    def _held_timers(self) -> str:
        left = [key for key in self._timers if key[0] not in _HOUSEKEEPING]
        return f"{self.name} has timers {left}" if left else ""


class CoordinatorProcess(Process):
    """The coordinator."""

    def __init__(self, world: World, awaited: list[str] | None = None) -> None:
        super().__init__(world, COORDINATOR)
        scenario = world.scenario
        self.core = CoordinatorCore(
            self.peer,
            scenario.pipelines,
            scenario.heartbeat_s,
            scenario.quotas,
            world.arrangement,
            awaited or (),
            sorted(world.clients),
        )
        self._bound: set[RequestId] = set()
        self._live: set[RequestId] = set()
        self.entered: set[RequestId] = set()
        """Every request that it ever held."""

    def start(self) -> None:
        """Begin."""
        self.world.trace("up:", self)
        self.carry(self.core.start(self.world.now))

    def successor(self) -> Process:
        """Return the process that comes after the death of this one; it is told who serves."""
        stages = (process for process in self.world.processes.values() if isinstance(process, StageProcess))
        serving = (process for process in stages if process.is_alive and process.member.is_ready)
        return CoordinatorProcess(self.world, [process.name for process in serving])

    def on_frame(self, sender: Sender, frame: AnyFrame) -> None:
        """Take a frame."""
        self.carry(self.core.on_frame(sender, frame, self.world.now))
        self.check()

    def on_timer(self, key: TimerKey) -> None:
        """Take a timer."""
        self.carry(self.core.on_timer(key, self.world.now))
        self.check()

    def on_broken(self, peer: Peer) -> None:
        """Learn that a connection of this process broke."""
        if self.is_alive:
            self.carry(self.core.on_link_broken(peer, self.world.now))
            self.check()

    def drain(self) -> None:
        """Admit nothing any more."""
        self.carry(self.core.drain(self.world.now))
        self.check()

    def cut(self) -> None:
        """End what still runs."""
        if self.is_alive:
            self.carry(self.core.cut(self.world.now))
            self.check()

    def check(self) -> None:
        """Compare the counts that decide with the table that they are drawn from.

        Raises:
            Violation: they differ, a limit is passed, or a request ended twice or came back.
        """
        core = self.core
        requests = core._requests
        held = core._lifecycle.held
        if held.keys() != {request for request, entry in requests.items() if entry.state is RequestState.HELD}:
            raise Violation(f"waiting for a replica are {list(held)}, which differs from the table")
        self.world.num_held += len(held)
        for request in held:
            with contextlib.suppress(
                Unavailable
            ):  # it lost another one meanwhile, and hears of that when it is its turn
                if core._intake.replicas(requests[request].edges, self.world.now) is not None:
                    raise Violation(f"{request} waits for a replica, and there is one of each stage")
        for request, entry in requests.items():
            if entry.route is not None and not entry.is_adopted and request not in self._bound:
                self._bound.add(request)
                self.world.check_admission(entry.route.stages)
        if self._live != requests.keys():
            for request in requests.keys() - self._live:
                if request in self.entered:
                    raise Violation(f"{request} ended and came back")
                self.entered.add(request)
                self._check_successor(request, requests[request])
                self.world.num_adopted += requests[request].is_adopted
            self._live = set(requests)
        ended = sum(core._lifecycle.ended[outcome] for outcome in ("done", "failed", "cancelled", "rerouted"))
        num_ending = sum(1 for entry in requests.values() if entry.state is RequestState.ENDING)
        if ended != len(self.entered) - len(requests) + num_ending:
            raise Violation(f"{ended} terminal transitions of {len(self.entered)} requests, {len(requests)} live")
        pending = Counter(peer.sender for entry in requests.values() for peer in entry.pending.values())
        if pending != core._bindings._outstanding:
            raise Violation(f"outstanding work is {pending}, counted is {core._bindings._outstanding}")
        work: Counter[Sender] = Counter()
        for request, entry in requests.items():
            for stage, peer in entry.pending.items():
                counted = core._bindings._work.get((request, stage), -1)
                if not 0 <= counted <= tokens_of(entry.submit):
                    raise Violation(f"{request} counts {counted} at {peer.actor}, its tokens are {entry.submit.tokens}")
                work[peer.sender] += counted
        if work != core._bindings._tokens or len(core._bindings._work) != pending.total():
            raise Violation(f"outstanding work is {work}, counted are {core._bindings._tokens}")
        for name, admission in core._admission.items():
            entries = {r: e for r, e in requests.items() if e.pipeline.name == name}
            queued = {r for r, e in entries.items() if e.state is RequestState.QUEUED}
            recovering = {r for r, e in entries.items() if e.state is RequestState.RECOVERING}
            running = entries.keys() - queued - recovering
            if admission._queued.keys() != queued or admission._in_flight.keys() != running:
                raise Violation(f"admission of {name} differs from the table")
            counts = admission.counts
            num_adopted = sum(1 for e in entries.values() if e.is_adopted)
            num_back = sum(1 for r in queued if entries[r].is_back)
            if counts.in_flight > counts.max_in_flight + num_adopted or counts.queued > counts.max_queued + num_back:
                raise Violation(f"limits of {name} are passed: {counts}")
            if counts.queued_bytes != sum(entries[r].submit.input_bytes for r in queued):
                raise Violation(f"bytes that wait for {name} are miscounted: {counts}")
            if counts.queued_bytes > counts.max_queued_bytes and not num_back:
                raise Violation(f"limits of {name} are passed: {counts}")
            for caller, quota in self.world.scenario.quotas.items():
                self._check_caller(caller, quota, [e for e in entries.values() if e.submit.key == caller])
        waiting = core._recovery._waiting
        if waiting != {r: e for r, e in requests.items() if e.state is RequestState.RECOVERING}:
            raise Violation(f"{list(waiting)} wait for replicas, the table differs")
        for request, entry in waiting.items():
            if core._intake.missing(entry.edges) is None:
                raise Violation(f"{request} waits, not for long, and no stage has lost its last replica")
        self._check_deadlines()

    def _check_deadlines(self) -> None:
        """Check that a request whose client lives has its time limit from its submit on, whoever took it over.

        Raises:
            Violation: it has more.
        """
        scenario = self.world.scenario
        if any(fault.kind == "stall" for fault in scenario.faults):
            return
        # A submit or a hello that waits for a new coordinator says nothing of how long it waited.
        held = [fault for fault in scenario.faults if fault.kind == "kill_coordinator" and not fault.loses_frames]
        late_s = MAX_LATE_HOPS * scenario.delay_s + sum(fault.down_s or 0.0 for fault in held)
        for request, entry in self.core._requests.items():
            client = self.world.processes.get(entry.client.actor)
            if entry.deadline is None or not isinstance(client, GatewayProcess) or client.peer != entry.client:
                continue
            if not self._may_run(entry):
                continue
            is_known = self.core._membership.get(entry.client.sender) is not None and request in client.core._calls
            due_at = self.world.deadlines.get(origin(request))
            if is_known and due_at is not None and entry.deadline > max(due_at + late_s, self.world.now):
                raise Violation(f"{request} may run until {entry.deadline:.3f}, its limit was {due_at:.3f}")

    @staticmethod
    def _may_run(entry: Request) -> bool:
        """Whether a time limit matters: a request that ends has none, however late its client tells of it."""
        return entry.state is not RequestState.ENDING

    def _check_successor(self, request: RequestId, entry: Request) -> None:
        """Check that a request may run again.

        Raises:
            Violation: it is a successor's successor, or its work must not be repeated.
        """
        if origin(request) != request and not entry.is_adopted:
            if origin(origin(request)) != origin(request):
                raise Violation(f"{request} is the successor of a successor")
            if entry.pipeline.non_idempotent & set(needed_stages(entry.edges)):
                raise Violation(f"{request} repeats work that must not be repeated")

    def _check_caller(self, caller: str, quota: Quota, entries: list[Request]) -> None:
        entries = [e for e in entries if e.state is not RequestState.RECOVERING]
        num_queued = sum(1 for e in entries if e.state is RequestState.QUEUED)
        num_back = sum(1 for e in entries if e.state is RequestState.QUEUED and e.is_back)
        num_adopted = sum(1 for e in entries if e.is_adopted)
        if quota.max_queued is not None and num_queued > quota.max_queued + num_back:
            raise Violation(f"{num_queued} requests of '{caller}' wait, {quota} allows fewer")
        if quota.max_in_flight is not None and len(entries) - num_queued > quota.max_in_flight + num_adopted:
            raise Violation(f"{len(entries) - num_queued} requests of '{caller}' run, {quota} allows fewer")

    def held(self) -> str:
        """Tell what is held; empty for nothing."""
        core = self.core
        if core._requests:
            return f"coordinator holds {list(core._requests.values())}"
        if core._bindings.total or core._health._rounds or len(core._tombstones) > MAX_TOMBSTONES:
            return "coordinator holds bindings or health rounds or too many tombstones"
        if any(a.counts.in_flight or a.counts.queued or a._queue._levels for a in core._admission.values()):
            return "coordinator holds places"
        return self._held_timers()


class MemberProcess(Process):
    """A process that is a member: everyone but the coordinator."""

    member: Member

    def start(self) -> None:
        """Say hello."""
        self.carry(self.member.start(self.world.now))
        self.world.after(self.world.rng.random() * 0.002, self._ready)

    def on_broken(self, peer: Peer) -> None:
        """Learn that a connection of this process broke."""
        if self.is_alive:
            self.carry(self.member.on_link_broken(peer, self.world.now))

    def _ready(self) -> None:
        if self.is_alive:
            self.carry(self.member.ready())

    def on_timer(self, key: TimerKey) -> None:
        """Take a timer."""
        if key[0] != "heartbeat":
            raise Violation(f"{self.name} has an unknown timer {key}")
        self.carry(self.member.on_timer(self.world.now))

    def held(self) -> str:
        """Tell what is held; empty for nothing."""
        return self._held_timers()


class StageProcess(MemberProcess):
    """One replica of a stage."""

    def __init__(self, world: World, stage: str, replica: int) -> None:
        super().__init__(world, f"{stage}.{replica}")
        self.stage = stage
        self.plan = world.scenario.stages[stage]
        self.replica = replica
        self.has_stalled = False
        is_streaming = self.plan.shape is EngineShape.STREAMING
        self.core_max_resident = self.plan.width if is_streaming else self.plan.max_resident
        coordinator = coordinator_peer("sim://coordinator")
        self.core = StageCore(
            stage,
            coordinator,
            self.plan.shape,
            parse_params=_parse_params,
            width=self.plan.width,
            max_resident=self.plan.max_resident,
            max_input_bytes=100_000,
            step_timeout_s=STEP_TIMEOUT_S,
        )
        self.member = Member(
            self.peer,
            "stage",
            coordinator,
            stage=stage,
            replica=replica,
            live=lambda: self.core.running,
            stats=lambda: self.core.stats,
            linked=lambda: self.linked,
        )
        self._sources = {name: sources(pipeline) for name, pipeline in world.scenario.pipelines.items()}
        self.engine = ScriptedEngine(self)
        self.resting = Resting(self.member, lambda: self.core.is_empty)

    def successor(self) -> Process:
        """Return the process that comes after the death of this one."""
        return StageProcess(self.world, self.stage, self.replica)

    def _ready(self) -> None:
        if self.is_alive:
            self.carry(self.member.progress("weights", 1.0))
        super()._ready()

    def retire(self, on_left: Callable[[StageProcess], None]) -> None:
        """Leave once all that was sent has been delivered, and say so.

        Raises:
            Violation: it has something left to do. One that was given up behind a stalled link ends with what it had.
        """
        is_known = self.world.coordinator.core._membership.get(self.peer.sender) is not None
        if self._unfinished() and is_known:
            raise Violation(f"{self.name} is to retire and holds {self._unfinished()}")
        self.world.at(self.world.delivered_at(self), self._leave, (on_left,), is_due=True)

    def _unfinished(self) -> list[RequestId]:
        """Requests that anybody waits for; what has failed is over, though the engine may still let go of it."""
        return [running.route.request for running in self.core.running]

    def _leave(self, on_left: Callable[[StageProcess], None]) -> None:
        if self.is_alive:
            self.has_retired = True
            self.is_settled = not self._unfinished() and not self.world.faults.has_unseen_break(self)
            self.carry(self.member.goodbye("retired", is_settled=self.is_settled))
            self.die()
        on_left(self)

    def on_frame(self, sender: Sender, frame: AnyFrame) -> None:
        """Take a frame."""
        if isinstance(frame, Rest):
            self.carry(self.resting.on_rest(frame))
            return
        if isinstance(frame, MEMBER_FRAMES):
            self.carry(self.member.on_frame(frame, self.world.now))
            return
        self.carry(self.core.on_frame(sender, frame, self.world.now))  # pyright: ignore[reportArgumentType]
        request = getattr(frame, "request", None)
        if request is not None:
            self.check(request)

    def on_timer(self, key: TimerKey) -> None:
        """Take a timer."""
        if key == WATCH:
            self.carry(self.core.on_timer(self.world.now))
        else:
            super().on_timer(key)

    def carry(self, effects: Iterable[Common | StageEffect | ClientEffect | SetLevel]) -> None:
        """Carry effects out, in order; when no request is left, what it was told of sleep."""
        super().carry(effects)
        if not self.resting.is_idle and self.core.is_empty:
            super().carry(self.resting.go_on())

    def _carry_own(self, effect: EngineEffect | SetLevel | Stall) -> None:
        if isinstance(effect, SetLevel):
            self.engine.set_level(effect)
            return
        if not isinstance(effect, Stall):
            self.engine.order(effect)
            return
        self.has_stalled = True
        self.world.num_stalled += 1
        self.carry(self.member.stalled(effect.seconds, self.world.now))
        if not self.world.scenario.has_supervisor:
            self.world.faults.end_stalled(self)

    def in_ports(self, request: RequestId) -> list[str]:
        """Input ports of a live request."""
        route = self.core._live[request].route
        return [route.edges[edge].target_port for edge in route.incoming(self.stage)]

    def receive(self, request: RequestId, port: str, payload: Payload) -> None:
        """Check an input of the engine."""
        self.world.ledger.receive(request, self._source(request, port), f"{self.name}.{port}", payload)

    def receive_end(self, request: RequestId, port: str) -> None:
        """Check the end of an input port."""
        self.world.ledger.receive_end(request, self._source(request, port), f"{self.name}.{port}")

    def _source(self, request: RequestId, port: str) -> str:
        return self._sources[origin(request).partition(":")[2]][self.stage, port]

    def check(self, request: RequestId) -> None:
        """Check credit and memory of a request that something happened to.

        Raises:
            Violation: credit is negative or exceeded, or more is held than it allows.
        """
        live = self.core._live.get(request)
        if live is None:
            return
        for edge in live.out_edges.values():
            check_out_edge(edge, f"{self.name} {request}")
            if len(edge._pending) > MAX_OUTPUTS_PER_STEP:
                raise Violation(f"{self.name} holds {len(edge._pending)} outputs of {request}")
        for number, edge in live.in_edges.items():
            if edge is not None:
                check_in_edge(edge, live.route.edges[number].window_chunks, live.route.edges[number].window_bytes)
        if live.state is StageState.RUNNING and live.is_blocked != live.is_suspended:
            raise Violation(f"{request} has {'no ' if live.is_blocked else ''}credit at {self.name} and is not told")

    def held(self) -> str:
        """Tell what is held; empty for nothing."""
        core = self.core
        if core._live or core._scheduler._entries or self.engine.num_held:
            live = {request: live.state for request, live in core._live.items()}
            return f"{self.name} holds {live}, its engine {self.engine.num_held}"
        if len(core._tombstones) > MAX_TOMBSTONES or core.stats.buffered_bytes:
            return f"{self.name} holds bytes or too many tombstones"
        level = self.world.arrangement.asleep.get(self.name, 0)
        if self.member.is_ready and (level, level) != (self.member.level, self.engine.level):
            return f"{self.name} is at level {self.engine.level}, says {self.member.level}, and is to be at {level}"
        is_kept = level > 0 or self.name in self.world.arrangement.drained
        if self.member.is_ready and self.member.is_drained != is_kept:
            return f"{self.name} was not told {'no longer ' if self.member.is_drained else ''}to let go of what lasts"
        return self._held_timers()


class GatewayProcess(MemberProcess):
    """A gateway with an application that runs its planned requests."""

    def __init__(self, world: World, name: str, requests: list[RequestPlan]) -> None:
        super().__init__(world, name)
        coordinator = coordinator_peer("sim://coordinator")
        self.core = ClientCore(coordinator)
        self.member = Member(
            self.peer, "gateway", coordinator, live=lambda: self.core.running, linked=lambda: self.linked
        )
        self.application = Application(self, requests)

    def start(self) -> None:
        """Say hello."""
        super().start()
        self.application.start()

    def successor(self) -> Process:
        """Return the process that comes after the death of this one."""
        return GatewayProcess(self.world, self.name, self.application.not_begun)

    def on_frame(self, sender: Sender, frame: AnyFrame) -> None:
        """Take a frame."""
        if isinstance(frame, MEMBER_FRAMES):
            self.core.on_coordinator_heard()
            self.carry(self.member.on_frame(frame, self.world.now))
            if isinstance(frame, Introduce):
                self.carry(self.core.on_coordinator_changed(self.world.now))
            elif isinstance(frame, Broken) and frame.target == self.peer:
                self.carry(self.core.on_link_broken(frame.source))
            elif isinstance(frame, Lost):
                self.carry(self.core.on_peer_lost(frame.peer))
            return
        self.carry(self.core.on_frame(sender, frame, self.world.now))  # pyright: ignore[reportArgumentType]
        request = getattr(frame, "request", None)
        if request is not None:
            self.check(request)

    def on_broken(self, peer: Peer) -> None:
        """Learn that a connection of this process broke."""
        super().on_broken(peer)
        if self.is_alive and peer == self.member.coordinator:
            self.carry(self.core.on_coordinator_changed(self.world.now))

    def on_timer(self, key: TimerKey) -> None:
        """Take a timer."""
        super().on_timer(key)
        if self.member.is_coordinator_silent:
            self.carry(self.core.on_coordinator_silent())
            waiting = [call.name for call in self.core._calls.values() if call.route is None]
            if waiting or self.core._asked:
                raise Violation(f"{self.name} waits for a silent coordinator: {waiting}, asked {self.core._asked}")

    def _carry_own(self, effect: ClientEffect) -> None:
        self.application.on_effect(effect)

    def check(self, request: RequestId) -> None:
        """Check credit of a request that something happened to.

        Raises:
            Violation: it is negative or exceeded.
        """
        call = self.core._calls.get(request)
        if call is None or call.route is None:
            return
        for edge in call.out_edges.values():
            check_out_edge(edge, f"{self.name} {request}")
        for number, edge in call.in_edges.items():
            if edge is not None:
                check_in_edge(edge, call.route.edges[number].window_chunks, call.route.edges[number].window_bytes)

    def held(self) -> str:
        """Tell what is held; empty for nothing."""
        core = self.core
        if core._calls or core._cancelling or core._asked or core._renamed:
            return f"{self.name} holds {list(core._calls)}, cancels {list(core._cancelling)}, asked {core._asked}"
        return self.application.held() or self._held_timers()


def check_out_edge(edge: OutEdge, where: str) -> None:
    """Check a sending end.

    Raises:
        Violation: credit is negative, or frames wait that could go.
    """
    left = edge.credit_left
    if left.chunks < 0 or left.bytes < 0:
        raise Violation(f"{where}: credit of edge {edge.edge} is {left}")
    if edge._pending and edge._credit.can_spend(edge._pending[0][1]):
        raise Violation(f"{where}: edge {edge.edge} holds back what credit allows")


def check_in_edge(edge: InEdge, window_chunks: int, window_bytes: int) -> None:
    """Check a receiving end.

    Raises:
        Violation: more was accepted than the window, or more consumed than accepted.
    """
    chunks, num_bytes = edge.buffered
    if not 0 <= chunks <= window_chunks or not 0 <= num_bytes <= window_bytes:
        raise Violation(f"edge {edge.edge} buffers {edge.buffered} in a window of {window_chunks}, {window_bytes}")


def _parse_params(params: dict[str, Any]) -> dict[str, Any]:
    if params.get("is_bad"):
        raise BadInput("is_bad is not allowed", field="is_bad")
    return params
