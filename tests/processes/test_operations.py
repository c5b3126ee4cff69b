"""Drain, restart and scale of a deployment that serves: under a constant stream of requests none is lost or refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.processes.load import CHAT, answer, load, until_healthy

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    Command = Callable[..., subprocess.CompletedProcess[str]]

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

ASK = [{"role": "user", "content": "hi"}]

QUIET = ("--log-level", "WARNING")
"""Nobody reads the deployment's output under load, and its pipe must not fill."""


def two_stages(*, llm: int = 2, relay: int = 2, more: str = "") -> str:
    return TWO_STAGES.format(llm=llm, relay=relay, more=more)


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


@pytest.mark.slow
async def test_no_request_is_lost_while_stages_are_scaled(up, omni_bus) -> None:
    deployment = up(two_stages(llm=1, relay=1), *QUIET)
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with load(url, ("text", "relayed")) as stream:
        for sizes, names in (
            (("llm=3", "relay=2"), {"llm.0", "llm.1", "llm.2", "relay.0", "relay.1"}),
            (("llm=1", "relay=1"), {"llm.0", "relay.0"}),
        ):
            await tell(omni_bus, "scale", *sizes)
            await stream.more(20)
            status = json.loads(await tell(omni_bus, "status", "--json"))
            replicas = [actor for actor in status["actors"] if actor["role"] == "stage"]
            assert {replica["actor"] for replica in replicas} == names
            assert all(f"{replica['stage']}={replica['wanted']}" in sizes for replica in replicas)
    assert await asyncio.to_thread(deployment.stop) == 0


@pytest.mark.slow
async def test_requests_wait_for_the_only_replica_and_the_only_gateway(up, omni_bus) -> None:
    deployment = up(two_stages(llm=1, relay=1), *QUIET, "-o", "gateways.openai.processes=1")
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with load(url, ("text", "relayed")) as stream:
        for target in ("llm", "relay", "gateway.openai", "coordinator", "llm.0"):
            await tell(omni_bus, "restart", target)
            await stream.more(20)
    assert await asyncio.to_thread(deployment.stop) == 0


# --- what an order does without load ------------------------------------------------------------------------


async def test_drain_shows_in_health_and_in_refusals_and_is_undone(up, omni_bus) -> None:
    deployment = up(two_stages(llm=1, relay=2), *QUIET)
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with aiohttp.ClientSession(url) as session:
        drained = await tell(omni_bus, "drain", "llm", "relay.1")
        assert drained.splitlines() == [
            "  llm.0: draining",
            "  relay.1: draining",
            "llm.0, relay.1: drained",
        ]
        async with session.get("/health") as response:
            health = await response.json()
        assert (response.status, health["reason"]) == (503, "stage llm: replica 0 is drained")
        replicas = {name: [row["phase"] for row in stage["replicas"]] for name, stage in health["stages"].items()}
        assert replicas == {"llm": ["drained"], "relay": ["ready", "drained"]}
        assert [stage["wanted"] for stage in health["stages"].values()] == [1, 2]
        async with session.post(CHAT, json={"model": "text", "messages": ASK}) as response:
            refused = await response.json()
        assert (response.status, refused["error"]["message"]) == (
            503,
            "stage 'llm' has no replica that can serve (llm.0: drained)",
        )
        status = await asyncio.to_thread(omni_bus, "status")
        assert status.returncode == 1
        assert re.search(r"^llm\.0 +drained ", status.stdout, re.MULTILINE)

        # It stays so whoever is restarted.
        await tell(omni_bus, "restart", "llm", "coordinator")
        async with session.get("/health") as response:
            assert response.status == 503

        assert await tell(omni_bus, "drain", "--undo", "llm", "relay") == (
            "llm.0, relay.0, relay.1: new requests are given again\n"
        )
        await until_healthy(session)  # replicas say hello to the new coordinator in their own time
        body = {"model": "text", "messages": ASK, "max_tokens": 2, "stream": False}
        assert await answer(session, body) == "hi:0 hi:1"
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_order_that_runs_out_of_time_changes_nothing_unless_it_is_forced(up, omni_bus) -> None:
    deployment = up(two_stages(llm=2, relay=1), *QUIET)
    url = (await deployment.told("ready"))["gateways"]["openai"]
    endless = {"model": "text", "messages": ASK, "sampling_params_list": [{"tokens": 100_000}], "stream": True}
    async with aiohttp.ClientSession(url) as session, session.post(CHAT, json=endless) as response:
        await response.content.readline()

        for arguments, words in (
            (("restart", "llm.0", "--timeout", "0.1"), "llm.0 still works on 1 request after 0.1 s, so it goes on"),
            (("drain", "llm.0", "--timeout", "0.1"), "llm.0: drained; llm.0 still works on 1 request after 0.1 s"),
            (("restart", "gateway.openai", "--timeout", "0.1"), "leaves when its connections have ended"),
        ):
            done = await asyncio.to_thread(omni_bus, *arguments)
            assert done.returncode == 3, done
            assert words in done.stderr
        assert not response.content.at_eof()

        forced = await asyncio.to_thread(omni_bus, "restart", "llm.0", "--timeout", "0.1", "--force")
        assert (forced.returncode, forced.stderr) == (
            3,
            "omni-bus restart: restarted llm.0; what took too long was ended\n",
        )
        rest = (await response.content.read()).decode()
    assert "'llm.0' is taken out of service" in rest
    assert "[DONE]" not in rest
    assert await asyncio.to_thread(deployment.stop) == 0


