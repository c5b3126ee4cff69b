"""The simulator itself: it reaches what it claims to reach, is repeatable, and notices when a core is wrong."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from omni_bus.core import lifecycle
from omni_bus.core.administration import Administration
from omni_bus.core.adoption import Adoption
from omni_bus.core.client import ClientCore
from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.edge import OutEdge
from omni_bus.core.kept import KeptInput
from omni_bus.core.lifecycle import Lifecycle
from omni_bus.core.recovery import Recovery, successor_of
from omni_bus.core.scheduler import Scheduler
from omni_bus.core.stage import EngineShape, StageCore
from omni_bus.core.stage_request import StageRequest
from omni_bus.sim.__main__ import main
from omni_bus.sim.ledger import Ledger, Violation
from omni_bus.sim.scenario import GRAPHS
from omni_bus.sim.world import World, run
from omni_bus.wire.payloads import Text

on_leave = CoordinatorCore._on_leave


def forgets_what_has_arrived(core: CoordinatorCore, *args: Any, is_settled: bool = False) -> list[Any]:
    """Take whoever leaves for lost."""
    return on_leave(core, *args)


NUM_SEEDS = 10_000
"""As many as `test_schedules` runs."""


NOTICED_NEAR = {"_shorten": 1150, "successor_of": 1040}
"""Where to begin for what few schedules notice; elsewhere only slower."""


def reroutes_what_has_output(self, frame):
    """As the core does it, without a look at what was put out."""
    call = self._calls.get(frame.request)
    if call is not None and call.kept is None:
        call.kept = KeptInput()
    return on_reroute(self, frame)


def gives_up_for_good(self, request, entry, error, now):
    return self.end_early(request, error, now) + self.settle(request, entry, now)


def repeats_everything(entry, error):
    error.is_retry_safe = True
    return successor_of(entry, error)


def reroutes_for_ever(entry, error):
    if entry.route is not None:
        entry.route = msgspec.structs.replace(entry.route, is_retry=False)
    return successor_of(entry, error)


on_reroute = ClientCore._on_reroute


def first_failing(num_seeds: int, start: int = 0) -> int | None:
    """Return the first seed, counted from `start` and around, that breaks an invariant."""
    seeds = (*range(start, num_seeds), *range(start))
    return next((seed for seed in seeds if not _passes(seed)), None)


def _passes(seed: int) -> bool:
    try:
        run(seed)
    except Violation:
        return False
    return True


def test_same_seed_runs_the_same_schedule():
    runs = [run(77) for _ in range(2)]

    assert runs[0].num_steps == runs[1].num_steps
    assert runs[0].now == runs[1].now
    assert runs[0].ledger.received == runs[1].ledger.received


def test_schedules_reach_every_kind_of_trouble():
    """All graphs, shapes, faults, readers and endings occur, so that passing means something."""
    seen: Counter[Any] = Counter()
    for seed in range(400):
        world = run(seed)
        scenario = world.scenario
        seen.update(tuple(scenario.pipelines))
        seen.update(plan.shape for plan in scenario.stages.values())
        seen.update(fault.kind for fault in scenario.faults)
        seen.update(plan.reader for plans in scenario.requests for plan in plans)
        seen.update({"chunks": sum(world.ledger.received.values())})
        seen.update(world.coordinator.core._lifecycle.ended)
        seen.update({"adopted": world.num_adopted, "held": world.num_held})
        seen.update(operation.kind for operation in scenario.operations)
        seen.update({"operations": 0 if world.supervisor is None else world.supervisor.num_done})
        seen.update({"forced": sum(operation.is_forced for operation in scenario.operations)})
        seen.update({"lossless": bool(world.loses_nothing and scenario.operations)})
        for row in world.coordinator.core._status(0.0)["callers"]:
            seen.update(row["refused_by"])
        seen.update({"resumed": world.num_rerouted, "stalled": world.num_stalled})

    wanted = [*GRAPHS, *EngineShape, "fast", "slow", "stuck", "done", "failed", "cancelled", "rejected", "adopted"]
    wanted += ["overloaded", "quota_exceeded", "bad_input"]
    wanted += ["rerouted", "resumed", "stalled"]
    wanted += ["held", "restart", "drain", "scale_down", "operations", "forced", "lossless"]
    wanted += ["kill_stage", "kill_gateway", "kill_coordinator", "stall", "hang", "drain"]
    assert [what for what in wanted if seen[what] == 0] == []
    assert seen["chunks"] > 2000


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (OutEdge, "is_blocked", property(lambda self: False)),
        (Scheduler, "wake", lambda self, request: None),
        (Scheduler, "resume", lambda self, request: None),
        (StageCore, "_consumed", lambda self, live, edge, payload: []),
        (StageCore, "on_aborted", lambda self, request, now: []),
        (StageCore, "_on_cancel", lambda self, request, now: []),
        (StageCore, "on_timer", lambda self, now: []),
        (StageRequest, "can_advance", property(lambda self: True)),
        (ClientCore, "consume", lambda self, request, port, payload: []),
        (ClientCore, "on_coordinator_changed", lambda self, now: []),
        (ClientCore, "on_coordinator_silent", lambda self: []),
        (ClientCore, "_on_reroute", lambda self, frame: []),
        (ClientCore, "_on_reroute", reroutes_what_has_output),
        (ClientCore, "_replay", lambda self, call: []),
        (Recovery, "take_ready", lambda self: []),
        (Recovery, "leave", lambda self, request: None),
        (Lifecycle, "give_up", gives_up_for_good),
        (CoordinatorCore, "_on_stalled", lambda self, sender, stalled, now: []),
        (lifecycle, "successor_of", repeats_everything),
        (lifecycle, "successor_of", reroutes_for_ever),
        (Lifecycle, "release", lambda self, entry, stage: entry.pending.pop(stage)),
        (Adoption, "adopt", lambda self, actor, route, ran_s, now: []),
        (Adoption, "_shorten", lambda self, entry, ran_s, now: []),
        (CoordinatorCore, "_check_adopted", lambda self, request, now: []),
        (CoordinatorCore, "_lose", lambda self, request, entry, actor, now: []),
        (Lifecycle, "run_held", lambda self, now: []),
        (Lifecycle, "_on_repeated", lambda self, submit, entry: []),
        (Administration, "bindable", lambda self, replicas: list(replicas)),
        (Administration, "is_coming_back", lambda self, stage: False),
        (Administration, "is_awaited", lambda self, stage: False),
        (Administration, "give_up", lambda self: None),
        (CoordinatorCore, "_on_leave", forgets_what_has_arrived),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_broken_core_is_noticed(monkeypatch, owner, name, broken):
    monkeypatch.setattr(owner, name, broken)

    assert first_failing(NUM_SEEDS, NOTICED_NEAR.get(name, 0)) is not None


def test_ledger_notices_loss_doubling_and_early_end():
    for payloads in (["r|s.o|1|"], ["r|s.o|0|", "r|s.o|0|"], ["r|other.o|0|"]):
        ledger = Ledger(World(0).rng)
        for text in payloads[:-1]:
            ledger.receive("r", "s.o", "out", Text(text))
        with pytest.raises(Violation, match="was due"):
            ledger.receive("r", "s.o", "out", Text(payloads[-1]))
    ledger = Ledger(World(0).rng)
    ledger.emit("r", "s.o")
    with pytest.raises(Violation, match="had not ended"):
        ledger.receive_end("r", "s.o", "out")
    ledger.finish("r", "s.o")
    with pytest.raises(Violation, match="0 of 1"):
        ledger.receive_end("r", "s.o", "out")
    ledger.end("r")
    with pytest.raises(Violation, match="twice"):
        ledger.end("r")


def test_violation_names_seed_and_replay(monkeypatch):
    monkeypatch.setattr(StageCore, "_on_cancel", lambda self, request, now: [])
    seed = first_failing(NUM_SEEDS)
    assert seed is not None

    with pytest.raises(Violation, match=rf"(?s)seed {seed}, .*python -m omni_bus.sim {seed} --trace"):
        run(seed)


def test_command_line_replays_with_a_trace(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["omni_bus.sim", "5", "--trace"])

    assert main() == 0

    written = capsys.readouterr().out
    assert "Submit(request=" in written
    assert "1 schedule, " in written
