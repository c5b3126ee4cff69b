"""``python -m omni_bus.sim SEED [--trace]``: replay one schedule. ``--count N`` runs N seeds from SEED on."""

from __future__ import annotations

import argparse
import sys
import traceback

from omni_bus.sim.ledger import Violation
from omni_bus.sim.world import run


def main() -> int:
    """Run what the command line says; return 1 if a seed fails."""
    parser = argparse.ArgumentParser(prog="python -m omni_bus.sim", description="Replay simulated schedules.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--trace", action="store_true", help="write each step")
    parser.add_argument("--count", type=int, default=1, help="run so many seeds, from SEED on")
    options = parser.parse_args()
    num_failed = 0
    num_steps = 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            num_steps += run(seed, trace=options.trace).num_steps
        except Violation as violation:
            num_failed += 1
            sys.stdout.write(f"{violation}\n")
            if options.count == 1:
                traceback.print_exception(violation.__cause__)
    sys.stdout.write(f"{options.count} schedules, {num_steps} steps, {num_failed} failed\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
