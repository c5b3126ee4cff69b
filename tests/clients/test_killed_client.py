"""Clients that vanish at any moment: their work stops within a step on every stage, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import aiohttp

from actors.testing import running

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
    """Send a request, streamed or not; read some of the answer, or none; break the connection."""
    body = json.dumps({"messages": [{"role": "user", "content": "go"}], "stream": dice.random() < 0.7}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    writer.write(head.encode() + body[: dice.choice([len(body), len(body), len(body) // 2])])
    for _ in range(dice.choice([0, 1, 5, 20])):
        # A moment of the deployment's own time: what a round trip to every actor takes.
        await deployment.gateway.client.admin("health")
    if b'"stream": true' in body and dice.random() < 0.5 and deployment.gateway.client.core.num_live:
        await reader.read(dice.randrange(1, 20_000))
    writer.transport.abort()


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
        for _ in range(NUM_KILLS):
            await kill_once(deployment, dice)
            steps.append(await steps_until_free(deployment))
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
