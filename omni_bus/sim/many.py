"""Many schedules over the cores of a machine, and what occurred in them: a pass means as much as that."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

import msgspec

from omni_bus.sim.ledger import Violation
from omni_bus.sim.world import World, run

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 250
"""Schedules that a process runs between two reports."""


class Summary(msgspec.Struct):
    """What occurred in some schedules."""

    num_schedules: int = 0
    num_steps: int = 0
    faults: Counter[str] = msgspec.field(default_factory=Counter[str])
    """Faults that struck, by kind."""
    frames: Counter[str] = msgspec.field(default_factory=Counter[str])
    """Frames that were sent, by kind."""
    ends: Counter[str] = msgspec.field(default_factory=Counter[str])
    """Requests by how they ended, as the last coordinator counts them."""
    violations: list[str] = []

    def add(self, other: Summary) -> None:
        """Take in the summary of other schedules."""
        self.num_schedules += other.num_schedules
        self.num_steps += other.num_steps
        self.faults += other.faults
        self.frames += other.frames
        self.ends += other.ends
        self.violations += other.violations

    def add_world(self, world: World) -> None:
        """Take in one schedule that kept every invariant."""
        self.num_schedules += 1
        self.num_steps += world.num_steps
        self.faults.update(world.faults.struck)
        self.frames.update({kind.__name__: count for kind, count in world.sent.items()})
        self.ends.update(world.coordinator.core._lifecycle.ended)


def run_block(first: int, count: int) -> Summary:
    """Run the seeds from `first` on."""
    summary = Summary()
    for seed in range(first, first + count):
        try:
            summary.add_world(run(seed))
        except Violation as violation:
            summary.num_schedules += 1
            summary.violations.append(str(violation))
    return summary


def run_many(
    first: int, count: int, num_processes: int, on_progress: Callable[[Summary], None] = lambda summary: None
) -> Summary:
    """Run the seeds from `first` on in several processes.

    Args:
        first: the first seed.
        count: how many.
        num_processes: at once.
        on_progress: called with what there is so far after each block.
    """
    summary = Summary()
    # Each process is a fresh interpreter: a fork would inherit whatever threads its parent has.
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        blocks = [
            pool.submit(run_block, start, min(BLOCK, first + count - start))
            for start in range(first, first + count, BLOCK)
        ]
        for block in as_completed(blocks):
            summary.add(block.result())
            on_progress(summary)
    return summary
