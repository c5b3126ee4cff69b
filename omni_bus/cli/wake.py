"""``omni-bus wake``: wake the engines of stages or replicas that sleep, and give them requests again."""

from __future__ import annotations

import argparse

from omni_bus.cli.deployment import add_name_argument
from omni_bus.cli.orders import EXIT_CODES, order
from omni_bus.runtime.control import Wake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument(
        "targets", nargs="*", metavar="STAGE[.REPLICA]", help="what is to wake (default: all that sleeps)"
    )
    add_name_argument(parser)
    parser.epilog = EXIT_CODES


def run(args: argparse.Namespace) -> int:
    """Wake them and wait until they serve; return the exit code."""
    return order(args, Wake(tuple(args.targets)))