BRANCHING = """
[stages.llm]
adapter = "synthetic-text"
max_num_seqs = 4
max_resident = 4

[stages.voice]
adapter = "synthetic-speech"
max_num_seqs = 2
replicas = 2

[stages.other]
adapter = "synthetic-speech"
max_num_seqs = 4

[pipelines.both]
max_in_flight = 4
edges = [
  "in.messages -> llm.prompt",
  "llm.text -> voice.text",
  "llm.text -> other.text",
  "voice.audio -> out.audio",
  "other.audio -> out.other",
]
"""


def test_orders_that_can_not_be_are_refused(up, omni_bus) -> None:
    deployment = up(BRANCHING)
    deployment.wait_for("ready")
    targets = "coordinator, llm, other, voice"
    for arguments, code, words in (
        (("scale", "llm=0"), 1, "llm=0: 0 replicas came (allowed: 1 to 64)"),
        (("scale", "llm=65"), 1, "llm=65: 65 replicas came (allowed: 1 to 64)"),
        (("scale", "--", "llm=-1"), 1, "llm=-1: expected STAGE=N, as in llm=2"),
        (("scale", "llm"), 1, "llm: expected STAGE=N, as in llm=2"),
        (("scale", "llm=1", "llm=2"), 1, "llm=2: stage 'llm' was given a number already"),
        (("scale", "lm=2"), 1, "unknown stage 'lm'; did you mean 'llm'? (known: llm, other, voice)"),
        (("scale", "voice=1"), 2, "stage 'voice' holds 2, max_in_flight of both is 4 (allowed: at most 2 in all)"),
        (("drain", "voice.2"), 1, "stage 'voice' has no replica 2 (allowed: 0 to 1)"),
        (("drain", "coordinator"), 1, "unknown stage or replica 'coordinator' (known: llm, other, voice)"),
        (("drain", "llm", "--timeout", "nan"), 1, "--timeout nan: not a number of seconds, at least 0"),
        (("restart", "gateway.other"), 1, f"unknown target 'gateway.other' (known: {targets})"),
    ):
        done = omni_bus(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), done
        assert words in done.stderr
    assert deployment.stop() == 0


SLOW = """
[stages.llm]
adapter = "synthetic-text"
replicas = {replicas}
load_time_s = {load_time_s}

[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]

[gateways.openai]
port = 0
"""


