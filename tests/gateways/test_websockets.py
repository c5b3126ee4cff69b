"""Keys and refusals of WebSockets, over a real socket of a gateway that has a WebSocket route."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import WSCloseCode, WSMsgType, web

from actors.testing import running
from gateways import websockets
from gateways.http import HttpGateway, terms_of
from gateways.problems import Problem, to_problem
from gateways.websockets import MAX_REASON_BYTES, closing_of
from omni_bus import errors
from omni_bus.client import Item
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from omni_bus.core.pipeline import Pipeline


class Talk(HttpGateway):
    """One request on the bus for each message; ``?fail=NAME`` raises that error, before the upgrade or after it."""

    FAILURES: dict[str, Exception] = {  # noqa: RUF012 (a table)
        "quota": errors.QuotaExceeded("you have had enough", retry_after_s=5.0),
        "capacity": errors.Overloaded("everybody is busy"),
        "input": errors.BadInput("rate: 3 came (allowed: 16000)", field="rate"),
        "unforeseen": ValueError("/etc/secret"),
    }

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        return pipeline.outputs.get("text") == "text"

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.edge])
        for path in ("/", "/v1/talk"):
            app.router.add_get(path, self._talk)
        return app

    async def _talk(self, request: web.Request) -> web.StreamResponse:
        if "early" in request.query:
            raise self.FAILURES[request.query["early"]]
        socket = await websockets.upgrade(request, protocols=("realtime",), max_message_bytes=1000)
        if "late" in request.query:
            raise self.FAILURES[request.query["late"]]
        async for message in socket:
            body = {"messages": [{"role": "user", "content": message.data}]}
            async with await self.client.submit("chat", ["text"], **terms_of(request)) as call:
                await call.send("messages", Json(body))
                call.finish("messages")
                async for event in call:
                    if isinstance(event, Item) and isinstance(event.payload, Text):
                        await socket.send_str(event.payload.text)
            await socket.send_str("end")
        return socket


TOML = f"""
[stages.llm]
adapter = "synthetic-text"
params = {{ tokens = TOKENS, step_time_s = 0.001 }}
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
max_in_flight = 2
max_queued = 0
[gateways.talk]
protocol = "{__name__}:Talk"
KEYS
"""
CALLERS = """
[callers.small]
keys = ["small"]
max_in_flight = 1
max_queued = 0
[callers.gold]
keys = ["gold"]
"""


def talk_deployment(tokens: int = 2, keys: str = "", callers: str = "") -> str:
    return TOML.replace("TOKENS", str(tokens)).replace("KEYS", keys) + callers


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- the table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Problem(401, "no key"), 1008),
        (Problem(403, "not yours"), 1008),
        (errors.QuotaExceeded("too fast"), 1008),
        (errors.BadInput("no such rate"), 1008),
        (Problem(413, "large"), 1009),
        (errors.Overloaded("full"), 1013),
        (errors.Unavailable("starting"), 1013),
        (errors.StageLost("gone"), 1013),
        (errors.RequestCancelled("the server is stopping"), 1013),
        (errors.DeadlineExceeded("late"), 1013),
        (errors.StageFailed("broke"), 1011),
        (ValueError("broke"), 1011),
    ],
)
def test_refusal_has_the_code_of_its_kind(error: Exception, code: int) -> None:
    assert closing_of(to_problem(error)).code == code


def test_reason_fits_a_close_frame_and_stays_text() -> None:
    for message in ("short", "x" * 500, "é" * 500, "x" + "é" * 500, "🎈" * 100):
        reason = closing_of(Problem(503, message)).reason

        assert message.startswith(reason)
        assert len(reason.encode()) <= MAX_REASON_BYTES
        assert reason == message or len(reason.encode()) > MAX_REASON_BYTES - 4


# --- on the wire --------------------------------------------------------------------------------------------


async def test_messages_are_answered() -> None:
    async with (
        running(talk_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.ws_connect("/v1/talk", protocols=("realtime",)) as socket,
    ):
        assert socket.protocol == "realtime"
        for _ in range(2):
            await socket.send_str("hi")
            assert [(await socket.receive_str()).strip() for _ in range(3)] == ["hi:0", "hi:1", "end"]


@pytest.mark.parametrize("path", ["/v1/talk", "/"])
async def test_key_guards_the_handshake_on_every_path(path: str) -> None:
    async with (
        running(talk_deployment(callers=CALLERS)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        refused: list[dict[str, Any]] = [
            {},
            {"headers": bearer("no")},
            {"headers": {"Authorization": "Basic gold"}},
            {"protocols": ("realtime",)},
            {"protocols": ("realtime", "openai-insecure-api-key.no")},
            {"protocols": ("gold",)},
            {"params": {"api_key": "gold"}},
        ]
        for how in refused:
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await session.ws_connect(path, **how)
            assert caught.value.status == 401
        accepted: list[dict[str, Any]] = [
            {"headers": bearer("gold")},
            {"headers": {"Authorization": "Api-Key gold"}},
            {"protocols": ("realtime", "openai-insecure-api-key.gold", "openai-beta.realtime-v1")},
        ]
        for how in accepted:
            async with session.ws_connect(path, **how) as socket:
                await socket.send_str("hi")
                assert (await socket.receive_str()).strip() == "hi:0"


async def test_key_of_a_subprotocol_opens_no_plain_request() -> None:
    """Browsers send it for sockets only; elsewhere the header is the one way."""
    headers = {"Sec-WebSocket-Protocol": "openai-insecure-api-key.gold"}
    async with (
        running(talk_deployment(callers=CALLERS)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.get("/v1/talk", headers=headers) as response,
    ):
        assert response.status == 401


@pytest.mark.parametrize(
    ("name", "status", "code", "words"),
    [
        ("quota", 429, WSCloseCode.POLICY_VIOLATION, "you have had enough"),
        ("capacity", 503, WSCloseCode.TRY_AGAIN_LATER, "everybody is busy"),
        ("input", 400, WSCloseCode.POLICY_VIOLATION, "rate: 3 came"),
        ("unforeseen", 500, WSCloseCode.INTERNAL_ERROR, "the server failed"),
    ],
)
async def test_refusal_is_a_status_before_the_upgrade_and_a_close_after_it(
    name: str, status: int, code: int, words: str, caplog
) -> None:
    caplog.set_level(logging.INFO, "gateways.http")
    async with running(talk_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect("/v1/talk", params={"early": name})
        assert caught.value.status == status

        async with session.ws_connect("/v1/talk", params={"late": name}, autoclose=False) as socket:
            message = await socket.receive()
            assert (message.type, message.data) == (WSMsgType.CLOSE, code)
            assert words in str(message.extra)
            assert "secret" not in str(message.extra)
    ends = [record.fields["outcome"] for record in caplog.records if record.message == "request ended"]
    assert ends[-1:] == [str(status)], "the log tells why, though the status was 101"


async def test_plain_request_to_a_socket_route_is_refused_in_shape() -> None:
    async with (
        running(talk_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.get("/v1/talk") as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["code"] == 400


async def test_quota_and_capacity_are_told_apart_on_open_sockets() -> None:
    """Two requests run at most, of one caller one: the same limits as over HTTP, in the protocol's form."""
    async with (
        running(talk_deployment(tokens=1_000_000, callers=CALLERS)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,  # its end breaks the endless ones off
    ):

        async def ask(key: str) -> tuple[aiohttp.ClientWebSocketResponse, aiohttp.WSMessage]:
            socket = await session.ws_connect("/v1/talk", headers=bearer(key), autoclose=False)
            await socket.send_str("hi")
            return socket, await socket.receive()

        _, message = await ask("small")
        assert message.type is WSMsgType.TEXT
        refused, message = await ask("small")
        assert (message.data, "can't run one more of caller 'small'" in str(message.extra)) == (1008, True)
        await refused.close()
        running_one, message = await ask("gold")
        assert message.type is WSMsgType.TEXT
        refused, message = await ask("gold")
        assert (message.data, "is busy" in str(message.extra)) == (1013, True)
        await refused.close()
        assert (await running_one.receive()).type is WSMsgType.TEXT, "others go on"


async def test_socket_whose_request_is_cut_is_closed_with_the_reason() -> None:
    async with (
        running(talk_deployment(tokens=1_000_000)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.ws_connect("/v1/talk", autoclose=False) as socket,
    ):
        await socket.send_str("hi")
        await socket.receive_str()
        drain = asyncio.create_task(deployment.gateway.drain(0.0))
        while (message := await socket.receive()).type is WSMsgType.TEXT:
            pass
        await socket.close()
        await drain

        assert (message.data, message.extra) == (1013, "the server is stopping")


@pytest.mark.parametrize("name", ["Version", "Key", "Protocol", "Extensions"])
async def test_handshake_beyond_ascii_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    values = {"Version": b"13", "Key": b"dGhlIHNhbXBsZSBub25jZQ==", "Protocol": b"realtime", "Extensions": b"x"}
    values[name] += b"\xef"
    head = b"GET /v1/talk HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += b"".join(b"Sec-WebSocket-%b: %b\r\n" % (name.encode(), value) for name, value in values.items())
    async with running(talk_deployment()) as deployment:
        reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
        writer.write(head + b"\r\n")
        status = await reader.readline()
        writer.transport.abort()

    assert status == b"HTTP/1.1 400 Bad Request\r\n"
    assert [record for record in caplog.records if record.exc_info] == []
