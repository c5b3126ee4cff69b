"""A client, or the sessions' own process, that is killed in the middle of an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from omni_bus.client import Item
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import payload_of, server_event
from omni_bus.errors import StageLost
from omni_bus.runtime import rundir

if TYPE_CHECKING:
    from collections.abc import Callable

    from processes.conftest import Up  # pyright: ignore[reportMissingImports]

    from omni_bus.client import Request

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TOML = (
    (ROOT / "configs" / "synthetic_sessions.toml")
    .read_text()
    .replace("8000", "0")
    .replace('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 200')
)

# Opens a session, asks for an answer, and writes down what it is told.
CHILD = """
import asyncio, sys
import msgspec
from omni_bus.client import BusClient
from omni_bus.core.session import client_events as asked
from omni_bus.core.session.codec import payload_of, server_event

async def main():
    client = await BusClient.connect("victim", sys.argv[1], sys.argv[2], timeout_s=20)
    request = await client.submit("sessions", ["events"], session="sess_1")
    await request.send("events", payload_of(asked.SessionOpen(session_id="sess_1", is_resumable=True)))
    await request.send("events", payload_of(asked.ResponseCreate()))
    async for item in request:
        event = server_event(item.payload)
        token = getattr(event, "resume_token", None)
        heard = {"seq": event.server_event_seq, "id": event.event_id, "type": type(event).__name__, "token": token}
        print(msgspec.json.encode(heard).decode(), flush=True)

asyncio.run(main())
"""


async def test_killed_client_is_succeeded(up: Callable[..., Up], environ: dict[str, str]) -> None:
    deployment = up(TOML)
    await deployment.told("ready")
    client = await deployment.client()
    path, about = rundir.find(rundir.root(environ), deployment.name)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        f"ipc://{path}/victim.sock",
        about.coordinator_endpoint,
        env=environ,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    heard = []
    while sum(event["type"] == "AudioDelta" for event in heard) < 5:
        heard.append(msgspec.json.decode(await child.stdout.readline()))
    child.kill()
    heard += [msgspec.json.decode(line) for line in (await child.stdout.read()).splitlines()]
    await child.wait()
    token, seq = heard[0]["token"], heard[-1]["seq"]
    assert heard[-1]["type"] != "ResponseDone"

    request = await client.submit("sessions", ["events"], session="sess_1")
    resume = asked.SessionResume(session_id="sess_1", resume_token=token, last_received_server_event_seq=seq)
    await request.send("events", payload_of(resume))
    more = []
    async for item in request:
        assert isinstance(item, Item)
        more.append(server_event(item.payload))
        if sum(isinstance(event, said.AudioDelta) for event in more) == 5 and isinstance(more[-1], said.AudioDelta):
            await request.send("events", payload_of(asked.ResponseCancel()))
        if isinstance(more[-1], said.ResponseDone):
            break
    await request.send("events", payload_of(asked.SessionClose()))
    async for _ in request:
        pass
    await client.close()

    assert isinstance(more[0], said.SessionResumed)
    seqs = [event["seq"] for event in heard[1:]] + [event.server_event_seq for event in more[1:]]
    assert seqs == list(range(1, len(seqs) + 1))
    names = [event["id"] for event in heard] + [event.event_id for event in more]
    assert len(set(names)) == len(names)
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_killed_session_actor_takes_its_requests_along_and_its_successor_serves(up: Callable[..., Up]) -> None:
    """Whoever talked with it hears which stage was lost; nothing of the answer goes on in any other stage."""
    deployment = up(TOML)
    await deployment.told("ready")
    async with await deployment.client() as client:

        async def first_sound(session: str) -> Request:
            request = await client.submit("sessions", ["events"], session=session)
            await request.send("events", payload_of(asked.SessionOpen(session_id=session, is_resumable=True)))
            await request.send("events", payload_of(asked.ResponseCreate()))
            async for item in request:
                assert isinstance(item, Item)
                if isinstance(server_event(item.payload), said.AudioDelta):
                    break
            return request

        lost = await first_sound("sess_1")
        os.kill(deployment.pid_of("sessions.0"), signal.SIGKILL)
        with pytest.raises(StageLost, match="sessions"):
            async for _ in lost:
                pass
        await deployment.told("actor ready", name="sessions.0")
        while (status := await client.admin("status"))["requests"]["live"]:
            pass  # the answer is being cancelled; each round asks the coordinator

        assert status["requests"]["failed"] == 1
        assert status["requests"]["cancelled"] >= 1
        async with await first_sound("sess_2"):
            pass
    assert await asyncio.to_thread(deployment.stop) == 0


async def test_sessions_that_only_listen_keep_no_restart_waiting(up: Callable[..., Up], omni_bus) -> None:
    """Their clients are told, and find the other replica while theirs is away."""
    deployment = up(TOML, "-o", "stages.sessions.replicas=2")
    await deployment.told("ready")
    async with await deployment.client() as client:

        async def begin(session: str) -> tuple[Request, said.SessionCreated]:
            request = await client.submit("sessions", ["events"], session=session)
            await request.send("events", payload_of(asked.SessionOpen(session_id=session)))
            item = await anext(request)
            assert isinstance(item, Item)
            created = server_event(item.payload)
            assert isinstance(created, said.SessionCreated)
            return request, created

        async def last_words(session: str) -> list[said.AnyServerEvent]:
            request, _ = await begin(session)
            heard = [server_event(item.payload) async for item in request if isinstance(item, Item)]
            await begin(f"{session} again")
            return heard

        listening = [asyncio.create_task(last_words(f"sess_{number}")) for number in range(4)]
        while (await client.admin("status"))["requests"]["live"] < len(listening):
            pass
        done = await asyncio.to_thread(omni_bus, "restart", "sessions", "--timeout", "25")

        assert (done.returncode, done.stderr) == (0, "")
        for words in await asyncio.gather(*listening):
            error, closed = words
            assert isinstance(error, said.ErrorEvent)
            assert error.error.code == "server_stopping"
            assert isinstance(closed, said.SessionClosed)
    assert await asyncio.to_thread(deployment.stop) == 0
