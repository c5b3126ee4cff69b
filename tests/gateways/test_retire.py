"""A gateway that retires beside its successor: nobody is refused, cut off or left waiting."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from actors.gateway import GatewayActor
from actors.testing import running
from omni_bus import gateway
from omni_bus.runtime.ports import bind_port

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from actors.testing import Running

TEXT = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""
LONG_S = 1000.0


class Front:
    """A listening socket that two gateways may serve, as a supervisor hands it on."""

    def __init__(self, deployment: Running) -> None:
        self._deployment = deployment
        self.socket = bind_port("front", "127.0.0.1", 0)
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.actors: list[GatewayActor] = []

    async def start(self) -> GatewayActor:
        """Start the next gateway on it."""
        index = len(self.actors) + 1
        actor = await GatewayActor.start(self._deployment.deployment, "openai", index, self.socket.dup())
        self.actors.append(actor)
        return actor


@asynccontextmanager
async def front() -> AsyncGenerator[Front]:
    async with running(TEXT) as deployment:
        made = Front(deployment)
        yield made
        for actor in made.actors:
            await actor.drain(0.0)
            await actor.close()
        made.socket.close()


def body(tokens: int = 3, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "sampling_params_list": [{"tokens": tokens}]} | fields


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, str]:
    """Post a request on an open connection; return head and text of the answer."""
    sent = json.dumps(body())
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n{sent}".encode())
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(answer.partition("content-length: ")[2].partition("\r\n")[0])
    document = json.loads(await reader.readexactly(length))
    return answer, document["choices"][0]["message"]["content"]


async def test_request_on_an_open_connection_is_served_and_is_its_last(monkeypatch) -> None:
    monkeypatch.setattr(gateway, "IDLE_S", LONG_S)
    async with front() as served:
        former = await served.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head, _ = await ask(reader, writer)
        assert "connection: close" not in head
        retiring = asyncio.create_task(former.retire())
        await asyncio.sleep(0)  # it has begun

        head, text = await ask(reader, writer)

        assert text == "hi:0 hi:1 hi:2"
        assert "connection: close" in head
        assert await reader.read() == b"", "it closes after that"
        await retiring
        writer.close()


async def test_connections_that_wait_are_served_by_the_successor() -> None:
    async with front() as served:
        former = await served.start()
        await former.retire()
        waiting = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(5)]
        asked = [asyncio.create_task(ask(*connection)) for connection in waiting]

        await served.start()

        assert [text for _, text in await asyncio.gather(*asked)] == ["hi:0 hi:1 hi:2"] * 5
        for _, writer in waiting:
            writer.close()


async def test_successor_takes_what_comes_while_the_former_finishes() -> None:
    async with front() as served, aiohttp.ClientSession(served.url) as session:
        former = await served.start()
        sent = body(stream=True, tokens=300)
        sent["sampling_params_list"][0]["step_time_s"] = 0.001
        async with session.post("/v1/chat/completions", json=sent) as response:
            await response.content.readline()
            await served.start()
            retiring = asyncio.create_task(former.retire())
            for _ in range(20):
                connection = await asyncio.open_connection("127.0.0.1", served.port)
                assert (await ask(*connection))[1] == "hi:0 hi:1 hi:2"
                connection[1].close()
            assert not retiring.done()
            rest = (await response.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert "hi:299" in rest
        await session.close()
        await retiring


async def test_idle_connections_are_closed_and_busy_ones_are_not(monkeypatch) -> None:
    monkeypatch.setattr(gateway, "IDLE_S", 0.05)
    async with front() as served:
        former = await served.start()
        idle = await asyncio.open_connection("127.0.0.1", served.port)
        used = await asyncio.open_connection("127.0.0.1", served.port)
        half = await asyncio.open_connection("127.0.0.1", served.port)
        await ask(*used)
        half[1].write(b"GET /health HTTP/1.1\r\n")
        while not any(one._head_timer is not None for one in former.server._open.all):
            await ask(*used)

        retiring = asyncio.create_task(former.retire())
        for reader, _ in (idle, used):
            assert await reader.read() == b""
        assert not retiring.done()
        half[1].write(b"Host: localhost\r\n\r\n")
        answer = (await half[0].read()).decode()

        assert answer.startswith("HTTP/1.1 200 OK")
        assert "connection: close" in answer.lower()
        await retiring
        for _, writer in (idle, used, half):
            writer.close()


async def test_stream_that_began_before_leaves_its_connection_to_one_more_request(monkeypatch) -> None:
    """Its head has promised to keep the connection, and the client may be about to use it."""
    monkeypatch.setattr(gateway, "IDLE_S", LONG_S)
    async with front() as served:
        former = await served.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        sent = json.dumps(body(stream=True, tokens=50))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n{sent}".encode())
        assert b"connection: close" not in (await reader.readuntil(b"\r\n\r\n")).lower()
        retiring = asyncio.create_task(former.retire())
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")

        head, text = await ask(reader, writer)

        assert ("connection: close" in head, text) == (True, "hi:0 hi:1 hi:2")
        await retiring
        writer.close()


@pytest.mark.parametrize("with_request", [False, True])
async def test_drain_ends_what_a_retiring_gateway_waits_for(monkeypatch, with_request) -> None:
    """The whole deployment stops meanwhile."""
    monkeypatch.setattr(gateway, "IDLE_S", LONG_S)
    async with front() as served:
        former = await served.start()
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.setblocking(False)
            if with_request:
                sent = json.dumps(body(stream=True, tokens=1_000_000))
                head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, f"{head}Content-Length: {len(sent)}\r\n\r\n{sent}".encode())
                await loop.sock_recv(client, 10)
            while not former.server._open.all:
                other = await asyncio.open_connection("127.0.0.1", served.port)
                await ask(*other)
                other[1].close()
                await other[1].wait_closed()
            retiring = asyncio.create_task(former.retire())
            await asyncio.sleep(0)

            assert await former.drain(0.0) is not with_request
            await retiring
