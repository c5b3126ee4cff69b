"""``omni-bus drain``: keep new requests from a stage or replica of a running deployment, and let it finish its own."""

from __future__ import annotations

import argparse

from omni_bus.cli.orders import add_order_arguments, order, timeout_of
from omni_bus.runtime.control import Drain, Resume


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("targets", nargs="+", metavar="STAGE[.REPLICA]", help="what gets nothing new")
    parser.add_argument("--undo", action="store_true", help="give it new requests again")
    add_order_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Drain and wait until nothing is left; return the exit code."""
    targets = tuple(args.targets)
    return order(args, Resume(targets) if args.undo else Drain(targets, timeout_of(args), args.force))
