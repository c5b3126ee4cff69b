"""The ``omni-bus`` command: the table of its sub-commands, each a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from omni_bus import __version__
from omni_bus.cli.silence import silence
from omni_bus.errors import ConfigError, OmniBusError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "up": "start a deployment and stay with it",
    "check": "check a deployment's configuration and show it, merged, with the origin of each value",
    "status": "show the running deployments and what their actors do",
    "call": "send one request to a running deployment",
    "talk": "hold a live conversation with a running deployment or another server",
    "bench": "measure a server with OpenAI's routes, ours or another",
    "drain": "keep new requests from a stage or replica, and wait until it has finished its own",
    "restart": "restart parts of a running deployment one after the other, without losing a request",
    "sleep": "have engines of a running deployment give their memory back",
    "wake": "wake engines that sleep",
    "scale": "change how many replicas stages have, without losing a request",
    "down": "stop a running deployment",
    "keys": "make the keys of a deployment that listens on TCP, or of a client of it",
    "version": "print the version",
}

CALLS: dict[str, str] = {
    "call speech": "read a text aloud, by a running deployment",
    "call transcribe": "write down what is said in a sound, by a running deployment",
}
"""Commands of two words. What follows ``call`` may be a text, so these are commands where both words are neighbours."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; return its exit code.

    1 is the user's mistake or a refused request, 2 what can't be done (a failed start, say), 3 a stop, drain or restart
    that had to cut requests or was not over in time.
    """
    parser = argparse.ArgumentParser(prog="omni-bus", description="Serve omni-modality pipelines on a ZeroMQ bus.")
    parser.add_argument("--version", action="version", version=f"omni-bus {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    arguments = _joined(arguments if arguments is not None else sys.argv[1:])
    chosen = _chosen(arguments)
    for name, summary in {**COMMANDS, **CALLS}.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            module = importlib.import_module(f"omni_bus.cli.{name.replace(' ', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    except OmniBusError as error:
        print(f"omni-bus {parsed.command}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has left
        silence(sys.stdout)
        return 1


def _chosen(arguments: Sequence[str]) -> str:
    """Return the sub-command: only its module is imported, so that each starts fast."""
    return next((argument for argument in arguments if argument in COMMANDS or argument in CALLS), "")


def _joined(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a command of two words as one of them."""
    found = list(arguments)
    for place, argument in enumerate(found):
        if argument in COMMANDS:
            words = " ".join(found[place : place + 2])
            if words in CALLS:
                found[place : place + 2] = [words]
            break
    return found
