"""``omni-bus version``."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version

from omni_bus import __version__
from omni_bus.wire.frames import PROTOCOL_VERSION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Print our version, the protocol's, and those that matter to it."""
    del args
    print(
        f"omni-bus {__version__} (protocol {PROTOCOL_VERSION}, Python {platform.python_version()}, "
        f"pyzmq {version('pyzmq')}, msgspec {version('msgspec')})"
    )
    return 0
