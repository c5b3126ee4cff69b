"""Orders to a running deployment's supervisor: shared by ``drain``, ``restart`` and ``scale``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from rich.live import Live

from omni_bus.cli.deployment import add_name_argument
from omni_bus.cli.display import process_table
from omni_bus.errors import BadInput
from omni_bus.runtime import rundir
from omni_bus.runtime.control import DONE, control_path, give_order

if TYPE_CHECKING:
    from omni_bus.runtime.control import News, Order, Outcome

EXIT_CODES = (
    "Exits with 0 when it is done, 1 for a mistake, 2 if it is not possible, 3 if something was cut or not over."
)


def add_order_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every order takes."""
    add_name_argument(parser)
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        help="how long running requests may take to finish (default: drain_timeout_s of the deployment)",
    )
    parser.add_argument("--force", action="store_true", help="end requests that take longer, with an error")
    parser.epilog = EXIT_CODES


def timeout_of(args: argparse.Namespace) -> float | None:
    """Return ``--timeout``.

    Raises:
        BadInput: it is no number of seconds.
    """
    if args.timeout is not None and not 0 <= args.timeout < math.inf:
        raise BadInput(f"--timeout {args.timeout:g}: not a number of seconds, at least 0", field="--timeout")
    return args.timeout


def order(args: argparse.Namespace, wanted: Order) -> int:
    """Have it carried out, showing what becomes of each process; return its exit code."""
    path, _ = rundir.find(rundir.root(os.environ), args.name)
    outcome = uvloop.run(_follow(str(path), wanted))
    if outcome.code == DONE:
        print(outcome.message, flush=True)
    else:
        print(f"omni-bus {args.command}: {outcome.message}", file=sys.stderr)
    return outcome.code


async def _follow(run_dir: str, wanted: Order) -> Outcome:
    if not sys.stdout.isatty():
        return await give_order(control_path(run_dir), wanted, _Lines().show)
    table = _Table()
    with Live(get_renderable=table.render, refresh_per_second=8) as live:

        def show(news: News) -> None:
            table.take(news)
            live.refresh()

        return await give_order(control_path(run_dir), wanted, show)


class _Lines:
    """A line for each new phase."""

    def __init__(self) -> None:
        self._phases: dict[str, str] = {}

    def show(self, news: News) -> None:
        if self._phases.get(news.process) != news.phase:
            self._phases[news.process] = news.phase
            print(f"  {news.process}: {news.phase}", flush=True)


class _Row(msgspec.Struct):
    """What was heard of a process."""

    name: str
    phase: str
    started_at: float
    fraction: float = 0.0
    ready_at: float | None = None
    pid: int | None = None


class _Table:
    """The processes that the order touches."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def take(self, news: News) -> None:
        now = time.monotonic()
        row = self._rows.get(news.process)
        if row is None or (row.phase != news.phase == "starting"):
            row = self._rows[news.process] = _Row(news.process, news.phase, now)
        row.phase, row.fraction, row.pid = news.phase, news.fraction, news.pid
        row.ready_at = now if news.phase == "ready" else None

    def render(self) -> Any:
        return process_table(self._rows.values())
