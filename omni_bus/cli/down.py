"""``omni-bus down``: ask a running deployment's supervisor to drain and stop, and wait for its end."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal

from omni_bus.cli.deployment import add_name_argument
from omni_bus.runtime import rundir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    add_name_argument(parser)
    parser.add_argument("--force", action="store_true", help="end running requests at once")


def run(args: argparse.Namespace) -> int:
    """Stop the deployment; return 0 when it is gone."""
    _, about = rundir.find(rundir.root(os.environ), args.name)
    try:
        supervisor = os.pidfd_open(about.pid)
    except ProcessLookupError:
        print(f"{about.name}: stopped already")
        return 0
    try:
        print(f"{about.name}: stopping (process {about.pid})", flush=True)
        # Of different kinds: two of one kind so close together would be one.
        with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
            for number in (signal.SIGTERM, signal.SIGINT) if args.force else (signal.SIGTERM,):
                signal.pidfd_send_signal(supervisor, number)
        select.select([supervisor], [], [])
    finally:
        os.close(supervisor)
    print(f"{about.name}: stopped")
    return 0
