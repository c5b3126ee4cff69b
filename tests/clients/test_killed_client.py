"""Clients that vanish at any moment: their work stops within a step on every stage, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import aiohttp

from actors.testing import running
from loads.leavers import leave_once

if TYPE_CHECKING:
    from actors.testing import Running

TOML = """
[stages.llm]
adapter = "synthetic-text"
tokens = 100000
step_time_s = 0.01
max_num_seqs = 1
max_resident = 1

[stages.voice]
adapter = "synthetic-speech"
samples_per_character = 48
max_num_seqs = 1

[pipelines.voice]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
max_in_flight = 1

[gateways.openai]
port = 0
"""
NUM_KILLS = 200

MAX_STEPS_AFTER = 2
"""The step under way when the connection breaks, and one that begins while the news travels to the stage."""


async def kill_once(deployment: Running, dice: random.Random) -> None:
    """Break a connection after some of the deployment's own time."""
    client = deployment.gateway.client

    async def wait() -> None:
        for _ in range(dice.choice([0, 1, 5, 20])):
            await client.admin("health")  # a round trip to every actor

    await leave_once(deployment.port, dice, wait=wait, may_read=lambda: client.core.num_live > 0)


async def steps_until_free(deployment: Running) -> int:
    """Return the steps that the model still ran before no stage had anything active or waiting."""
    first = deployment.stages["llm.0"].stats.steps
    while True:
        rows = await deployment.gateway.client.admin("health")
        stats = [row["stats"] for row in rows if row["role"] == "stage"]
        if not any(stat["active"] + stat["waiting"] + stat["buffered_bytes"] for stat in stats):
            return deployment.stages["llm.0"].stats.steps - first


async def test_killed_clients_leave_nothing_running() -> None:
    """200 times at random moments; then the 201st request gets its answer."""
    dice = random.Random(7)
    async with running(TOML) as deployment:
        steps: list[int] = []
        num_tasks = len(asyncio.all_tasks())
        for _ in range(NUM_KILLS):
            await kill_once(deployment, dice)
            steps.append(await steps_until_free(deployment))
        while len(asyncio.all_tasks()) > num_tasks:  # the test's time limit bounds it
            await deployment.gateway.client.admin("health")
        cancelled = deployment.stages["llm.0"].stats.cancelled
        body = {"messages": [{"role": "user", "content": "go"}], "modalities": ["text"], "max_tokens": 5}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{deployment.url}/v1/chat/completions", json=body) as response,
        ):
            answer = await response.json()

    assert cancelled > NUM_KILLS / 4, "hardly any client was killed while its request ran"
    assert max(steps) <= MAX_STEPS_AFTER
    assert answer["choices"][0]["finish_reason"] == "length"
