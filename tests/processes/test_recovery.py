"""What the callers of a gateway notice when a process behind it is killed or gets stuck: nothing, or the truth."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from adapters.synthetic_marks import read_text
from tests.processes.load import until_healthy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.processes

CHAT = "/v1/chat/completions"
QUIET = ("--log-level", "WARNING")
"""No line for each question: nobody reads them meanwhile, and those that are waited for come behind them."""

NUM_STREAMS = 50
NUM_WORDS = 200
WORD_BYTES = 4000
"""So many of these fit in no socket's buffers: a stream that nobody reads waits, however long a test takes."""

TOML = """
{more}

[stages.llm]
adapter = "synthetic-text"
{llm}

[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
{text}

[gateways.openai]
"""


SPOKEN = """
arena_threshold_bytes = 4096

[stages.llm]
adapter = "synthetic-text"

[stages.voice]
adapter = "synthetic-speech"

[pipelines.spoken]
edges = [
  "in.messages -> llm.prompt",
  "llm.text -> out.text",
  "llm.text -> voice.text",
  "voice.audio -> out.audio",
]

[gateways.openai]
"""


class Stream:
    """One streamed answer, read piece by piece."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.text = ""
        self.error: dict[str, Any] = {}
        self.is_complete = False

    async def read_on(self) -> bool:
        """Read up to the next piece of text; False at the end of the answer."""
        async for line in self.response.content:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                self.is_complete = True
                continue
            document = json.loads(data)
            if "error" in document:
                self.error = document["error"]
            elif document["choices"] and document["choices"][0]["delta"].get("content"):
                self.text += document["choices"][0]["delta"]["content"]
                return True
        return False

    async def read_all(self) -> None:
        """Read to the end."""
        while await self.read_on():
            pass
        self.response.release()

    def check(self, marker: str, num_words: int) -> None:
        """Each word came once, in order, and is this request's."""
        assert (self.is_complete, self.error) == (True, {})
        marks = read_text(self.text)
        assert [mark.number for mark in marks] == list(range(num_words))
        assert {mark.marker for mark in marks} == {marker}