async def test_stage_that_is_worked_on_takes_no_other_order(up, omni_bus) -> None:
    deployment = up(SLOW.format(replicas=1, load_time_s=3))
    await deployment.told("ready")
    scaling = asyncio.create_task(asyncio.to_thread(omni_bus, "scale", "llm=2"))
    await deployment.told("process", process="llm.1", phase="starting")

    for arguments in (("scale", "llm=3"), ("restart", "llm.0"), ("restart",), ("drain", "llm")):
        refused = await asyncio.to_thread(omni_bus, *arguments)
        assert refused.returncode == 2
        assert "'llm' is busy: a scale of it is under way" in refused.stderr

    assert (await scaling).returncode == 0
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_replicas_that_do_not_come_up_are_taken_back(up, omni_bus, environ, tmp_path) -> None:
    (tmp_path / "picky.py").write_text(
        "import pathlib\n"
        "from adapters.synthetic import SyntheticText\n"
        "from omni_bus.errors import BadInput\n"
        "class Picky(SyntheticText):\n"
        "    def load(self, report):\n"
        f"        if pathlib.Path({str(tmp_path / 'broken')!r}).exists():\n"
        "            raise BadInput('the weights are damaged')\n"
        "        super().load(report)\n"
    )
    environ["PYTHONPATH"] += f":{tmp_path}"
    deployment = up(two_stages(llm=1, relay=1).replace("synthetic-text", "picky:Picky"), *QUIET)
    url = (await deployment.told("ready"))["gateways"]["openai"]
    (tmp_path / "broken").touch()

    scaled = await asyncio.to_thread(omni_bus, "scale", "llm=3")
    assert scaled.returncode == 2
    assert "did not come up: the weights are damaged" in scaled.stderr
    status = json.loads(await tell(omni_bus, "status", "--json"))
    assert [(row["actor"], row["wanted"]) for row in status["actors"] if row["stage"] == "llm"] == [("llm.0", 1)]

    # A restart has no former incarnation to go back to: who waits is refused, until it comes up.
    restarted = await asyncio.to_thread(omni_bus, "restart", "llm")
    assert restarted.returncode == 2
    assert "llm.0 did not come up: the weights are damaged" in restarted.stderr
    body = {"model": "text", "messages": ASK, "max_tokens": 2, "stream": False}
    async with aiohttp.ClientSession(url) as session:
        async with session.post(CHAT, json=body) as response:
            assert response.status == 503
        (tmp_path / "broken").unlink()
        await tell(omni_bus, "restart", "llm")
        assert await answer(session, body) == "hi:0 hi:1"
    assert await asyncio.to_thread(deployment.stop) == 0


# --- stops in the middle of an order ------------------------------------------------------------------------


async def begun(deployment, omni_bus, order: str, event: str) -> asyncio.Task[subprocess.CompletedProcess[str]]:
    """Give an order that takes its time, and wait until it is in the middle of it."""
    name, *fields = event.split()
    task = asyncio.create_task(asyncio.to_thread(omni_bus, *order.split()))
    await deployment.told(name, **dict(field.split("=") for field in fields))
    return task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "event", "running", "is_forced"),
    [
        ("scale llm=3", "process process=llm.2 phase=starting", 0, False),
        ("restart llm", "process process=llm.0 phase=stopped", 0, False),
        ("restart gateway.openai", "process process=gateway.openai.1 phase=starting", 0, False),
        ("restart coordinator", "process process=coordinator phase=starting", 0, False),
        ("scale llm=1", "order", 300, False),
        ("drain llm", "order", 300, False),
        ("drain llm", "order", 100_000, True),
        ("scale llm=3", "process process=llm.2 phase=starting", 100_000, True),
        ("restart llm.1", "order", 100_000, True),
    ],
)
async def test_stop_in_the_middle_of_an_order_leaves_nothing(up, omni_bus, order, event, running, is_forced) -> None:
    """The fixture looks for processes and files; requests that run may finish, unless the stop is asked for twice."""
    deployment = up(SLOW.format(replicas=2, load_time_s=1))
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(url))
        responses: list[aiohttp.ClientResponse] = []
        for _ in range(2 if running else 0):  # one on each replica
            slowly = {"tokens": running, "step_time_s": 0.01}
            sent = {"messages": ASK, "stream": True, "sampling_params_list": [slowly]}
            responses.append(await stack.enter_async_context(session.post(CHAT, json=sent)))
            await responses[-1].content.readline()
        ordered = await begun(deployment, omni_bus, order, event)

        deployment.process.send_signal(signal.SIGTERM)
        await deployment.told("stopping")
        if is_forced:
            deployment.process.send_signal(signal.SIGINT)
        for response in responses if not is_forced else ():
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")

    assert await deployment.ended() == (3 if is_forced else 0)
    told = await ordered
    assert told.returncode in (1, 2)
    assert "the deployment is stopping" in told.stderr or "ended before the order was carried out" in told.stderr


