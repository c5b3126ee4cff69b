"""Malformed input of every kind, the same each time; `scripts/fuzz` tries many more."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NoReturn

import pytest
from aiohttp import WSMsgType, web

from actors.testing import running
from gateways import websockets
from gateways.http import HttpGateway
from loads import fuzz_frames, fuzz_http, fuzz_robots, fuzz_websocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running
    from omni_bus.core.pipeline import Pipeline

TOML = f"""
[stages.llm]
adapter = "synthetic-text"
tokens = 3

[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
max_queued = 1000

[gateways.openai]
{fuzz_http.TIMEOUTS}
"""
SPEAKS = """
[stages.voice]
adapter = "synthetic-speech"
max_num_seqs = 64

[pipelines.speech]
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
max_queued = 1000

[gateways.openai]
"""
NUM_INPUTS = 1500
SHAPES = fuzz_http.shapes()
ACCEPTED = {"absolute path", "type with odd parameters", "no version"}
"""What HTTP allows, or this server leaves alone."""

UNANSWERED = {"nothing", "blank lines"}


@pytest.fixture
async def deployment() -> AsyncIterator[Running]:
    async with running(TOML) as deployment:
        yield deployment


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info]


async def test_each_known_shape_of_broken_http_is_refused_and_nothing_is_smuggled(
    deployment: Running, caplog: pytest.LogCaptureFixture
) -> None:
    ends: dict[str, list[int]] = {}
    for what, sent in SHAPES.items():
        tally = fuzz_http.Tally()
        tally.take(sent, await fuzz_http.exchange("127.0.0.1", deployment.port, sent))
        assert tally.broken == [], what
        ends[what] = list(tally.statuses.elements())

    silent = {what for what, statuses in ends.items() if not statuses}
    assert silent == UNANSWERED | {"no version"}  # HTTP/0.9 has no status
    allowed = {what for what, statuses in ends.items() if any(status < 400 for status in statuses)}
    assert allowed <= ACCEPTED
    assert failures(caplog) == []


@pytest.mark.parametrize("make", [fuzz_http.raw, fuzz_http.json_body], ids=["raw", "json"])
async def test_malformed_http_is_the_callers_fault(
    deployment: Running, caplog: pytest.LogCaptureFixture, make: fuzz_http.Make
) -> None:
    tally = await fuzz_http.fuzz(deployment.url, make, NUM_INPUTS, Random(5))

    assert tally.broken == []
    assert tally.num_tried == NUM_INPUTS
    assert tally.statuses[400] > NUM_INPUTS / 2
    assert failures(caplog) == []


def test_codec_refuses_what_is_no_frame() -> None:
    messages = fuzz_frames.corpus()

    ends, broken = fuzz_frames.fuzz_codec(messages, 10 * NUM_INPUTS, Random(5))

    assert broken == []
    assert ends["refused"] > ends["decoded"] > NUM_INPUTS


class Echo(HttpGateway):
    """A WebSocket route that sends back what comes, and one that fails."""

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        return True

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.edge])
        app.router.add_get("/v1/echo", self._echo)
        app.router.add_get("/v1/fails", self._fail)
        return app

    async def _echo(self, request: web.Request) -> web.WebSocketResponse:
        socket = await websockets.upgrade(request, max_message_bytes=1 << 20)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        return socket

    async def _fail(self, request: web.Request) -> NoReturn:
        await websockets.upgrade(request, max_message_bytes=1 << 20)
        raise RuntimeError("broken")


@pytest.fixture
async def sockets() -> AsyncIterator[Running]:
    table, _, _ = TOML.partition("[gateways.openai]")
    async with running(f'{table}[gateways.echo]\nprotocol = "{__name__}:Echo"') as deployment:
        yield deployment


async def test_malformed_websockets_are_the_callers_fault(sockets: Running, caplog: pytest.LogCaptureFixture) -> None:
    tally = await fuzz_websocket.fuzz(sockets.url, "/v1/echo", NUM_INPUTS, Random(5), texts=['{"type": "hello"}'])

    assert tally.broken == []
    assert tally.num_tried == NUM_INPUTS
    assert {"close 1000", "close 1002", "close 1007", "close 1009", "HTTP 400"} <= tally.ends.keys()
    assert failures(caplog) == []


async def test_malformed_speech_streams_are_the_callers_fault(caplog: pytest.LogCaptureFixture) -> None:
    texts, openings = fuzz_websocket.SPEECH_TEXTS, fuzz_websocket.SPEECH_OPENINGS
    async with running(SPEAKS) as deployment:
        tally = await fuzz_websocket.fuzz(
            deployment.url, fuzz_websocket.SPEECH, NUM_INPUTS, Random(5), texts=texts, openings=openings
        )

        assert tally.broken == []
        assert tally.num_tried == NUM_INPUTS
        assert {"close 1000", "close 1002", "close 1007", "close 1008", "close 1009", "HTTP 400"} <= tally.ends.keys()
        assert failures(caplog) == []
        while deployment.gateway.client.requests:
            await deployment.gateway.client.admin("status")


async def test_malformed_observations_are_the_callers_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with running(f"{fuzz_robots.TOML}\n[gateways.openai]") as deployment:
        await deployment.until_ready()
        tally = await fuzz_websocket.fuzz(
            deployment.url, fuzz_robots.ROUTE, NUM_INPUTS // 2, Random(5), binaries=fuzz_robots.corpus()
        )

        assert tally.broken == []
        assert tally.num_tried == NUM_INPUTS // 2
        assert {"close 1000", "close 1002", "close 1007", "close 1009", "HTTP 400"} <= tally.ends.keys()
        assert failures(caplog) == []
        while deployment.gateway.client.requests:
            await deployment.gateway.client.admin("status")


async def test_websocket_that_fails_by_itself_is_told_from_a_callers_fault(sockets: Running) -> None:
    tally = await fuzz_websocket.fuzz(sockets.url, "/v1/fails", 50, Random(5))

    assert tally.ends["close 1011"] > 25
    assert len(tally.broken) >= tally.ends["close 1011"]
