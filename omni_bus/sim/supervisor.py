"""The supervisor of a virtual deployment: it tells who died, and drains, restarts and scales replicas over the bus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec.structs import replace

from omni_bus.core.absence import DEGRADED
from omni_bus.core.administration import Arrangement, returning
from omni_bus.core.client import ClientCore
from omni_bus.core.effects import Answered
from omni_bus.core.member import Member, coordinator_peer
from omni_bus.errors import Unavailable
from omni_bus.sim.ledger import Violation
from omni_bus.sim.processes import MEMBER_FRAMES, MemberProcess, StageProcess
from omni_bus.sim.scenario import OperationPlan
from omni_bus.wire.frames import Introduce, Lost, Outlook

if TYPE_CHECKING:
    from collections.abc import Collection, Generator

    from omni_bus.core.effects import ClientEffect, TimerKey
    from omni_bus.ids import Peer, Sender
    from omni_bus.sim.processes import Process
    from omni_bus.sim.world import World
    from omni_bus.wire.frames import AnyFrame


class _Ask(msgspec.Struct):
    """Wait for the coordinator's answer, whichever coordinator gives it."""

    op: str
    args: dict[str, Any] = {}


class _Leave(msgspec.Struct):
    """Have a replica retire, and wait until it is gone."""

    process: StageProcess


class _Ready(msgspec.Struct):
    """Wait until the coordinator calls a replica ready (True) or it has died (False)."""

    name: str


class _Pause(msgspec.Struct):
    """Wait for virtual seconds."""

    seconds: float


_Awaited: TypeAlias = "_Ask | _Leave | _Ready | _Pause | None"
_Steps: TypeAlias = "Generator[_Ask | _Leave | _Ready | _Pause, Any, None]"


class _Order(msgspec.Struct, eq=False):
    """An operation under way."""

    plan: OperationPlan
    steps: _Steps
    awaited: _Awaited = None
    call: int = 0
    """The number of what it asks."""
    is_unanswered: bool = False
    """It is asked again once a coordinator says something."""


