"""``omni-bus restart``: restart parts of a running deployment one after the other, without losing a request."""

from __future__ import annotations

import argparse

from omni_bus.cli.orders import add_order_arguments, order, timeout_of
from omni_bus.runtime.control import Restart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="STAGE[.REPLICA] | gateway.NAME | coordinator",
        help="what to restart (default: everything but the supervisor)",
    )
    add_order_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Restart it and wait until it serves; return the exit code."""
    return order(args, Restart(tuple(args.targets), timeout_of(args), args.force))
