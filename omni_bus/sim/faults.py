"""What goes wrong in a schedule, and when."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from omni_bus.sim.ledger import Violation
from omni_bus.sim.processes import CoordinatorProcess, GatewayProcess, Process, StageProcess

if TYPE_CHECKING:
    from omni_bus.ids import Peer
    from omni_bus.sim.scenario import FaultPlan
    from omni_bus.sim.world import World

HANG_GRACE_S = 0.5
"""From the word that an engine is stuck to the end of its process."""

HANG_SEEN_S = 60.0
"""No watchdog can tell an engine that hangs from one that waits for input of another port, which may not come since
what it has is not taken. A person sees that by then, and ends the process."""

CUT_AFTER_S = 2.0
"""From the order to drain to the grace limit."""


class Faults:
    """Strikes as planned: processes die and come back, links stall, engines hang."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._plans = list(world.scenario.faults)
        self._num_running = 0
        self._hung: dict[Process, FaultPlan] = {}
        self._unseen_breaks: Counter[Process] = Counter()
        self.struck: Counter[str] = Counter()
        """By kind."""
        self.last_at = 0.0
        self.next_at = self._plans[0].at_step if self._plans else float("inf")

    @property
    def is_pending(self) -> bool:
        """A fault is under way: a process is down and will come back, or a link is stalled."""
        return self._num_running > 0

    def strike(self) -> None:
        """Carry out the next fault."""
        plan = self._plans.pop(0)
        self.struck[plan.kind] += 1
        self.next_at = self._plans[0].at_step if self._plans else float("inf")
        self.last_at = max(self.last_at, self._world.now)
        match plan.kind:
            case "kill_stage":
                self._kill(self._pick(StageProcess), plan)
            case "kill_gateway":
                self._kill(self._pick(GatewayProcess), plan)
            case "kill_coordinator":
                self._kill(self._pick(CoordinatorProcess), plan)
            case "stall":
                self._stall(plan)
            case "break":
                self._break()
            case "hang":
                self._hang(plan)
            case "drain":
                self._drain()

    def _pick(self, kind: type[Process]) -> Process | None:
        alive = [process for process in self._world.processes.values() if type(process) is kind and process.is_alive]
        return self._world.rng.choice(alive) if alive else None

    def _kill(self, process: Process | None, plan: FaultPlan) -> None:
        if process is None or not process.is_alive:
            return
        world = self._world
        world.trace("kill", process)
        if process is world.coordinator:
            world.loses_frames = plan.loses_frames
        world.cut(process)
        process.die()
        world.on_death(process.name)
        self._supervise(process, "degraded" if plan.down_s is None else "backing off", plan.down_s or 60.0)
        if plan.down_s is not None:
            self._later(plan.down_s, self._restart, process)

    def _supervise(self, process: Process, phase: str, retry_after_s: float) -> None:
        supervisor = self._world.supervisor
        if supervisor is not None:
            self._world.after(self._world.rng.random() * 0.002, supervisor.on_exit, process, phase, retry_after_s)

    def _restart(self, process: Process) -> None:
        world = self._world
        if world.processes[process.name] is not process or process.has_retired:
            return  # an operation was faster
        world.add(process.successor())
        if process.name == world.coordinator.name:
            world.release_held()

    def _stall(self, plan: FaultPlan) -> None:
        processes = [process for process in self._world.processes.values() if process.is_alive]
        if len(processes) < 2:
            return
        source, target = self._world.rng.sample(processes, k=2)
        coordinator = self._world.coordinator
        if coordinator.is_alive and self._world.rng.random() < 0.7:
            source = coordinator if target is not coordinator and self._world.rng.random() < 0.3 else source
            target = coordinator if source is not coordinator else target
        until = self._world.now + (plan.down_s or 1.0)
        self._world.trace(f"stall until {until:.3f}: {source.name} ->", target)
        self._world.stall(source, target, until)
        self.last_at = max(self.last_at, until)

    def _break(self) -> None:
        """The end of what is under way on a connection is lost, and its source learns of the break a little later."""
        link = self._world.break_link()
        if link is not None:
            source, target = link
            self._unseen_breaks[source] += 1
            delay_s = self._world.rng.expovariate(1 / self._world.scenario.delay_s)
            self._later(delay_s, self._see_break, source, target)

    def _see_break(self, source: Process, target: Peer) -> None:
        self._unseen_breaks[source] -= 1
        source.on_broken(target)

    def has_unseen_break(self, process: Process) -> bool:
        """Whether a connection of this process broke and it does not know yet: nothing confirms what it sent."""
        return self._unseen_breaks[process] > 0

    def _hang(self, plan: FaultPlan) -> None:
        """An engine stops for ever; once its watchdog has noticed, somebody kills its process."""
        process = self._pick(StageProcess)
        if isinstance(process, StageProcess) and not process.engine.is_hung:
            self._world.trace("hang", process)
            process.engine.is_hung = True
            self._hung[process] = plan
            self._world.at(self._world.now + HANG_SEEN_S, self._end_hung, (process,), is_due=False)

    def _end_hung(self, process: Process) -> None:
        plan = self._hung.pop(process, None)
        if plan is not None and process.is_alive:
            self.last_at = max(self.last_at, self._world.now)
            self._kill(process, plan)

    def end_stalled(self, process: StageProcess) -> None:
        """A process whose engine is stuck is to be ended.

        Raises:
            Violation: its engine is not.
        """
        if not process.engine.is_hung:
            raise Violation(f"{process.name} is called stuck and is not")
        plan = self._hung.pop(process, None)
        if plan is not None:
            self._later(HANG_GRACE_S, self._kill, process, plan)

    def _drain(self) -> None:
        process = self._world.coordinator
        if process.is_alive:
            self._world.trace("drain", process)
            process.drain()
            self._later(CUT_AFTER_S, process.cut)

    def _later(self, delay_s: float, act: object, *args: object) -> None:
        self._num_running += 1
        self._world.after(delay_s, self._end, act, args)

    def _end(self, act: object, args: tuple[object, ...]) -> None:
        self._num_running -= 1
        self.last_at = max(self.last_at, self._world.now)
        assert callable(act)
        act(*args)
