"""Twenty thousand schedules: the real cores together under delays, reordering, faults, slow readers and overload.

Each fails with its seed and the command that replays it; ``python -m omni_bus.sim 0 --count 1000000`` runs more.
"""

import os

import pytest

from omni_bus.sim.many import run_many

NUM_SCHEDULES = 20_000
NUM_IN_BLOCK = 5_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, NUM_IN_BLOCK))
def test_schedules_keep_every_invariant(first):
    summary = run_many(first, NUM_IN_BLOCK, num_processes=os.cpu_count() or 1)

    assert summary.violations == []
    assert summary.num_schedules == NUM_IN_BLOCK
    assert summary.num_steps > 50 * NUM_IN_BLOCK