class SupervisorProcess(MemberProcess):
    """Carries out the planned operations, on each stage one after the other. It never dies: all would with it."""

    def __init__(self, world: World, plans: list[OperationPlan]) -> None:
        super().__init__(world, "supervisor")
        coordinator = coordinator_peer("sim://coordinator")
        self.core = ClientCore(coordinator)
        self.member = Member(self.peer, "supervisor", coordinator)
        self.arrangement = Arrangement({stage: plan.replicas for stage, plan in world.scenario.stages.items()})
        self.kept_free: set[str] = set()
        """Replicas that the coordinator has confirmed to give nothing new."""
        self.kept_asleep: set[str] = set()
        """Likewise, because they sleep."""
        self.slept: set[str] = set()
        """Stages of which a replica was told to sleep, ever."""
        self.num_done = 0
        self._restarting: set[str] = set()
        self._plans = [plan for plan in plans if not plan.is_beside]
        self._besides = [plan for plan in plans if plan.is_beside]
        self._outlooks: dict[str, Outlook] = {}
        self._deaths: list[tuple[Peer, bool]] = []
        self._orders: list[_Order] = []
        self._num_calls = 0

    def start(self) -> None:
        """Say hello, and begin when the first operation is due."""
        super().start()
        self._next()
        for plan in self._besides:
            self.world.after(max(0.0, plan.at_s - self.world.now), self._begin, plan)

    def successor(self) -> Process:
        """Nobody survives a supervisor."""
        raise Violation("a supervisor has no successor")

    def _next(self) -> None:
        if self._plans:
            plan = self._plans.pop(0)
            self.world.after(max(0.0, plan.at_s - self.world.now), self._begin, plan)

    def _begin(self, plan: OperationPlan) -> None:
        is_early = plan.kind == "wake" and bool(self._besides)  # what they put to sleep is to be woken too
        # A deployment that starts takes no orders.
        if not self.world.is_up or is_early or any(_conflict(plan, order.plan) for order in self._orders):
            self.world.after(0.05, self._begin, plan)
            return
        self.world.trace(f"   begins {plan} as", self)
        carried_out_by = {
            "drain": self._drain,
            "restart": self._restart,
            "scale_down": self._scale_down,
            "sleep": self._sleep,
            "wake": self._wake,
        }
        order = _Order(plan, carried_out_by[plan.kind](plan))
        self._orders.append(order)
        self._advance(order, None)

    def _advance(self, order: _Order, value: Any) -> None:
        self.world.faults.last_at = max(self.world.faults.last_at, self.world.now)
        try:
            order.awaited = order.steps.send(value)
        except StopIteration:
            self._orders.remove(order)
            self.num_done += 1
            if order.plan.is_beside:
                self._besides.remove(order.plan)
            else:
                self._next()
            return
        match order.awaited:
            case _Ask():
                self._ask(order)
            case _Leave(process=process):
                process.retire(lambda process: self._left(order, process))
            case _Pause(seconds=seconds):
                self.world.after(seconds, self._advance, order, None)
            case _Ready() | None:
                pass

    def _left(self, order: _Order, process: StageProcess) -> None:
        self._tell_death(process.peer, is_settled=process.is_settled)
        if process.has_retired:
            self._tell(Outlook(process.name, process.stage, process.replica, "stopped"))
        self._advance(order, None)

    def _tell_death(self, peer: Peer, *, is_settled: bool) -> None:
        self._deaths.append((peer, is_settled))
        self.carry(self.member.lost(peer, is_settled=is_settled))

    def _tell_all(self) -> None:
        """Tell a coordinator that may be new what it can't know."""
        self.carry(self.core.on_coordinator_changed(self.world.now))
        for peer, is_settled in self._deaths:
            self.carry(self.member.lost(peer, is_settled=is_settled))
        for outlook in self._outlooks.values():
            if not self.world.processes[outlook.actor].is_alive:
                self.carry(self.member.outlook(outlook))

    def _tell(self, outlook: Outlook) -> None:
        self._outlooks[outlook.actor] = outlook
        self.carry(self.member.outlook(outlook))

    def on_ready(self, name: str) -> None:
        """The coordinator calls a replica ready."""
        self._end_wait_for(name, is_ready=True)

    def _end_wait_for(self, name: str, *, is_ready: bool) -> None:
        for order in self._orders:
            if isinstance(order.awaited, _Ready) and order.awaited.name == name:
                self.world.after(0.0, self._advance, order, is_ready)
                order.awaited = None

    def on_exit(self, process: Process, phase: str, retry_after_s: float) -> None:
        """A process has died."""
        name = process.name
        if process is not self.world.coordinator:
            self._tell_death(process.peer, is_settled=False)
        if isinstance(process, StageProcess):
            self._tell(Outlook(name, process.stage, process.replica, phase, "it died", retry_after_s))
        self.kept_free.discard(name)
        self._end_wait_for(name, is_ready=False)

    # --- operations, as `actors.operations` does them -----------------------------------------------------

    def _arrange(self, **changes: Any) -> _Ask:
        changed, stages = replace(self.arrangement, **changes), self.world.scenario.stages
        waited_for = returning(self._restarting, changed.asleep, lambda stage: stages[stage].while_asleep == "queue")
        self.arrangement = replace(changed, returning=waited_for)
        return _Ask("arrange")

    def _drain(self, plan: OperationPlan) -> _Steps:
        name = f"{plan.stage}.{plan.replica}"
        yield self._arrange(drained=self.arrangement.drained | {name})
        self.kept_free.add(name)
        yield _Pause(plan.timeout_s)
        self.kept_free.discard(name)
        yield self._arrange(drained=self.arrangement.drained - {name})

    def _restart(self, plan: OperationPlan) -> _Steps:
        name = f"{plan.stage}.{plan.replica}"
        self._restarting.add(name)
        yield self._arrange(drained=self.arrangement.drained | {name})
        is_gone = yield from self._empty(name, plan)
        yield self._arrange(drained=self.arrangement.drained - {name})
        if is_gone:
            self.world.add(self.world.processes[name].successor())
            yield _Ready(name)
        self._restarting.discard(name)
        yield self._arrange()

    def _scale_down(self, plan: OperationPlan) -> _Steps:
        wanted = self.arrangement.wanted
        number = wanted[plan.stage] - 1
        if number < 1:
            return
        name = f"{plan.stage}.{number}"
        yield self._arrange(wanted={**wanted, plan.stage: number}, drained=self.arrangement.drained | {name})
        if not (yield from self._empty(name, plan)):
            wanted = {**self.arrangement.wanted, plan.stage: number + 1}
        else:
            wanted = self.arrangement.wanted
        yield self._arrange(wanted=wanted, drained=self.arrangement.drained - {name})
        if name in self.arrangement.asleep and wanted[plan.stage] == number:
            yield self._arrange(asleep=_without(self.arrangement.asleep, {name}))

    def _sleep(self, plan: OperationPlan) -> _Steps:
        numbers = range(self.arrangement.wanted[plan.stage]) if plan.replica < 0 else (plan.replica,)
        names = [f"{plan.stage}.{number}" for number in numbers]
        new = {name: plan.level for name in names if name not in self.arrangement.asleep}
        self.slept.add(plan.stage)
        yield self._arrange(asleep={**new, **self.arrangement.asleep})
        self.kept_asleep.update(names)
        answer = yield _Ask("drain", {"actors": names, "timeout_s": plan.timeout_s, "is_forced": plan.is_forced})
        awake = set(new) if answer["outstanding"] and not plan.is_forced else set[str]()
        if not awake:
            failed = (yield _Ask("rest", {"actors": names, "level": plan.level}))["failed"].keys()
            if failed:  # then none of them is to sleep, but those that don't wake
                put_to_sleep = sorted(new.keys() - failed)
                still = (yield _Ask("rest", {"actors": put_to_sleep, "level": 0}))["failed"].keys()
                awake = new.keys() - still
        self.kept_asleep -= awake
        yield self._arrange(asleep=_without(self.arrangement.asleep, awake))

    def _wake(self, plan: OperationPlan) -> _Steps:
        """Wake all; a person whose engine could not says so again."""
        while self.arrangement.asleep:
            names = set(self.arrangement.asleep)
            failed = (yield _Ask("rest", {"actors": sorted(names), "level": 0}))["failed"].keys()
            self.kept_asleep -= names - failed
            yield self._arrange(asleep=_without(self.arrangement.asleep, names - failed))
            yield _Pause(0.1)

    def _empty(self, name: str, plan: OperationPlan) -> Generator[_Ask | _Leave, Any, bool]:
        """Have a replica finish and leave; False if it had not finished in time, or was dead already."""
        self.kept_free.add(name)
        args = {"actors": [name], "timeout_s": plan.timeout_s, "is_forced": plan.is_forced}
        answer = yield _Ask("drain", args)
        process = self.world.processes[name]
        assert isinstance(process, StageProcess)
        # One whose engine is stuck was given up with all that it had, and is ended as such.
        is_empty = process.is_alive and not answer["outstanding"] and not process.has_stalled
        if is_empty:
            yield _Leave(process)
        self.kept_free.discard(name)
        return is_empty

    # --- the bus ------------------------------------------------------------------------------------------

    def on_frame(self, sender: Sender, frame: AnyFrame) -> None:
        """Take a frame."""
        if not isinstance(frame, MEMBER_FRAMES):
            self.carry(self.core.on_frame(sender, frame, self.world.now))  # pyright: ignore[reportArgumentType]
            return
        self.core.on_coordinator_heard()
        self.carry(self.member.on_frame(frame, self.world.now))
        unanswered = [order for order in self._orders if order.is_unanswered]
        if isinstance(frame, Introduce):
            self._tell_all()
        elif isinstance(frame, Lost):
            process = self.world.processes.get(frame.peer.actor)
            if isinstance(process, StageProcess) and process.peer == frame.peer and process.has_stalled:
                self.world.faults.end_stalled(process)
        for order in unanswered:
            self._ask(order)

    def on_broken(self, peer: Peer) -> None:
        """Learn that a connection of this process broke."""
        super().on_broken(peer)
        if self.is_alive and peer == self.member.coordinator:
            self._tell_all()

    def on_timer(self, key: TimerKey) -> None:
        """Take a timer."""
        super().on_timer(key)
        if self.member.is_coordinator_silent:
            self.carry(self.core.on_coordinator_silent())

    def _ask(self, order: _Order) -> None:
        ask = order.awaited
        assert isinstance(ask, _Ask)
        self._num_calls += 1
        order.call, order.is_unanswered = self._num_calls, False
        # What all are to be by now: an order that asks again must not undo what others have arranged meanwhile.
        args = msgspec.to_builtins(self.arrangement) if ask.op == "arrange" else ask.args
        self.carry(self.core.admin(order.call, ask.op, args))

    def _carry_own(self, effect: ClientEffect) -> None:
        if not isinstance(effect, Answered):
            raise Violation(f"a supervisor has no request: {effect}")
        order = next((order for order in self._orders if order.call == effect.call), None)
        if order is None or not isinstance(order.awaited, _Ask):
            raise Violation(f"nobody asked {effect}")
        if isinstance(effect.error, Unavailable):
            order.is_unanswered = True
        elif effect.error is not None:
            raise Violation(f"an operation was refused: {effect.error}")
        else:
            self._advance(order, effect.result)

    def has_given_up(self, stage: str) -> bool:
        """Whether every replica of a stage is dead, and was said to come back no more."""
        replicas = [
            process
            for process in self.world.processes.values()
            if isinstance(process, StageProcess) and process.stage == stage and not process.has_retired
        ]
        is_gone = (not process.is_alive and self._is_degraded(process.name) for process in replicas)
        return bool(replicas) and all(is_gone)

    def _is_degraded(self, name: str) -> bool:
        outlook = self._outlooks.get(name)
        return outlook is not None and outlook.phase == DEGRADED

    def check_admission(self, stages: dict[str, Any]) -> None:
        """Check a new binding.

        Raises:
            Violation: a replica is bound that the coordinator has confirmed to keep free.
        """
        for peer in stages.values():
            if peer.actor in self.kept_free | self.kept_asleep:
                raise Violation(f"{peer.actor} is drained or asleep and was bound")

    def held(self) -> str:
        """Tell what is held; empty for nothing."""
        if self._orders or self._plans or self._besides:
            return f"supervisor is at {self._orders}, has {self._plans} and {self._besides} left"
        if self.arrangement.drained or self.arrangement.returning or self.arrangement.asleep:
            return f"supervisor has {self.arrangement} left"
        return self._held_timers()


def _without(levels: dict[str, int], names: Collection[str]) -> dict[str, int]:
    return {name: level for name, level in levels.items() if name not in names}


def _conflict(plan: OperationPlan, other: OperationPlan) -> bool:
    """Whether an operation must wait for another one, as `actors.operations` has it; an order to wake is for all."""
    return "wake" in (plan.kind, other.kind) or plan.stage == other.stage
