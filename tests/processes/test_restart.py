"""Processes that die or hang while they serve."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from omni_bus.client import End, Item
from omni_bus.errors import StageLost, Unavailable
from omni_bus.wire.payloads import Json

pytestmark = pytest.mark.processes

TWO = """
heartbeat_s = 0.2
{more}

[stages.llm]
adapter = "synthetic-text"
step_time_s = 0.01

[stages.other]
adapter = "synthetic-text"
step_time_s = 0.01

[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]

[pipelines.other]
edges = ["in.messages -> other.prompt", "other.text -> out.text"]
"""


async def is_supervised(client) -> None:
    """Wait until the supervisor is on the bus. What it says before that is for the coordinator which then comes."""
    while not any(actor["role"] == "supervisor" for actor in (await client.admin("status"))["actors"]):
        pass


async def ask(client, pipeline: str = "text", **params):
    stage = "llm" if pipeline == "text" else "other"
    request = await client.submit(pipeline, (), {stage: params})
    await request.send("messages", Json({"messages": [{"role": "user", "content": "hi"}]}))
    request.finish("messages")
    return request


async def last_of(request):
    last = None
    async for event in request:
        last = event
    return last


async def has_begun(request) -> None:
    assert isinstance(await anext(request), Item)


async def test_killed_stage_fails_only_its_own_requests(up) -> None:
    deployment = up(TWO.format(more="heartbeat_s = 60").replace("heartbeat_s = 0.2\n", ""))
    await deployment.told("ready")
    async with await deployment.client() as client:
        doomed = await ask(client, tokens=100_000)
        spared = await ask(client, "other", tokens=60)
        await has_begun(doomed)
        await has_begun(spared)

        os.kill(deployment.pid_of("llm.0"), signal.SIGKILL)

        # Heartbeats are a minute apart here: it is the supervisor who tells.
        with pytest.raises(StageLost) as lost:
            await last_of(doomed)
        assert lost.value.stage == "llm"
        with pytest.raises(Unavailable, match="stage 'llm' has no replica that can serve"):
            await ask(client)
        assert isinstance(await last_of(spared), End)
        await deployment.told("process", process="llm.0", phase="backing off", exit=-signal.SIGKILL)
        await deployment.told("process", process="llm.0", phase="ready", restarts=1)
        assert isinstance(await last_of(await ask(client, tokens=3)), End)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_used_up_restarts_leave_the_stage_degraded(up) -> None:
    deployment = up(TWO.format(more="max_restarts = 1"))
    await deployment.told("ready")
    async with await deployment.client() as client:
        for phase in ("backing off", "degraded"):
            request = await ask(client, tokens=100, crash_at_step=50)
            await has_begun(request)
            with pytest.raises(StageLost):
                await last_of(request)
            await deployment.told("process", process="llm.0", phase=phase, exit=70)
            if phase == "backing off":
                await deployment.told("process", process="llm.0", phase="ready")

        while "degraded" not in {row["phase"] for row in await client.admin("health")}:
            pass  # what the supervisor told is under way
        with pytest.raises(Unavailable, match=r"stage 'llm' has no replica that can serve \(llm\.0: degraded, exit"):
            await ask(client)
        assert isinstance(await last_of(await ask(client, "other", tokens=3)), End)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_hung_process_is_found_and_restarted(up) -> None:
    deployment = up(TWO.format(more=""))
    await deployment.told("ready")
    async with await deployment.client() as client:
        doomed = await ask(client, tokens=100_000)
        await has_begun(doomed)

        os.kill(deployment.pid_of("llm.0"), signal.SIGSTOP)

        with pytest.raises(StageLost):
            await last_of(doomed)
        died = await deployment.told("process died", process="llm.0")
        assert died["error"] == "it hung: no heartbeat for 1 s"
        await deployment.told("process", process="llm.0", phase="ready")
        assert isinstance(await last_of(await ask(client, tokens=3)), End)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_killed_coordinator_interrupts_no_stream(up) -> None:
    deployment = up(TWO.format(more=""))
    await deployment.told("ready")
    async with await deployment.client() as client:
        await is_supervised(client)
        running = await ask(client, tokens=300)
        await has_begun(running)

        os.kill(deployment.pid_of("coordinator"), signal.SIGKILL)
        await deployment.told("process", process="coordinator", phase="backing off")
        waiting = asyncio.create_task(ask(client, tokens=3))

        # Served by the next coordinator, unless that takes longer than clients have patience.
        try:
            assert isinstance(await last_of(await waiting), End)
        except Unavailable as refused:
            assert refused.is_retry_safe
        assert isinstance(await last_of(running), End)
        await deployment.told("actor ready", name="llm.0")
        assert isinstance(await last_of(await ask(client, tokens=3)), End)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_coordinator_that_keeps_dying_ends_the_deployment(up) -> None:
    deployment = up(TWO.format(more="max_restarts = 0"))
    await deployment.told("ready")

    os.kill(deployment.pid_of("coordinator"), signal.SIGKILL)

    assert await deployment.ended() == 2
    assert "nothing works without the coordinator, and its restarts are used up" in deployment.errors


def test_killed_client_has_its_requests_cancelled(up, environ) -> None:
    deployment = up(TWO.format(more=""))
    deployment.wait_for("ready")
    call = [sys.executable, "-m", "omni_bus", "call", "hi", "--model", "text", "-p", "llm.tokens=100000"]
    with subprocess.Popen(call, env=environ, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.read(4) == b"hi:0"

        client.kill()

        ended = deployment.wait_for("request ended")
    assert (ended["outcome"], ended["code"]) == ("cancelled", "cancelled")
    assert deployment.stop() == 0