async def test_socket_files_of_the_killed_are_removed_at_once(up, environ) -> None:
    deployment = up(two_stages(), *QUIET)
    await deployment.told("ready")
    directory = Path(environ["XDG_RUNTIME_DIR"]) / "omni-bus" / deployment.name
    names = ("llm.1", "gateway.openai.0", "coordinator")
    for name in names:
        pid = deployment.pid_of(name)
        assert len(list(directory.glob("*.sock"))) == 9
        os.kill(pid, signal.SIGKILL)
        await deployment.told("process", process=name, phase="backing off")
        assert list(directory.glob(f"{name}-{pid}.sock")) == []
        assert len(list(directory.glob("*.sock"))) == 8
        await deployment.told("process", process=name, phase="ready")
    assert await asyncio.to_thread(deployment.stop) == 0


# --- sleep and wake -------------------------------------------------------------------------------------------


async def until_held(omni_bus: Command) -> None:
    """Wait until a request waits for a replica, by asking."""
    while not json.loads((await asyncio.to_thread(omni_bus, "status", "--json")).stdout)["held"]:
        pass


@pytest.mark.slow
async def test_sleeping_stages_refuse_or_keep_requests_and_wake_as_they_were(up, omni_bus) -> None:
    deployment = up(two_stages(llm=1, relay=1), *QUIET, "-o", 'stages.relay.while_asleep="queue"')
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with aiohttp.ClientSession(url) as session:

        async def ask(model: str) -> tuple[int, str]:
            async with session.post(CHAT, json={"model": model, "messages": ASK}) as response:
                return response.status, await response.text()

        async with session.post("/sleep?level=1&stage=llm") as response:
            assert (response.status, await response.json()) == (200, {"status": "sleeping", "level": 1})
        status, words = await ask("text")
        assert (status, "stage 'llm' has no replica that can serve (llm.0: asleep)" in words) == (503, True)
        async with session.get("/health") as response:
            health = await response.json()
            assert (response.status, health["stages"]["llm"]["replicas"][0]["phase"]) == (503, "asleep")
        await tell(omni_bus, "restart", "llm")
        assert (await ask("text"))[0] == 503, "it sleeps on"
        woken = (await tell(omni_bus, "wake")).splitlines()
        assert (woken[0], woken[-2:]) == ("  llm.0: waking", ["  llm.0: ready", "llm.0: awake"])
        assert set(woken[1:-2]) <= {"  llm.0: synthetic weights"}, "phases of its load, if they last"

        assert "asleep at level 2" in await tell(omni_bus, "sleep", "relay", "--level", "2")
        waiting = asyncio.create_task(ask("relayed"))
        await until_held(omni_bus)
        assert (await ask("text"))[0] == 200
        await tell(omni_bus, "restart", "coordinator")
        await until_held(omni_bus)
        assert "relay.0: awake" in await tell(omni_bus, "wake", "relay")
        assert (await waiting)[0] == 200
        assert "nothing to do" in await tell(omni_bus, "wake")
    assert await asyncio.to_thread(deployment.stop) == 0
