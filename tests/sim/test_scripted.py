"""Schedules that are written, not drawn: one kind of trouble each, striking at every step of a stretch.

Seeds make other schedules whenever a core sends a frame more; these stay what they are. Each is also run with a core
that lacks what mends its trouble: a stretch that has moved away from it would be noticed by that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from omni_bus.core import coordinator
from omni_bus.core.administration import Administration
from omni_bus.core.adoption import Adoption
from omni_bus.core.breaks import Breaks
from omni_bus.core.client import ClientCore
from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.member import Member
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.recovery import Recovery, needed_stages
from omni_bus.core.rests import Rests
from omni_bus.core.stage import EngineShape, StageCore
from omni_bus.core.ties import Ties
from omni_bus.sim import processes, supervisor
from omni_bus.sim.ledger import Violation
from omni_bus.sim.processes import CoordinatorProcess, StageProcess
from omni_bus.sim.scenario import GRAPHS, FaultPlan, OperationPlan, RequestPlan, Scenario, StagePlan
from omni_bus.sim.supervisor import SupervisorProcess
from omni_bus.sim.world import World
from omni_bus.wire.frames import Heartbeat, RouteEdge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_bus.sim.scenario import FaultKind


def scenario(*faults: FaultPlan, graph: str, **fields: Any) -> Scenario:
    """Two requests without time limit, read slowly over narrow edges; one replica of each stage."""
    edges = tuple(RouteEdge(*edge, "text", window_chunks=2, window_bytes=400) for edge in GRAPHS[graph])
    pipeline = Pipeline(graph, graph, (), edges, frozenset(), 8, 8)
    plain = RequestPlan(
        "r0", graph, (), submit_at=0.15, num_inputs=4, reader="slow", priority=0, timeout_s=None,
        cancel_after_events=None, is_burst=False, input_s=0.001, has_bad_params=False,
    )  # fmt: skip
    return Scenario(
        pipelines={graph: pipeline},
        stages={stage: StagePlan(EngineShape.STEP_FED, 1, 4, 4) for stage in pipeline.stages},
        requests=[[plain, msgspec.structs.replace(plain, id="r1")]],
        faults=list(faults),
        asks_health=False,
        **{
            "delay_s": 0.02,
            "step_s": 0.001,
            "failure_rate": 0.0,
            "heartbeat_s": 1.0,
            "has_supervisor": False,
            **fields,
        },
    )


def kill_coordinator(at_step: int, down_s: float) -> FaultPlan:
    return FaultPlan("kill_coordinator", at_step, down_s, loses_frames=True)


def coordinators_that_die(seed: int) -> Iterator[World]:
    """What nobody reads ends with its time limit, which the next one has to know of."""
    for step in range(20, 60):
        script = scenario(kill_coordinator(step, 0.05), graph="chain")
        for plan in script.requests[0]:
            plan.reader, plan.timeout_s = "stuck", 3.0
        yield World(seed, scenario=script)


def coordinators_that_die_while_a_replica_is_emptied(seed: int) -> Iterator[World]:
    """The next one is asked what the replica has left before the gateway has told what is bound to it."""
    restart = OperationPlan("restart", 0.14, "voice", 0, timeout_s=5.0, is_forced=False)
    for step in range(30, 60):
        script = scenario(
            kill_coordinator(step, 0.05), graph="chain", heartbeat_s=0.2, has_supervisor=True, operations=[restart]
        )
        for plan in script.requests[0]:
            plan.submit_at, plan.input_s = 0.1, 0.2
        world = World(seed, scenario=script)
        world.after(0.15, _stall, world, "gateway.0", 0.7)
        yield world


def _stall(world: World, name: str, until: float, target: str = "coordinator") -> None:
    world.stall(world.processes[name], world.processes[target], until)


def coordinators_that_die_before_all_are_welcomed(seed: int) -> Iterator[World]:
    """Who never was beats once in a second; the requests of the others, which are bound to it, wait for its hello."""
    for step in range(15, 55):
        script = scenario(kill_coordinator(step, 0.05), graph="fan_out", heartbeat_s=0.1)
        for plan in script.requests[0]:
            plan.submit_at = 0.06
        yield World(seed, scenario=script)


def coordinators_that_die_with_a_stage(seed: int) -> Iterator[World]:
    """The stage dies first, or while there is no coordinator to be told."""
    for step in range(25, 60):
        kill_stage = FaultPlan("kill_stage", step, 1.0, loses_frames=True)
        yield World(seed, scenario=scenario(kill_stage, kill_coordinator(step + step % 7, 1.0), graph="chain"))


def stages_that_die_before_and_after_a_coordinator(seed: int) -> Iterator[World]:
    """A request that kills its stage takes one more down, not one more for each coordinator."""
    for step in range(25, 60, 3):
        for later in (25, 40, 60):
            kills: list[tuple[FaultKind, int]] = [
                ("kill_stage", step), ("kill_coordinator", step + 12), ("kill_stage", step + later)
            ]  # fmt: skip
            script = scenario(*(FaultPlan(kind, at, 0.3, loses_frames=False) for kind, at in kills), graph="single")
            script.stages["llm"].replicas = 2
            script.has_supervisor = True
            yield World(seed, scenario=script)


def connections_that_break(seed: int) -> Iterator[World]:
    """Among them the coordinator's, and those on which a stage's last chunks are under way."""
    for step in range(20, 90):
        broken = FaultPlan("break", step, 1.0, loses_frames=False)
        yield World(seed, scenario=scenario(broken, graph="single"))


def coordinators_that_die_after_a_connection_broke(seed: int) -> Iterator[World]:
    """What the first one told of the break has reached some of those whom it told, and not others."""
    for step in range(30, 100, 5):
        for later in range(3, 24, 2):
            broken = FaultPlan("break", step, 1.0, loses_frames=False)
            yield World(seed, scenario=scenario(broken, kill_coordinator(step + later, 1.0), graph="single"))


def requests_that_end_before_their_gateway_has_said_hello(seed: int) -> Iterator[World]:
    """A stage that has just begun with a request fails it, and its gateway knows better for how long it has run."""
    for step in range(40, 80, 2):
        script = scenario(
            kill_coordinator(step, 0.3), graph="chain", failure_rate=1.0, heartbeat_s=0.1, delay_s=0.005, step_s=0.2
        )
        for plan in script.requests[0]:
            plan.timeout_s, plan.input_s = 3.0, 0.5
        world = World(seed, scenario=script)
        for name, until in (("gateway.0", 1.2), ("voice.0", 2.0)):
            world.after(0.2, _stall, world, name, until)
        yield world


def replicas_that_are_emptied_after_a_connection_broke(seed: int) -> Iterator[World]:
    """What failed for a gap in its input may still be in the engine, and nobody waits for that."""
    restart = OperationPlan("restart", 0.2, "llm", 0, timeout_s=5.0, is_forced=False)
    for step in range(20, 60):
        broken = FaultPlan("break", step, 1.0, loses_frames=False)
        script = scenario(broken, graph="single", has_supervisor=True, operations=[restart], step_s=0.2)
        script.stages["llm"].shape = EngineShape.STREAMING
        plan = script.requests[0][0]
        plan.submit_at, plan.input_s, plan.num_inputs = 0.1, 0.01, 12
        script.requests[0][1:] = []
        yield World(seed, scenario=script)


def gateways_that_are_given_up_and_come_back(seed: int) -> Iterator[World]:
    """Nothing is heard of them for a while; the end of what they are sent meanwhile is lost, and nobody is asked."""
    for step in range(25, 60):
        broken = FaultPlan("break", step, 1.0, loses_frames=False)
        world = World(seed, scenario=scenario(broken, graph="single", heartbeat_s=0.1))
        world.after(0.2, _stall, world, "gateway.0", 1.2)
        yield world


def stages_that_die_after_their_last_word(seed: int) -> Iterator[World]:
    """The coordinator has heard that a request is done, and the end of its output is cut off."""
    for step in range(50, 110):
        kill_stage = FaultPlan("kill_stage", step, 1.0, loses_frames=False)
        script = scenario(kill_stage, graph="single")
        for plan in script.requests[0]:
            plan.reader, plan.is_burst = "fast", True
        yield World(seed, scenario=script)


def stages_that_die_before_their_supervisor_is_heard(seed: int) -> Iterator[World]:
    """A new coordinator has met a stage, and takes its supervisor for a stranger, when that tells of its death."""
    for step in range(45, 125, 2):
        kill_stage = FaultPlan("kill_stage", step, None, loses_frames=True)
        script = scenario(kill_coordinator(32, 0.05), kill_stage, graph="chain", has_supervisor=True)
        for plan in script.requests[0]:
            plan.input_s = 0.4
        world = World(seed, scenario=script)
        world.after(0.3, _stall, world, "supervisor", 1.5)
        yield world


def coordinators_that_die_with_a_replica_that_has_finished(seed: int) -> Iterator[World]:
    """No request waits for it any more, so that nobody but those who hold links to it can tell that it was there."""
    for step in range(60, 160, 3):
        kill_stage = FaultPlan("kill_stage", step + 2, None, loses_frames=True)
        script = scenario(
            kill_coordinator(step, 0.3), kill_stage, graph="chain", delay_s=0.001, has_supervisor=bool(step % 2)
        )
        for plan in script.requests[0]:
            plan.reader, plan.submit_at = "fast", 0.02
        yield World(seed, scenario=script)


def gateways_that_die_with_a_coordinator(seed: int) -> Iterator[World]:
    """What they asked for is known to its stages only."""
    for step in range(40, 90):
        kill_gateway = FaultPlan("kill_gateway", step + step % 9, None, loses_frames=True)
        yield World(
            seed,
            scenario=scenario(kill_coordinator(step, 0.3), kill_gateway, graph="chain", has_supervisor=True),
        )


SLEEP = OperationPlan("sleep", 0.15, "llm", -1, timeout_s=5.0, is_forced=False, level=1)
WAKE = OperationPlan("wake", 1.5, "", 0, timeout_s=0.0, is_forced=False)


def coordinators_that_die_while_a_replica_is_to_sleep(seed: int) -> Iterator[World]:
    """The next one meets the replica before the requests that the former one bound to it have reached it."""
    for step in range(25, 60):
        script = scenario(
            kill_coordinator(step, 0.05), graph="single", heartbeat_s=0.5, operations=[SLEEP, WAKE], step_s=0.01
        )
        for plan in script.requests[0]:
            plan.submit_at = 0.1
        world = World(seed, scenario=script)
        world.after(0.15, _stall_requests, world, 0.9)
        yield world


def _stall_requests(world: World, until: float) -> None:
    world.stall(world.processes["gateway.0"], world.processes["llm.0"], until)
    world.stall(world.processes["gateway.0"], world.coordinator, until)


def replicas_that_are_to_sleep_after_a_connection_broke(seed: int) -> Iterator[World]:
    """What failed for a gap in its input may still be in the engine when the coordinator takes it for empty."""
    for step in range(20, 60):
        broken = FaultPlan("break", step, 1.0, loses_frames=False)
        operations = [msgspec.structs.replace(SLEEP, at_s=0.25), WAKE]
        script = scenario(broken, graph="single", operations=operations, step_s=0.2)
        script.stages["llm"].shape = EngineShape.STREAMING
        plan = script.requests[0][0]
        plan.submit_at, plan.input_s, plan.num_inputs = 0.1, 0.01, 12
        script.requests[0][1:] = []
        yield World(seed, scenario=script)


def replicas_that_come_back_while_they_are_woken(seed: int) -> Iterator[World]:
    """One that is told to sleep on, since nobody has said that it need not, when requests already wait for it."""
    for number in range(40):
        kill_stage = FaultPlan("kill_stage", 30, 0.3 + 0.02 * number, loses_frames=False)
        script = scenario(kill_stage, graph="single", operations=[SLEEP, WAKE], step_s=0.05)
        script.stages["llm"].while_asleep = "queue"
        for plan in script.requests[0]:
            plan.submit_at = 1.2
        yield World(seed, scenario=script)


def replicas_that_restart_while_another_stage_is_told_something(seed: int) -> Iterator[World]:
    """Whatever that is, they are to be waited for: their requests come when they are away."""
    restart = OperationPlan("restart", 0.2, "llm", 0, timeout_s=5.0, is_forced=False, is_beside=True)
    plan = msgspec.structs.replace(SLEEP, stage="voice", timeout_s=0.3)
    again, drain = (msgspec.structs.replace(plan, kind=kind, replica=0, level=0) for kind in ("restart", "drain"))
    for operations in ([plan, WAKE], [again], [drain]):
        for number in range(12):
            script = scenario(graph="chain", operations=[restart, *operations])
            script.stages["voice"].replicas = 2
            script.stages["voice"].while_asleep = "queue"
            operations[0].at_s = 0.2 + 0.02 * number
            for plan in script.requests[0]:
                plan.submit_at, plan.reader = 0.25 + 0.02 * number, "fast"
            yield World(seed, scenario=script)


def actors_that_come_back_by_an_old_hello(seed: int) -> Iterator[World]:
    """They said it before they linked to anybody, it came after they were given up, and meanwhile stages died."""
    for name in ("gateway.0", "llm.0", "talker.0"):
        for step in range(140, 340, 8):
            stall = FaultPlan("stall", 1, 0.001, loses_frames=False)
            kill_stage = FaultPlan("kill_stage", step, None, loses_frames=False)
            script = scenario(
                stall, kill_stage, graph="chain", delay_s=0.005, heartbeat_s=0.1, has_supervisor=step % 16 == 12
            )
            for plan in script.requests[0]:
                plan.reader = "fast"
            world = World(seed, scenario=script)
            world.after(0.13 + step % 25 / 100, _ask_for_a_hello, world, name)
            yield world


def _ask_for_a_hello(world: World, name: str) -> None:
    """The answer is stalled, and all that follows it."""
    _stall(world, name, 2.0)
    world.coordinator.on_broken(world.processes[name].peer)


def coordinators_that_meet_actors_by_an_old_hello(seed: int) -> Iterator[World]:
    """It was said to a new coordinator, and those linked to since died after theirs."""
    for name in ("gateway.0", "llm.0", "talker.0"):
        for step in range(120, 280, 10):
            kill_stage = FaultPlan("kill_stage", step, None, loses_frames=False)
            script = scenario(
                kill_coordinator(40, 0.02), kill_stage, graph="chain", delay_s=0.005, heartbeat_s=0.1,
                has_supervisor=step % 20 == 0,
            )  # fmt: skip
            for plan in script.requests[0]:
                plan.reader, plan.submit_at, plan.input_s = "fast", 0.06, 0.3
            world = World(seed, scenario=script)
            world.after(0.1, _beat_early, world, name)
            yield world


def _beat_early(world: World, name: str) -> None:
    """Have a new coordinator ask somebody for a hello as soon as it is up; the answer is stalled."""
    if not world.faults.struck["kill_coordinator"] or not world.coordinator.is_alive:
        world.after(0.005, _beat_early, world, name)
        return
    _stall(world, name, 2.0)
    stranger = world.processes[name].peer
    world.coordinator.on_frame(stranger.sender, Heartbeat(stranger.endpoint))


def stages_that_die_while_a_gateway_is_not_heard(seed: int) -> Iterator[World]:
    """It has noticed that nobody answers, and is not given up yet: it is told of a successor, and of nothing more."""
    for step in range(136, 200, 2):
        stall = FaultPlan("stall", 1, 0.001, loses_frames=False)
        kill_stage = FaultPlan("kill_stage", step, 1.0, loses_frames=False)
        script = scenario(stall, kill_stage, graph="chain", delay_s=0.005, heartbeat_s=0.1, has_supervisor=True)
        for plan in script.requests[0]:
            plan.submit_at, plan.input_s = 0.06, 0.3
        world = World(seed, scenario=script)
        world.after(0.23, _stall, world, "gateway.0", 2.5)
        yield world


def requests_that_lose_a_stage_while_they_wait_for_one_that_sleeps(seed: int) -> Iterator[World]:
    """The lost one is here again a second later; the other one sleeps for longer than anybody waits for a lost one."""
    for number in range(12):
        script = scenario(
            graph="chain",
            delay_s=0.005,
            operations=[
                SLEEP,
                msgspec.structs.replace(SLEEP, stage="voice", replica=0),
                OperationPlan("drain", 1.0, "voice", 1, timeout_s=1.0, is_forced=False),
                msgspec.structs.replace(WAKE, at_s=13.0),
            ],
        )
        script.stages["llm"].while_asleep = "queue"
        script.stages["voice"].replicas = 2
        for plan in script.requests[0]:
            plan.submit_at, plan.reader = 0.6 + 0.02 * number, "fast"
        yield World(seed, scenario=script)


def stages_that_die_when_another_has_died_for_good(seed: int) -> Iterator[World]:
    """That one had done its part for the request and was restarted: its death alone would have cost nothing."""
    restart = OperationPlan("restart", 0.4, "talker", 0, timeout_s=1.0, is_forced=False)
    for step in range(5, 20):
        hang = FaultPlan("hang", step, 0.3, loses_frames=False)
        script = scenario(hang, graph="chain", delay_s=0.005, has_supervisor=True, operations=[restart])
        for plan in script.stages.values():
            plan.shape = EngineShape.STEP
        world = World(seed, scenario=script)
        world.after(1.5, _kill_for_good, world, "talker.0")
        yield world


def _kill_for_good(world: World, name: str) -> None:
    world.faults._kill(world.processes[name], FaultPlan("kill_stage", 0, None, loses_frames=False))


def ways_to_the_coordinator_that_are_slow(seed: int) -> Iterator[World]:
    """By chance, not by a fault: a gateway that hears of three beats nothing lets nobody wait any longer."""
    for number in range(20):
        world = World(seed, scenario=scenario(graph="single", heartbeat_s=0.1))
        source, target = ("coordinator", "gateway.0") if number % 2 else ("gateway.0", "coordinator")
        world.after(0.01 * number, _stall, world, source, 0.7, target)
        yield world


def first_violation(script: Callable[[int], Iterator[World]]) -> str | None:
    """Run each schedule in three interleavings; return what breaks an invariant first."""
    for seed in range(3):
        for number, world in enumerate(script(seed)):
            try:
                world.run()
            except Violation as violation:
                return f"schedule {number}, seed {seed}: {violation}"
            assert world.faults.struck or not world.scenario.faults
    return None


adopt = Adoption.adopt


def adopts_as_if_for_the_first_time(self, actor, route, ran_s, now):
    return adopt(self, actor, msgspec.structs.replace(route, is_retry=False), ran_s, now)


def answers_at_once(self, broken, *told):
    return self._answer([broken])


settle = Rests.settle


def settles_at_once(self, level, outstanding, now):
    return settle(self, level, lambda name: 0, now)


returning = supervisor.returning


def waits_for_sleepers_only(restarting, asleep, is_waited_for):
    return returning((), asleep, is_waited_for)


def binds_who_wakes(self, replicas):
    return [actor for actor in replicas if not self.kept(actor.peer.actor)]


def is_ready_once_all_are_here(self, entry):
    stages, kept = needed_stages(entry.edges), self._absences._kept
    replicas = {stage: self._absences._membership.replicas(stage) for stage in stages}
    return all(any(not kept(actor.peer.actor) for actor in found) for found in replicas.values())


def denies(self, name):
    return False


on_welcome = Member._on_welcome


def takes_nothing_for_missed(self, welcome, now):
    return on_welcome(self, msgspec.structs.replace(welcome, is_new=False), now)


on_silent = ClientCore.on_coordinator_silent


def looks_once_for_who_waits(self):
    return [] if self._is_coordinator_silent else on_silent(self)


def may_always(entry):
    return True


def sees_nothing(*args: Any, **kwargs: Any) -> list[Any]:
    return []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "owner", "name", "without"),
    [
        (coordinators_that_die, Adoption, "adopt", sees_nothing),
        (
            coordinators_that_die_while_a_replica_is_emptied,
            Administration,
            "is_unsure",
            lambda self, replica: replica in self._awaited,
        ),
        (
            coordinators_that_die_before_all_are_welcomed,
            CoordinatorCore,
            "_patience_with_strangers_s",
            property(lambda self: self._patience_s),
        ),
        (coordinators_that_die_with_a_stage, CoordinatorCore, "_check_adopted", sees_nothing),
        (stages_that_die_before_and_after_a_coordinator, Adoption, "adopt", adopts_as_if_for_the_first_time),
        (connections_that_break, Breaks, "on_broken", sees_nothing),
        (connections_that_break, CoordinatorCore, "on_link_broken", sees_nothing),
        (connections_that_break, ClientCore, "on_link_broken", sees_nothing),
        (coordinators_that_die_after_a_connection_broke, Breaks, "confirm", answers_at_once),
        (
            requests_that_end_before_their_gateway_has_said_hello,
            CoordinatorProcess,
            "_may_run",
            staticmethod(may_always),
        ),
        (
            replicas_that_are_emptied_after_a_connection_broke,
            StageProcess,
            "_unfinished",
            lambda self: list(self.core._live),
        ),
        (gateways_that_are_given_up_and_come_back, Adoption, "on_leave", sees_nothing),
        (stages_that_die_after_their_last_word, ClientCore, "on_peer_lost", sees_nothing),
        (coordinators_that_die_with_a_replica_that_has_finished, Ties, "take", sees_nothing),
        (gateways_that_die_with_a_coordinator, Ties, "take", sees_nothing),
        (coordinators_that_die_while_a_replica_is_to_sleep, Rests, "settle", settles_at_once),
        (replicas_that_are_to_sleep_after_a_connection_broke, StageCore, "is_empty", property(lambda self: True)),
        (replicas_that_come_back_while_they_are_woken, Administration, "bindable", binds_who_wakes),
        (replicas_that_restart_while_another_stage_is_told_something, supervisor, "returning", waits_for_sleepers_only),
        (
            requests_that_lose_a_stage_while_they_wait_for_one_that_sleeps,
            Recovery,
            "is_ready",
            is_ready_once_all_are_here,
        ),
        (actors_that_come_back_by_an_old_hello, Member, "_on_welcome", takes_nothing_for_missed),
        (coordinators_that_meet_actors_by_an_old_hello, Member, "_on_welcome", takes_nothing_for_missed),
        (stages_that_die_while_a_gateway_is_not_heard, ClientCore, "on_coordinator_silent", looks_once_for_who_waits),
        (stages_that_die_when_another_has_died_for_good, SupervisorProcess, "has_given_up", denies),
        (ways_to_the_coordinator_that_are_slow, World, "may_seem_silent", denies),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_scripted_schedules_keep_every_invariant_and_would_not_without(monkeypatch, script, owner, name, without):
    assert first_violation(script) is None

    monkeypatch.setattr(owner, name, without)
    assert first_violation(script) is not None


@pytest.mark.parametrize("kills", [[], [kill_coordinator(40, 0.01)]], ids=["no fault", "a coordinator dies"])
def test_silence_is_excused_by_slow_ways_only(monkeypatch, kills):
    """Not where the coordinator does not answer, or its gateway does not count what it hears."""
    broken = [
        (CoordinatorCore, "_on_heartbeat", lambda self, actor, num_live: []),
        (Member, "is_coordinator_silent", property(lambda self: self._beat_at > 0.5)),
    ]

    def script(seed: int) -> Iterator[World]:
        script = scenario(*kills, graph="single", delay_s=0.001, heartbeat_s=0.1)
        for plan in script.requests[0]:
            plan.submit_at = 0.7
        yield World(seed, scenario=script)

    assert first_violation(script) is None
    for owner, name, without in broken:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, without)
            assert "is lost for no reason: the coordinator does not answer" in (first_violation(script) or "")


tell_all = SupervisorProcess._tell_all


def tells_of_the_absent_only(self):
    self._deaths.clear()
    tell_all(self)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "script", [stages_that_die_before_their_supervisor_is_heard, gateways_that_die_with_a_coordinator]
)
def test_nobody_waits_for_those_whose_death_a_supervisor_has_seen(monkeypatch, script):
    """A coordinator of endless patience waits for ever for whoever it is not told of."""
    monkeypatch.setattr(coordinator, "MISSED_HEARTBEATS", 1_000_000)
    monkeypatch.setattr(processes, "_HOUSEKEEPING", processes._HOUSEKEEPING | {"adopted", "awaited", "breaks", "ties"})
    assert first_violation(script) is None

    monkeypatch.setattr(SupervisorProcess, "_tell_all", tells_of_the_absent_only)
    assert first_violation(script) is not None