def body(marker: str, model: str = "text", **params: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": marker}]
    return {"model": model, "messages": messages, "stream": True, "sampling_params_list": [params]}


LONG: dict[str, Any] = {"tokens": NUM_WORDS, "chunk_bytes": WORD_BYTES}


@contextlib.asynccontextmanager
async def session_of(deployment: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """Callers of the deployment, whose buffers are as small as can be."""
    url = (await deployment.told("ready"))["gateways"]["openai"]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, read_bufsize=4096) as session:
        yield session


async def opened(session: aiohttp.ClientSession, document: dict[str, Any]) -> Stream:
    """Begin a stream and read its first piece."""
    response = await session.post(CHAT, json=document)
    assert response.status == 200, await response.text()
    stream = Stream(response)
    assert await stream.read_on()
    return stream


async def health(session: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
    async with session.get("/health") as response:
        return response.status, await response.json()


async def until_unhealthy(session: aiohttp.ClientSession, words: str) -> dict[str, Any]:
    """Ask until the answer is 503 and says these words. Start such a deployment as `QUIET`."""
    while True:
        status, report = await health(session)
        if status == 503 and words in report["reason"]:
            return report


async def until_status(client: Any, path: str, value: Any) -> None:
    """Ask the coordinator until a value of its status is what it should be."""
    found: Any = None
    while found != value:
        found = await client.admin("status")
        for key in path.split("."):
            found = found[key]


# --- the coordinator ------------------------------------------------------------------------------------------


async def test_killed_coordinator_costs_no_stream_and_no_limit(up) -> None:
    brief = '[pipelines.brief]\nedges = ["in.messages -> llm.prompt", "llm.text -> out.text"]\ntimeout_s = 8'
    llm = f"max_num_seqs = {NUM_STREAMS + 1}\nmax_resident = {2 * NUM_STREAMS}"
    limits = f"max_in_flight = {NUM_STREAMS}\nmax_queued = 0\n{brief}"
    deployment = up(TOML.format(more="", llm=llm, text=limits))
    async with session_of(deployment) as session:
        streams = await asyncio.gather(*(opened(session, body(f"m{i}", **LONG)) for i in range(NUM_STREAMS)))
        limited = await opened(session, body("brief", "brief", **LONG))

        os.kill(deployment.pid_of("coordinator"), signal.SIGKILL)
        await deployment.told("process", process="coordinator", phase="backing off", exit=-signal.SIGKILL)
        await deployment.told("process", process="coordinator", phase="ready", restarts=1)

        async with await deployment.client() as client:
            await until_status(client, "pipelines.text.in_flight", NUM_STREAMS)
            await until_healthy(session)
            async with session.post(CHAT, json=body("one too many")) as refused:
                assert refused.status == 503
                assert f"max_in_flight {NUM_STREAMS}" in (await refused.json())["error"]["message"]
            await deployment.told("request ended", pipeline="brief", code="deadline_exceeded")
            await asyncio.gather(*(stream.read_all() for stream in streams), limited.read_all())
            await until_status(client, "requests.live", 0)

        for number, stream in enumerate(streams):
            stream.check(f"m{number}", NUM_WORDS)
        assert (limited.is_complete, limited.error["code"]) == (False, 504)
        admitted = await opened(session, body("admitted again", tokens=3))
        await admitted.read_all()
        admitted.check("admitted_again", 3)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_silent_coordinator_is_not_waited_for_and_is_restarted(up) -> None:
    deployment = up(TOML.format(more="heartbeat_s = 0.5", llm="", text=""), *QUIET)
    async with session_of(deployment) as session:
        stream = await opened(session, body("m", **LONG))

        os.kill(deployment.pid_of("coordinator"), signal.SIGSTOP)

        async with session.post(CHAT, json=body("lost")) as refused:
            assert refused.status == 503
            assert "the coordinator" in (await refused.json())["error"]["message"]
            assert int(refused.headers["Retry-After"]) >= 1
        died = await deployment.told("process died", process="coordinator")
        assert died["error"] == "it hung: it answers no heartbeats"
        await deployment.told("process", process="coordinator", phase="ready", restarts=1)
        await until_healthy(session)
        await stream.read_all()
        stream.check("m", NUM_WORDS)
    assert await asyncio.to_thread(deployment.stop) == 0


def links_of(pid: int) -> tuple[int, set[str]]:
    """Return how many sockets of ZeroMQ a process has, by their signals, and whose memory it maps."""
    targets = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(fd.readlink())
    mapped = set(re.findall(r"memfd:omni-bus (\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return sum("eventfd" in str(target) for target in targets), mapped


async def test_links_to_a_stage_that_died_with_the_coordinator_are_given_back(up) -> None:
    """Sockets to it and memory of its would stay in the others, more with each such death."""
    deployment = up(SPOKEN, *QUIET)
    async with session_of(deployment) as session:
        document = {"messages": [{"role": "user", "content": "Hi"}], "modalities": ["audio"]}
        async with session.post(CHAT, json=document) as spoken:
            assert spoken.status == 200, await spoken.text()
        survivors = [deployment.pid_of(name) for name in ("llm.0", "gateway.openai.0")]
        before = [links_of(pid) for pid in survivors]
        assert "voice.0" in before[1][1], "the gateway has read its memory"

        for name in ("coordinator", "voice.0"):
            os.kill(deployment.pid_of(name), signal.SIGKILL)
        await deployment.told("process", process="voice.0", phase="ready", restarts=1)

        async with await deployment.client() as client:
            while any(
                num_sockets >= num_before or "voice.0" in mapped
                for (num_sockets, mapped), (num_before, _) in zip(map(links_of, survivors), before, strict=True)
            ):
                await client.admin("status")
    assert await asyncio.to_thread(deployment.stop) == 0


# --- a gateway ------------------------------------------------------------------------------------------------


async def test_killed_gateway_frees_its_requests_and_comes_back(up) -> None:
    deployment = up(TOML.format(more="", llm="", text=""))
    async with session_of(deployment) as session, await deployment.client() as client:
        streams = [await opened(session, body(f"m{number}", **LONG)) for number in range(5)]

        os.kill(deployment.pid_of("gateway.openai.0"), signal.SIGKILL)

        for stream in streams:
            stream.response.close()
        await until_status(client, "requests.live", 0)
        (stage,) = [row for row in await client.admin("health") if row["role"] == "stage"]
        assert (stage["stats"]["active"], stage["stats"]["cancelled"]) == (0, 5)
        await deployment.told("process", process="gateway.openai.0", phase="ready", restarts=1)
        again = await opened(session, body("again", tokens=3))
        await again.read_all()
        again.check("again", 3)
    assert await asyncio.to_thread(deployment.stop) == 0


# --- a stage --------------------------------------------------------------------------------------------------


async def test_killed_replica_is_noticed_by_those_only_whose_answer_had_begun(up) -> None:
    deployment = up(TOML.format(more="", llm="replicas = 2\nmax_num_seqs = 1\nmax_resident = 1", text=""))
    async with session_of(deployment) as session, await deployment.client() as client:
        begun = await opened(session, body("begun", **LONG))
        elsewhere = await opened(session, body("elsewhere", **LONG))
        waiting = asyncio.create_task(opened(session, body("waiting", tokens=20)))
        await until_status(client, "requests.live", 3)

        os.kill(deployment.pid_of("llm.0"), signal.SIGKILL)

        await begun.read_all()
        assert not begun.is_complete
        assert (begun.error["code"], begun.error["stage"], begun.error["retry_safe"]) == (503, "llm", True)
        assert "stage 'llm' (actor llm.0) was lost" in begun.error["message"]
        await elsewhere.read_all()
        elsewhere.check("elsewhere", NUM_WORDS)
        resumed = await waiting
        await resumed.read_all()
        resumed.check("waiting", 20)
        await until_status(client, "requests.live", 0)
        requests = (await client.admin("status"))["requests"]
        assert (requests["rerouted"], requests["failed"], requests["done"]) == (2, 0, 2)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_request_waits_for_the_only_replica_to_come_back(up) -> None:
    deployment = up(TOML.format(more="", llm="max_num_seqs = 1\nmax_resident = 1", text="max_in_flight = 2"))
    async with session_of(deployment) as session, await deployment.client() as client:
        begun = await opened(session, body("begun", **LONG))
        bound = asyncio.create_task(opened(session, body("bound", tokens=20)))
        await until_status(client, "pipelines.text.in_flight", 2)
        queued = asyncio.create_task(opened(session, body("queued", tokens=20)))
        await until_status(client, "pipelines.text.queued", 1)

        os.kill(deployment.pid_of("llm.0"), signal.SIGKILL)

        await begun.read_all()
        assert begun.error["retry_safe"] is True
        for marker, task in (("bound", bound), ("queued", queued)):
            stream = await task
            await stream.read_all()
            stream.check(marker, 20)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_killed_replica_comes_back_while_nobody_reads_what_its_supervisor_says(up) -> None:
    deployment = up(TOML.format(more="", llm="", text=""))
    async with session_of(deployment) as session:
        stdout = deployment.process.stdout
        size = fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, 4096)
        for number in range(size // 100):  # a line each, and each is longer
            stream = await opened(session, body(f"m{number}", tokens=1))
            await stream.read_all()

        os.kill(deployment.pid_of("llm.0"), signal.SIGKILL)

        stream = await opened(session, body("again", tokens=3))
        await stream.read_all()
        stream.check("again", 3)
        await deployment.told("process", process="llm.0", phase="ready", restarts=1)
    assert await asyncio.to_thread(deployment.stop) == 0


@pytest.mark.parametrize("how", [{"busy": False}, {"busy": True}], ids=["waits", "spins"])
async def test_stuck_engine_is_found_told_and_replaced(up, how: dict[str, Any]) -> None:
    llm = "step_timeout_s = 1\nmax_num_seqs = 1\nmax_resident = 1"
    deployment = up(TOML.format(more="", llm=llm, text=""), *QUIET)
    async with session_of(deployment) as session:
        stuck = await opened(session, body("stuck", tokens=20, hang_at_step=2, **how))
        waiting = asyncio.create_task(opened(session, body("waiting", tokens=5)))

        report = await until_unhealthy(session, "its engine has made no progress for 1 s")
        assert report["stages"]["llm"]["replicas"][0]["reason"].startswith("its engine has made no progress")

        await stuck.read_all()
        assert (stuck.error["stage"], stuck.is_complete) == ("llm", False)
        resumed = await waiting
        await resumed.read_all()
        resumed.check("waiting", 5)
        assert (await health(session))[0] == 200
        died = await deployment.told("process died", process="llm.0")
        assert died["error"] == "it hung: its engine has made no progress for 1 s"
    assert await asyncio.to_thread(deployment.stop) == 0


# --- health ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("llm.0", 503, "stage llm: replica 0 does not answer (waited 1 s)"),
        ("coordinator", 503, "the coordinator does not answer"),
        ("gateway.openai.1", 200, None),
    ],
)
async def test_first_answer_of_health_tells_of_a_hang_and_the_next_of_its_end(up, name, status, reason) -> None:
    """Heartbeats are too far apart here to be missed: it is the round trip that tells."""
    deployment = up(TOML.format(more="heartbeat_s = 60", llm="", text="") + "processes = 2")
    async with session_of(deployment) as session:
        os.kill(deployment.pid_of(name), signal.SIGSTOP)
        told, report = await health(session)
        assert (told, report.get("reason")) == (status, reason)
        rows = [*report["stages"]["llm"]["replicas"], *report["gateways"].values()]
        assert [row["is_live"] for row in rows].count(False) == (0 if name == "coordinator" else 1)

        os.kill(deployment.pid_of(name), signal.SIGCONT)
        told, report = await health(session)
        rows = [*report["stages"]["llm"]["replicas"], *report["gateways"].values()]
        assert (told, [row["is_live"] for row in rows]) == (200, [True, True]), "whoever answers is not in it"
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_degraded_stage_is_told_and_refused_at_once(up) -> None:
    deployment = up(TOML.format(more="max_restarts = 0", llm="replicas = 2", text=""), *QUIET)
    async with session_of(deployment) as session:
        os.kill(deployment.pid_of("llm.1"), signal.SIGKILL)
        await deployment.told("process", process="llm.1", phase="degraded")
        assert (await health(session))[0] == 200, "the other one serves"
        os.kill(deployment.pid_of("llm.0"), signal.SIGKILL)

        report = await until_unhealthy(session, "replica 0 is in phase 'degraded'")

        replicas = report["stages"]["llm"]["replicas"]
        assert [(one["replica"], one["phase"], one["reason"]) for one in replicas] == [
            (0, "degraded", "SIGKILL"),
            (1, "degraded", "SIGKILL"),
        ]
        async with session.post(CHAT, json=body("refused")) as refused:
            error = (await refused.json())["error"]
            assert (refused.status, refused.headers["Retry-After"], error["stage"]) == (503, "60", "llm")
            assert "llm.0: degraded, SIGKILL" in error["message"]
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_health_tells_of_a_dead_coordinator(up) -> None:
    deployment = up(TOML.format(more="heartbeat_s = 0.5", llm="", text=""), *QUIET)
    async with session_of(deployment) as session:
        os.kill(deployment.pid_of("coordinator"), signal.SIGSTOP)
        await until_unhealthy(session, "the coordinator does not answer")

        # Its supervisor has ended it by now, or will.
        await until_healthy(session)
    assert await asyncio.to_thread(deployment.stop) == 0
