"""Actors that benchmarks call through xoscar, in a module of their own because its processes import them by name."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import xoscar  # pyright: ignore[reportMissingImports]


def share_path() -> None:
    """Let xoscar's processes, which start without this one's path, find this module."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)


class Echo(xoscar.Actor):
    """Answers with what came."""

    async def echo(self, text: str) -> str:
        """Return it."""
        return text


class Far(xoscar.Actor):
    """Takes things."""

    async def take(self, item: Any) -> int:
        """Look at the last element; return the moment."""
        if not isinstance(item, str):
            assert item[-1] >= 0
        return time.monotonic_ns()
