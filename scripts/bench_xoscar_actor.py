"""The far end of `bench_tensor` under xoscar, in a module of its own because xoscar's processes import it by name."""

from __future__ import annotations

import time
from typing import Any

import xoscar  # pyright: ignore[reportMissingImports]


class Far(xoscar.Actor):
    """Takes things."""

    async def take(self, item: Any) -> int:
        """Look at the last element; return the moment."""
        if not isinstance(item, str):
            assert item[-1] >= 0
        return time.monotonic_ns()
