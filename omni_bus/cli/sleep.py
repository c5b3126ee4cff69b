"""``omni-bus sleep``: have the engines of stages or replicas of a running deployment give their memory back."""

from __future__ import annotations

import argparse

from omni_bus.cli.orders import add_order_arguments, order, timeout_of
from omni_bus.runtime.control import Sleep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("targets", nargs="+", metavar="STAGE[.REPLICA]", help="what is to sleep")
    parser.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="1 lets go of accelerator memory and keeps the weights (default), 2 lets go of all",
    )
    add_order_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Wait until running requests have ended, and have the engines sleep; return the exit code."""
    return order(args, Sleep(tuple(args.targets), args.level, timeout_of(args), args.force))
