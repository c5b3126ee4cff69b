"""``omni-bus bench robot``: simulated robots on a server that speaks OpenPI, or on two in turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from omni_bus.bench.robots import RobotOutcome, RobotPlan, drive, summary_of, table_of
from omni_bus.cli import bench_options as options
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ROUTE = "/v1/realtime/robot/openpi?timing=1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("--url", default=f"ws://127.0.0.1:8000{ROUTE}", help="default: %(default)s")
    parser.add_argument("--against", metavar="URL", help="another server, measured in turn with the first")
    parser.add_argument("--robots", metavar="N", default="16", help="default: %(default)s")
    parser.add_argument(
        "--hz", metavar="H", default="10", help="observations of each a second, inf for no pause; default: %(default)s"
    )
    parser.add_argument("--seconds", metavar="S", default="10", help="of each round; default: %(default)s")
    parser.add_argument("--rounds", metavar="N", default="1", help="of each server; default: %(default)s")
    parser.add_argument("--deadline-ms", metavar="MS", help="what takes longer is late; default: a period")
    parser.add_argument("--image", metavar="KEY=HxW", action="append", default=[], help="a picture in each observation")
    parser.add_argument("--state", metavar="KEY=N", action="append", default=[], help="a vector in each observation")
    parser.add_argument("--prompt", default="", help="the instruction in each observation")
    parser.add_argument("--api-key", metavar="KEY", help="sent as the stock client does")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the figures; return 0, or 2 if a server gave no actions."""
    plan = plan_of(args)
    rounds = options.integer(args.rounds, "--rounds", low=1, high=1000)
    urls = [args.url, *([args.against] if args.against else [])]
    outcomes = uvloop.run(_measure(urls, plan, rounds))
    if args.json:
        told = {url: summary_of(outcome) for url, outcome in zip(urls, outcomes, strict=True)}
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        rate = "without a pause" if math.isinf(plan.hz) else f"at {plan.hz:g} Hz"
        length = f"{plan.seconds:g} s" if rounds == 1 else f"{rounds} rounds of {plan.seconds:g} s each"
        print(f"{plan.num_robots} robots {rate}, {length}\n")
        print(table_of(dict(zip(("this", "the other"), outcomes, strict=False))))
    return 0 if all(outcome.latencies_s for outcome in outcomes) else 2


def plan_of(args: argparse.Namespace) -> RobotPlan:
    """Return what is to be done.

    Raises:
        BadInput: an option that can't be read.
    """
    deadline_ms = None if args.deadline_ms is None else options.positive(args.deadline_ms, "--deadline-ms")
    hz = options.positive(args.hz, "--hz", may_be_inf=True)
    if math.isinf(hz) and deadline_ms is None:
        deadline_ms = math.inf
    return RobotPlan(
        num_robots=options.integer(args.robots, "--robots", low=1, high=10_000),
        hz=hz,
        seconds=options.positive(args.seconds, "--seconds"),
        images={key: _size(text) for key, text in _pairs(args.image, "--image").items()},
        states={
            key: options.integer(text, "--state", low=1, high=1_000_000)
            for key, text in _pairs(args.state, "--state").items()
        },
        prompt=args.prompt,
        deadline_s=None if deadline_ms is None else deadline_ms / 1e3,
        headers={"Authorization": f"Api-Key {args.api_key}"} if args.api_key else {},
    )


async def _measure(urls: Sequence[str], plan: RobotPlan, rounds: int) -> list[RobotOutcome]:
    totals = [RobotOutcome() for _ in urls]
    for _ in range(rounds):
        for url, total in zip(urls, totals, strict=True):
            total.add(await drive(url, plan))
    return totals


def _pairs(given: Sequence[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise BadInput(f"{option}: '{text}' came (allowed: KEY=VALUE)", field=option)
        found[key] = value
    return found


def _size(text: str) -> tuple[int, int]:
    sides: list[Any] = text.lower().split("x")
    if len(sides) != 2:
        raise BadInput(f"--image: '{text}' came (allowed: HEIGHTxWIDTH, as in 224x224)", field="--image")
    height, width = (options.integer(side, "--image", low=1, high=8192) for side in sides)
    return height, width
