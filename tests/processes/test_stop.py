"""Ends of real deployments: in order, in a hurry, by force."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal

import pytest

from omni_bus.client import End, Item
from omni_bus.errors import Unavailable
from omni_bus.wire.payloads import Json, Text

pytestmark = pytest.mark.processes

LLM = """
[stages.llm]
adapter = "synthetic-text"
step_time_s = 0.01
{options}

[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
"""


def llm(options: str = "") -> str:
    return LLM.format(options=options)


async def ask(client, text: str = "hi", **params):
    """Submit a request with its input."""
    request = await client.submit("text", (), {"llm": params})
    await request.send("messages", Json({"messages": [{"role": "user", "content": text}]}))
    request.finish("messages")
    return request


async def text_of(request) -> str:
    pieces = [event async for event in request]
    assert isinstance(pieces[-1], End)
    return "".join(e.payload.text for e in pieces if isinstance(e, Item) and isinstance(e.payload, Text))


async def ask_until_refused(client) -> None:
    while True:
        await text_of(await ask(client, tokens=1))


async def has_begun(request) -> None:
    """Wait for the first output."""
    assert isinstance(await anext(request), Item)


async def test_drain_finishes_what_runs_and_refuses_the_rest(up) -> None:
    deployment = up(llm())
    await deployment.told("ready")
    async with await deployment.client() as client:
        running = await ask(client, tokens=100)
        await has_begun(running)

        deployment.process.send_signal(signal.SIGTERM)
        await deployment.told("stopping")
        # The signal reaches the coordinator after this line; whatever it still admits, it finishes.
        with pytest.raises(Unavailable, match="stopping"):
            await ask_until_refused(client)

        assert (await text_of(running)).split()[-1] == "hi:99"
    assert await deployment.ended() == 0


async def test_second_signal_ends_at_once(up) -> None:
    deployment = up(llm())
    await deployment.told("ready")
    async with await deployment.client() as client:
        running = await ask(client, tokens=100_000)
        await has_begun(running)

        deployment.process.send_signal(signal.SIGTERM)
        await deployment.told("stopping")
        deployment.process.send_signal(signal.SIGINT)  # a second SIGTERM at once may be an echo of the first

        assert await deployment.ended() == 3


def test_echo_of_a_signal_cuts_nothing(up) -> None:
    """A program around this one passes its signal on, and the process group has it too: ``timeout`` does so."""
    deployment = up(llm(), "-o", "drain_timeout_s=40")
    deployment.wait_for("ready")

    deployment.process.send_signal(signal.SIGTERM)
    deployment.wait_for("stopping")  # the first one has arrived: now they can't merge
    deployment.process.send_signal(signal.SIGTERM)

    assert deployment.end() == 0


async def test_requests_beyond_the_drain_limit_are_cut(up) -> None:
    deployment = up(llm(), "-o", "drain_timeout_s=0.2")
    await deployment.told("ready")
    async with await deployment.client() as client:
        running = await ask(client, tokens=100_000)
        await has_begun(running)

        deployment.process.send_signal(signal.SIGTERM)
        with pytest.raises(Unavailable, match="the deployment is stopping"):
            await text_of(running)

    assert await deployment.ended() == 3
    (ended,) = [e for e in deployment.events if e["event"] == "request ended"]
    assert (ended["outcome"], ended["code"]) == ("failed", "unavailable")


async def test_engine_that_hangs_does_not_keep_its_process(up) -> None:
    deployment = up(llm(), "-o", "drain_timeout_s=0.2")
    await deployment.told("ready")
    async with await deployment.client() as client:
        running = await ask(client, tokens=10, hang_at_step=2)
        await has_begun(running)

        deployment.process.send_signal(signal.SIGTERM)
        with pytest.raises(Unavailable):
            await text_of(running)

    assert await deployment.ended() == 3
    exits = {e["process"]: e["exit"] for e in deployment.events if e["event"] == "process"}
    assert exits["llm.0"] == 0, "it left by itself"
    assert "the engine hangs and is left behind" in {e["event"] for e in deployment.events}


def test_engine_whose_close_hangs_is_left_behind(up, environ, tmp_path) -> None:
    (tmp_path / "clinging.py").write_text(
        "import threading\n"
        "from adapters.synthetic import SyntheticText\n"
        "class Clinging(SyntheticText):\n"
        "    def close(self):\n"
        "        threading.Event().wait()\n"
    )
    environ["PYTHONPATH"] += f":{tmp_path}"
    deployment = up(llm().replace("synthetic-text", "clinging:Clinging"))
    deployment.wait_for("ready")

    assert deployment.stop() == 0
    assert "the engine hangs and is left behind" in {e["event"] for e in deployment.events}


def test_open_response_of_a_gateway_is_finished(up) -> None:
    deployment = up(llm("tokens = 150") + "[gateways.openai]\nport = 0\n")
    url = deployment.wait_for("ready")["gateways"]["openai"]
    address = url.removeprefix("http://")
    body = {"model": "text", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    connection = http.client.HTTPConnection(address, timeout=40)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    begun = response.read(1)

    deployment.process.send_signal(signal.SIGTERM)
    deployment.wait_for("stopping")
    streamed = (begun + response.read()).decode()
    connection.close()

    assert "hi:149" in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    assert deployment.end() == 0
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(address, timeout=40).connect()
    ended = [(e["actor"], e["outcome"]) for e in deployment.events if e["event"] == "request ended"]
    assert ("coordinator", "done") in ended


def test_down_stops_in_order(up, omni_bus) -> None:
    deployment = up(llm())
    deployment.wait_for("ready")

    down = omni_bus("down")

    assert (down.returncode, down.stdout.splitlines()[-1]) == (0, "demo: stopped")
    assert deployment.end() == 0


async def test_down_by_force_cuts_what_runs(up, omni_bus) -> None:
    deployment = up(llm())
    await deployment.told("ready")
    async with await deployment.client() as client:
        running = await ask(client, tokens=100_000)
        await has_begun(running)

        down = await asyncio.to_thread(omni_bus, "down", "--force")

    assert down.returncode == 0
    assert await deployment.ended() == 3


def test_down_without_a_deployment_says_so(omni_bus) -> None:
    down = omni_bus("down", "--name", "nothing")

    assert down.returncode == 1
    assert "unknown running deployment 'nothing' (known: none)" in down.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_killed_supervisor_takes_its_children_along(up) -> None:
    """Ten times under load; the fixture finds no process, and the next start sweeps what the last one left."""
    for _ in range(10):
        deployment = up(llm("replicas = 2"))
        await deployment.told("ready")
        async with await deployment.client() as client:
            requests = [await ask(client, tokens=100_000) for _ in range(4)]
            for request in requests:
                await has_begun(request)
            deployment.process.kill()
            assert await deployment.ended() == -signal.SIGKILL
