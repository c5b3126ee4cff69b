"""The actor that `bench_call` calls through xoscar; its processes import it by name."""

from __future__ import annotations

import xoscar  # pyright: ignore[reportMissingImports]


class Echo(xoscar.Actor):
    """Answers with what came."""

    async def echo(self, text: str) -> str:
        """Return it."""
        return text
