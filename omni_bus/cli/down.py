"""``omni-bus down``: ask a running deployment's supervisor to drain and stop, and wait for its end."""

from __future__ import annotations

import argparse
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
        print(f"{about.name} is gone already")
        return 0
    try:
        signal.pidfd_send_signal(supervisor, signal.SIGTERM)
        if args.force:
            signal.pidfd_send_signal(supervisor, signal.SIGTERM)
        print(f"{about.name}: stopping (process {about.pid})", flush=True)
        select.select([supervisor], [], [])
    finally:
        os.close(supervisor)
    print(f"{about.name}: stopped")
    return 0
