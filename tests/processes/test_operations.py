"""Drain, restart and scale of a deployment that serves: under a constant stream of requests none is lost or refused."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.processes.load import load

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TWO_STAGES = """
{more}

[stages.llm]
adapter = "synthetic-text"
step_time_s = 0.002
replicas = {llm}

[stages.relay]
adapter = "synthetic-relay"
step_time_s = 0.004
replicas = {relay}

[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]

[pipelines.relayed]
edges = ["in.messages -> llm.prompt", "llm.text -> relay.text", "relay.text -> out.text"]

[gateways.openai]
port = 0
processes = 2
"""

QUIET = ("--log-level", "WARNING")
"""Nobody reads the deployment's output under load, and its pipe must not fill."""


def two_stages(*, llm: int = 2, relay: int = 2, more: str = "") -> str:
    return TWO_STAGES.format(llm=llm, relay=relay, more=more)


Command = "Callable[..., subprocess.CompletedProcess[str]]"


async def tell(omni_bus: Command, *arguments: str) -> str:
    """Run a command while the load goes on; it must succeed."""
    done = await asyncio.to_thread(omni_bus, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "orders",
    [
        [("restart", "llm"), ("restart", "relay")],
        [("restart", "gateway.openai"), ("restart", "gateway.openai")],
        [("restart", "coordinator"), ("restart", "coordinator")],
        [("restart",)],
        [("drain", "llm.0"), ("drain", "llm.0", "--undo"), ("restart", "llm.1")],
    ],
    ids=lambda orders: " ".join(orders[0]),
)
async def test_no_request_is_lost_while_parts_restart(up, omni_bus, orders) -> None:
    deployment = up(two_stages(), *QUIET)
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with load(url, ("text", "relayed")) as stream:
        for order in orders:
            await tell(omni_bus, *order)
            await stream.more(20)
    assert await asyncio.to_thread(deployment.stop) == 0
