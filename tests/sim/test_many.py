"""Sweeps over many seeds, and what they must have met for a pass to mean something."""

from typing import get_args

import pytest

from omni_bus.sim import many
from omni_bus.sim.__main__ import main
from omni_bus.sim.many import run_block, run_many
from omni_bus.sim.scenario import FaultKind
from omni_bus.sim.world import World
from omni_bus.wire.frames import AnyFrame, Refused, TransportFrame

NUM_SEEDS = 600

NEVER_SENT = {
    Refused: "another protocol version, of which the simulator has none",
    **dict.fromkeys(get_args(TransportFrame), "from link to link, below the cores"),
}


def test_every_kind_of_frame_and_fault_occurs():
    """Whoever adds a frame has the simulator send it, or says here why it can't."""
    summary = run_block(0, NUM_SEEDS)

    expected = {kind.__name__ for kind in get_args(AnyFrame) if kind not in NEVER_SENT}
    assert expected - summary.frames.keys() == set()
    assert set(get_args(FaultKind)) - summary.faults.keys() == set()
    assert summary.violations == []


@pytest.mark.timeout(120)
def test_processes_together_find_what_one_finds():
    alone = run_block(100, 60)

    together = run_many(100, 60, num_processes=2)

    assert (together.num_schedules, together.num_steps) == (alone.num_schedules, alone.num_steps)
    assert (together.faults, together.frames, together.ends) == (alone.faults, alone.frames, alone.ends)


def test_violations_are_told_with_their_seeds(monkeypatch):
    monkeypatch.setattr(World, "_is_settled", lambda self: 1 / 0)

    summary = run_block(5, 3)

    assert summary.num_schedules == 3
    assert [text.partition(",")[0] for text in summary.violations] == ["seed 5", "seed 6", "seed 7"]


def test_command_line_sweeps_and_says_what_occurred(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["omni_bus.sim", "0", "--count", "40", "--processes", "1"])
    monkeypatch.setattr(many, "BLOCK", 20)

    assert main() == 0

    written = capsys.readouterr().out
    assert "40 schedules (seeds 0 to 39)" in written
    assert "Submit" in written
    assert "kill_coordinator" in written
    assert "violations: 0" in written
