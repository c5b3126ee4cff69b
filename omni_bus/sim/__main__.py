"""``python -m omni_bus.sim SEED [--trace]``: replay one schedule.

``--count N`` runs N seeds from SEED on, on all cores: with 1000000, what a night is for.
Exits with 1 if a schedule breaks an invariant.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback

from omni_bus.sim.ledger import Violation
from omni_bus.sim.many import Summary, run_many
from omni_bus.sim.world import run

MAX_SHOWN = 20


def main() -> int:
    """Run what the command line says; return 1 if a seed fails."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_bus.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--trace", action="store_true", help="write each step of the one schedule")
    parser.add_argument("--count", type=int, default=1, help="run so many seeds, from SEED on")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (default: all cores)")
    options = parser.parse_args()
    if options.count == 1:
        return _replay(options.seed, trace=options.trace)
    return _sweep(options.seed, options.count, options.processes)


def _replay(seed: int, *, trace: bool) -> int:
    try:
        world = run(seed, trace=trace)
    except Violation as violation:
        sys.stdout.write(f"{violation}\n")
        traceback.print_exception(violation.__cause__)
        return 1
    sys.stdout.write(f"1 schedule, {world.num_steps} steps, kept every invariant\n")
    return 0


def _sweep(first: int, count: int, num_processes: int) -> int:
    begun_at = time.monotonic()
    said_at = begun_at

    def tell(so_far: Summary) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= 1.0:
            said_at = now
            rate = so_far.num_schedules / (now - begun_at)
            sys.stderr.write(
                f"\r{so_far.num_schedules:,} of {count:,} schedules, {rate:,.0f} a second, "
                f"{len(so_far.violations)} violations "
            )
            sys.stderr.flush()

    summary = run_many(first, count, num_processes, tell)
    took_s = time.monotonic() - begun_at
    sys.stderr.write("\r")
    sys.stdout.write(
        f"{summary.num_schedules:,} schedules (seeds {first} to {first + count - 1}), {summary.num_steps:,} steps, "
        f"{took_s:.0f} s, {summary.num_schedules / took_s:,.0f} a second on {num_processes} cores\n"
    )
    for what, counts in (("faults", summary.faults), ("requests", summary.ends), ("frames", summary.frames)):
        shown = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
        sys.stdout.write(f"{what}: {shown}\n")
    sys.stdout.write(f"violations: {len(summary.violations)}\n")
    for violation in summary.violations[:MAX_SHOWN]:
        sys.stdout.write(f"{violation}\n")
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
