"""A virtual deployment around the real cores: one clock, links with delays, processes that come and go.

Everything that happens is an entry of one heap, ordered by virtual time; delays come from the seed, so each seed is
another interleaving and can be replayed. Links are FIFO, as ZeroMQ's are; between links nothing is ordered.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from omni_bus.core.coordinator import NOTHING_ARRANGED
from omni_bus.core.member import COORDINATOR, MISSED_ANSWERS
from omni_bus.core.membership import MISSED_HEARTBEATS
from omni_bus.core.recovery import origin
from omni_bus.ids import Peer, Sender
from omni_bus.sim.faults import Faults
from omni_bus.sim.ledger import Ledger, Violation
from omni_bus.sim.processes import CoordinatorProcess, GatewayProcess, Process, StageProcess
from omni_bus.sim.scenario import draw, draw_besides, draw_operations, draw_rests
from omni_bus.sim.supervisor import SupervisorProcess
from omni_bus.wire.frames import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.administration import Arrangement
    from omni_bus.ids import RequestId
    from omni_bus.sim.scenario import Scenario
    from omni_bus.wire.frames import AnyFrame

MAX_STEPS = 200_000
"""A schedule has hundreds; one with so many goes in circles."""

MAX_TIME_S = 300.0
"""Virtual time within which everything must have ended: deadlines, patience and slow readers are seconds."""

Link = tuple[str, int, str, int]


class World:
    """One schedule."""

    def __init__(self, seed: int, *, trace: bool = False, scenario: Scenario | None = None) -> None:
        self.rng = Random(seed)
        if scenario is None:
            # Drawn apart, so that the schedules of seeds without any stay what they were.
            scenario = draw_operations(draw(self.rng), Random(f"{seed} operations"))
            scenario = draw_rests(scenario, Random(f"{seed} rests"))
            scenario = draw_besides(scenario, Random(f"{seed} besides"))
        self.scenario = scenario
        self.ledger = Ledger(self.rng)
        self.now = 0.0
        self.num_steps = 0
        self.num_adopted = 0
        self.num_held = 0
        self.num_rerouted = 0
        self.num_stalled = 0
        self.deadlines: dict[RequestId, float] = {}
        """When requests with a time limit must be over, as their applications see it."""
        self.sent: Counter[type[AnyFrame]] = Counter()
        """Frames by kind."""
        self.processes: dict[str, Process] = {}
        self.held_frames: list[tuple[Process, Peer, AnyFrame, Link]] = []
        self.loses_frames = False
        self._is_traced = trace
        self._heap: list[tuple[float, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        self._num_pushed = 0
        self._num_due = 0
        self._links: dict[Link, float] = {}
        self._stalled: dict[Link, float] = {}
        self._cut_at: dict[Link, float] = {}
        self._slowest_s: dict[tuple[str, str], float] = {}
        """To or from the coordinator, by the names of both ends: the longest that a frame was under way."""
        self._lost: set[int] = set()
        """Deliveries that will not be made."""
        self._num_incarnations = 0
        self.faults = Faults(self)
        self.supervisor: SupervisorProcess | None = None
        self.clients: set[str] = set()
        """Who may have requests, by the word of all coordinators so far."""
        self._unready = {f"{stage}.{n}" for stage, plan in self.scenario.stages.items() for n in range(plan.replicas)}
        self._start()

    def _start(self) -> None:
        if self.scenario.has_supervisor or self.scenario.operations:
            self.supervisor = SupervisorProcess(self, self.scenario.operations)
        self.add(CoordinatorProcess(self))
        for name, plan in self.scenario.stages.items():
            for replica in range(plan.replicas):
                self.add(StageProcess(self, name, replica))
        if self.supervisor is not None:
            self.add(self.supervisor)
        for number, requests in enumerate(self.scenario.requests):
            self.add(GatewayProcess(self, f"gateway.{number}", requests))

    def add(self, process: Process) -> None:
        """Start a process, under a name that is free or whose process is dead."""
        self.processes[process.name] = process
        self.trace("start", process)
        process.start()

    def new_incarnation(self) -> int:
        """Return a number that no process had."""
        self._num_incarnations += 1
        return self._num_incarnations

    @property
    def coordinator(self) -> CoordinatorProcess:
        """The last coordinator, alive or not."""
        process = self.processes[COORDINATOR]
        assert isinstance(process, CoordinatorProcess)
        return process

    # --- what the supervisor sees and has decided ---------------------------------------------------------

    @property
    def arrangement(self) -> Arrangement:
        """What a coordinator that starts is told."""
        return NOTHING_ARRANGED if self.supervisor is None else self.supervisor.arrangement

    @property
    def is_up(self) -> bool:
        """Every replica was called ready once, so that no request has to be refused for the lack of one."""
        return not self._unready

    @property
    def loses_nothing(self) -> bool:
        """Nothing happens in this schedule that a request may fail of, but what it or its engine does itself."""
        faults, heartbeat_s = self.scenario.faults, self.scenario.heartbeat_s
        is_gentle = not faults or (
            all(fault.kind == "kill_coordinator" for fault in faults)
            # After three beats without an answer clients give up what was not admitted.
            and sum(fault.down_s or 0.0 for fault in faults) < 2 * heartbeat_s
        )
        return is_gentle and not any(operation.is_forced for operation in self.scenario.operations)

    def may_seem_silent(self, name: str) -> bool:
        """Whether an actor may miss answers to its heartbeats though every coordinator that lives answers at once.

        No fault has to be behind it: delays have no limit, and a few in a million are long enough.
        """
        round_trip_s = sum(self._slowest_s.get(ends, 0.0) for ends in ((name, COORDINATOR), (COORDINATOR, name)))
        killed = [fault for fault in self.scenario.faults if fault.kind == "kill_coordinator"]
        down_s = sum(fault.down_s or 0.0 for fault in killed)
        # One that dies takes an answer along, and the next beat is the first that its successor can answer.
        beats = MISSED_ANSWERS - bool(killed)
        return down_s + round_trip_s >= beats * self.scenario.heartbeat_s

    def on_report(self, event: str, name: str) -> None:
        """A coordinator says something of an actor that its supervisor reads."""
        match event:
            case "actor ready":
                self._unready.discard(name)
                if self.supervisor is not None:
                    self.supervisor.on_ready(name)
            case "client joined":
                self.clients.add(name)
            case "client left":
                self.clients.discard(name)
            case _:
                pass

    def on_death(self, name: str) -> None:
        """A process was killed."""
        self._unready.discard(name)

    def check_admission(self, stages: dict[str, Peer]) -> None:
        """Check a new binding.

        Raises:
            Violation: it is to a drained replica.
        """
        if self.supervisor is not None:
            self.supervisor.check_admission(stages)

    def was_rerouted(self, request: RequestId) -> bool:
        """Whether the coordinator put up a successor."""
        return any(origin(other) == request != other for other in self.coordinator.entered)

    # --- time ---------------------------------------------------------------------------------------------

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Have something happen later."""
        self.at(self.now + delay_s, act, args, is_due=True)

    def at(self, at: float, act: Callable[..., None], args: tuple[Any, ...], *, is_due: bool) -> None:
        """Have something happen at a time; what is not `is_due` (heartbeats) goes on for ever and is not waited for."""
        self._num_pushed += 1
        self._num_due += is_due
        heapq.heappush(self._heap, (at, self._num_pushed, is_due, act, args))

    def run(self) -> None:
        """Run to the end.

        Raises:
            Violation: an invariant broke, or not everything came to its end.
        """
        while self._heap:
            if self._num_due == 0 and not self.faults.is_pending and self._is_settled():
                break
            at, number, is_due, act, args = heapq.heappop(self._heap)
            self.now = at
            self._num_due -= is_due
            self.num_steps += 1
            if number in self._lost:
                self._lost.discard(number)
            else:
                act(*args)
            if self.num_steps >= self.faults.next_at:
                self.faults.strike()
            if self.num_steps > MAX_STEPS or self.now > MAX_TIME_S:
                raise Violation(f"no end after {self.num_steps} steps and {self.now:.1f} s: {self._left()}")

    def _is_settled(self) -> bool:
        """Nothing is under way but heartbeats; once these had their time to heal, nothing may be held either."""
        left = self._left()
        if left and self.now <= self.faults.last_at + 4 * MISSED_HEARTBEATS * self.scenario.heartbeat_s:
            return False
        if left:
            raise Violation(f"at rest, but {left}")
        return True

    def _left(self) -> str:
        """What is still held, in words; empty for nothing."""
        live = [process for process in self.processes.values() if process.is_alive]
        held = [left for process in live if (left := process.held())]
        return "; ".join(held + [left for process in live if (left := self._linked_to_the_dead(process))])

    def _linked_to_the_dead(self, process: Process) -> str:
        """Sockets to incarnations that are no more, and with them what these were lent; empty for none."""
        live = {other.peer for other in self.processes.values() if other.is_alive}
        dead = [peer for peer in process.linked if peer.actor != COORDINATOR and peer not in live]
        return f"{process.name} has links to the dead {dead}" if dead and process is not self.coordinator else ""

    # --- links --------------------------------------------------------------------------------------------

    def send(self, source: Process, target: Peer, frame: AnyFrame) -> None:
        """Put a frame on the link between two incarnations."""
        self.sent[type(frame)] += 1
        link = (source.name, source.peer.incarnation, target.actor, target.incarnation)
        at = self.now + self.rng.expovariate(1 / self.scenario.delay_s)
        last = self._links.get(link, 0.0)
        at = max(at, last)
        if self._stalled:
            at = max(at, self._stalled.get(link, 0.0))
        self._links[link] = at
        if COORDINATOR in (source.name, target.actor):
            ends = source.name, target.actor
            self._slowest_s[ends] = max(at - self.now, self._slowest_s.get(ends, 0.0))
        self.at(at, self._deliver, (source, target, frame, link), is_due=type(frame) is not Heartbeat)

    def _deliver(self, source: Process, target: Peer, frame: AnyFrame, link: Link) -> None:
        if not source.is_alive and self.now > self._cut_at.get(link, self.now):
            return
        process = self.processes.get(target.actor)
        if target.actor == COORDINATOR and process is not None and not process.is_alive:
            if not self.loses_frames:
                self.held_frames.append((source, target, frame, link))
            return
        if process is None or not process.is_alive or target.incarnation not in {0, process.peer.incarnation}:
            return
        if self._is_traced:
            self.trace(f"{source.name} ->", process, frame)
        process.on_frame(Sender(source.name, source.peer.incarnation), frame)

    def release_held(self) -> None:
        """Give a new coordinator what queued up for the former one."""
        held, self.held_frames = self.held_frames, []
        for source, target, frame, link in held:
            self._deliver(source, target, frame, link)

    def delivered_at(self, process: Process) -> float:
        """When all that a process has sent so far will have been delivered."""
        sent = [at for link, at in self._links.items() if link[:2] == (process.name, process.peer.incarnation)]
        return max([self.now, *sent])

    def cut(self, process: Process) -> None:
        """A process died: of what it had sent, each link delivers a part, from the beginning."""
        for link in self._links:
            if link[0] == process.name and link[1] == process.peer.incarnation:
                tail_s = 0.0 if self.rng.random() < 0.5 else self.rng.expovariate(1 / self.scenario.delay_s)
                self._cut_at[link] = self.now + tail_s

    def break_link(self) -> tuple[Process, Peer] | None:
        """Lose the end of what is under way on some link between live processes; return its source and its target.

        Later frames of the link arrive: so a receiver sees a gap.
        """
        under_way: dict[Link, list[tuple[float, int]]] = {}
        links: dict[Link, tuple[Process, Peer]] = {}
        for at, number, _, act, args in self._heap:
            if act == self._deliver:
                source, target, _, link = args
                if source.is_alive and number not in self._lost:
                    links[link] = source, target
                    under_way.setdefault(link, []).append((at, number))
        if not links:
            return None
        link = self.rng.choice(list(links))
        frames = sorted(under_way[link])
        self._lost.update(number for _, number in frames[self.rng.randrange(len(frames)) :])
        source, target = links[link]
        self.trace(f"break, {len(frames)} under way: {source.name} ->", source, target)
        return source, target

    def stall(self, source: Process, target: Process, until: float) -> None:
        """Deliver nothing on a link before a time; nothing is lost."""
        for incarnation in {0, target.peer.incarnation} if target.name == COORDINATOR else {target.peer.incarnation}:
            self._stalled[source.name, source.peer.incarnation, target.name, incarnation] = until

    def trace(self, what: str, process: Process, about: object = "") -> None:
        """Write a line, if asked to."""
        if self._is_traced:
            sys.stdout.write(
                f"{self.num_steps:6} {self.now:10.5f} {what} {process.name}#{process.peer.incarnation} {about}\n"
            )


def run(seed: int, *, trace: bool = False) -> World:
    """Run the schedule of a seed.

    Raises:
        Violation: with the seed and how to replay it.
    """
    world: World | None = None
    try:
        world = World(seed, trace=trace)
        world.run()
    except Exception as error:
        step = 0 if world is None else world.num_steps
        raise Violation(
            f"seed {seed}, step {step}: {type(error).__name__}: {error}\nreplay: python -m omni_bus.sim {seed} --trace"
        ) from error
    return world
