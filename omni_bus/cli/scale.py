"""``omni-bus scale``: change how many replicas stages of a running deployment have."""

from __future__ import annotations

import argparse

from omni_bus.cli.orders import add_order_arguments, order, timeout_of
from omni_bus.errors import BadInput
from omni_bus.runtime.control import Scale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("sizes", nargs="+", metavar="STAGE=N", help="replicas that a stage is to have, as in llm=2")
    add_order_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Scale and wait until new replicas serve and old ones are gone; return the exit code."""
    return order(args, Scale(_sizes(args.sizes), timeout_of(args), args.force))


def _sizes(assignments: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for assignment in assignments:
        stage, equals, number = assignment.partition("=")
        if not (stage and equals and number.isascii() and number.isdigit()):
            raise BadInput(f"{assignment}: expected STAGE=N, as in llm=2", field="sizes")
        if stage in sizes:
            raise BadInput(f"{assignment}: stage '{stage}' was given a number already", field="sizes")
        sizes[stage] = int(number)
    return sizes
