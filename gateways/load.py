"""How busy the served pipelines are, and what the one who asks uses of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.errors import Unavailable
from omni_bus.wire.frames import Range

if TYPE_CHECKING:
    from collections.abc import Container

    from omni_bus.client import BusClient

ANSWER_S = 1.0
"""The coordinator answers from its tables; one that hasn't after this does not."""


async def ask_status(client: BusClient) -> dict[str, Any] | None:
    """Return the coordinator's tables; None if it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await client.admin("status")
    except (TimeoutError, Unavailable):
        return None


async def load(client: BusClient, pipelines: Container[str], caller: str | None) -> dict[str, Any]:
    """Return the part of ``/health`` that tells of load; nothing if the coordinator does not answer.

    Args:
        client: the bus.
        pipelines: names of those that the gateway serves.
        caller: who asks; None for somebody without a valid key, who is told of no caller.
    """
    status = await ask_status(client)
    if status is None:
        return {}
    rows = [row for row in status["callers"] if row["caller"] == caller and row["pipeline"] in pipelines]
    own = {row["pipeline"]: {key: row[key] for key in ("in_flight", "queued", "refused")} for row in rows}
    counts = {name: found for name, found in status["pipelines"].items() if name in pipelines}
    return {"pipelines": counts} if caller is None else {"pipelines": counts, "caller": {"name": caller, "uses": own}}


async def server_load(client: BusClient, pipelines: Container[str]) -> int:
    """Return the requests of served pipelines that run or wait, whichever gateway they came through.

    Raises:
        Unavailable: the coordinator does not answer.
    """
    status = await ask_status(client)
    if status is None:
        raise Unavailable("the coordinator does not answer")
    found = [counts for name, counts in status["pipelines"].items() if name in pipelines]
    return sum(counts["in_flight"] + counts["queued"] for counts in found)


async def context_lengths(client: BusClient) -> dict[str, int]:
    """Return the tokens of prompt and answer together that each stage can take, where its replicas have told.

    Nothing if the coordinator does not answer.
    """
    status = await ask_status(client)
    if status is None:
        return {}
    lengths: dict[str, int] = {}
    for row in status["actors"]:
        if (length := row.get("context_length")) is not None:
            lengths[row["stage"]] = min(length, lengths.get(row["stage"], length))
    return lengths


async def ranges_of(client: BusClient) -> dict[str, dict[str, Range]]:
    """Return the values that each stage's model takes of parameters, where its replicas have told.

    Nothing if the coordinator does not answer.
    """
    status = await ask_status(client)
    rows = [] if status is None else status["actors"]
    return {row["stage"]: msgspec.convert(row["ranges"], dict[str, Range]) for row in rows if "ranges" in row}
