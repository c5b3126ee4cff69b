"""Web pages of other origins, as browsers ask for them."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from actors.testing import running
from gateways.http import HttpGateway, HttpOptions
from gateways.openai import OpenAIGateway
from gateways.origins import origin_of

CHAT = "/v1/chat/completions"
PAGE = "https://app.example"
TEXT = """
[stages.llm]
adapter = "synthetic-text"
tokens = 3
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
{gateway}
"""
NAMED = 'allowed_hosts = ["omni.example"]'
BODY = {"messages": [{"role": "user", "content": "hi"}]}
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


class SocketGateway(OpenAIGateway):
    """With a WebSocket that says hello."""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/v1/socket", self._socket)
        return app

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str("hello")
        await socket.close()
        return socket


def cors_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    prefix = "Access-Control-"
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


def chat(session: aiohttp.ClientSession, origin: str | None = PAGE, **fields: Any) -> Any:
    headers = {} if origin is None else {"Origin": origin}
    return session.post(CHAT, json=BODY | fields, headers=headers)


async def test_without_being_told_no_page_of_another_origin_is_allowed() -> None:
    async with running(TEXT.format(gateway="")) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.options(CHAT, headers={"Origin": PAGE, **ASK}) as preflight:
            assert (preflight.status, cors_of(preflight)) == (405, {})
        async with chat(session) as response:
            assert (response.status, cors_of(response)) == (200, {})
            assert "Vary" not in response.headers


async def test_an_allowed_page_may_ask_send_and_read() -> None:
    toml = TEXT.format(gateway=f'cors_origins = ["http://localhost:3000", "{PAGE}"]\napi_keys = ["k"]')
    readable = {"Allow-Origin": PAGE, "Expose-Headers": "Retry-After, X-Request-Id, x-should-retry"}
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.options(CHAT, headers={"Origin": PAGE, **ASK}) as preflight:
            assert preflight.status == 204
            assert cors_of(preflight) == readable | {
                "Allow-Methods": "POST",
                "Allow-Headers": "authorization,content-type",
                "Max-Age": "600",
            }
            assert set(", ".join(preflight.headers.getall("Vary")).split(", ")) == {
                "Origin",
                "Access-Control-Request-Method",
                "Access-Control-Request-Headers",
            }
            assert await preflight.read() == b""
        async with session.post(CHAT, json=BODY, headers={"Origin": PAGE, "Authorization": "Bearer k"}) as response:
            assert (response.status, cors_of(response), response.headers["Vary"]) == (200, readable, "Origin")
        for stream in (True, False):  # an answer that is streamed, and a refusal
            key = "k" if stream else "wrong"
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            async with session.post(CHAT, json=BODY | {"stream": stream}, headers=headers) as response:
                assert (response.status, cors_of(response)) == (200 if stream else 401, readable)
        async with session.get("/nowhere", headers={"Origin": PAGE, "Authorization": "Bearer k"}) as response:
            assert (response.status, cors_of(response)) == (404, readable)
        async with session.get("/health") as response:
            assert (cors_of(response), response.headers["Vary"]) == ({}, "Origin")


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://app.example",
        "https://app.example:8443",
        "https://app.example.evil.example",
        "https://evilapp.example",
        "null",
        "",
        "https://app.example/path",
    ],
)
async def test_other_origins_are_not_told_that_they_may(origin: str) -> None:
    toml = TEXT.format(gateway=f'cors_origins = ["{PAGE}"]')
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.options(CHAT, headers={"Origin": origin, **ASK}) as preflight:
            error = (await preflight.json())["error"]
            assert (preflight.status, cors_of(preflight)) == (403, {})
            assert (error["param"], error["type"], error["code"]) == ("Origin", "PermissionDeniedError", 403)
            assert error["message"] == f"Origin: {origin} came (allowed: one of gateways.openai.cors_origins)"
        async with chat(session, origin) as response:
            assert (response.status, cors_of(response), response.headers["Vary"]) == (200, {}, "Origin")


async def test_any_page_may_if_told_so() -> None:
    async with (
        running(TEXT.format(gateway='cors_origins = ["*"]')) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        for origin in (PAGE, "null"):
            async with session.options(CHAT, headers={"Origin": origin, **ASK}) as preflight:
                assert (preflight.status, cors_of(preflight)["Allow-Origin"]) == (204, "*")
            async with chat(session, origin) as response:
                assert (response.status, cors_of(response)["Allow-Origin"]) == (200, "*")
                assert "Allow-Credentials" not in cors_of(response)


async def test_credentials_are_allowed_to_named_pages_that_may_have_them() -> None:
    toml = TEXT.format(gateway=f'cors_origins = ["{PAGE}"]\ncors_credentials = true')
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for origin, allowed in ((PAGE, "true"), ("https://evil.example", None)):
            async with chat(session, origin) as response:
                assert cors_of(response).get("Allow-Credentials") == allowed


async def test_a_preflight_tells_the_methods_of_its_route() -> None:
    toml = TEXT.format(gateway=f'cors_origins = ["{PAGE}"]')
    methods = {"/v1/models": "GET, HEAD", CHAT: "POST", "/ping": "POST"}
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for path, allowed in methods.items():
            async with session.options(path, headers={"Origin": PAGE, **ASK}) as preflight:
                assert (preflight.status, cors_of(preflight)["Allow-Methods"]) == (204, allowed)
        async with session.options("/nowhere", headers={"Origin": PAGE, **ASK}) as preflight:
            assert preflight.status == 404
        async with session.options(CHAT, headers={"Origin": PAGE}) as no_preflight:
            assert no_preflight.status == 405


@pytest.mark.parametrize("names", ["", "a,,b", "a b", "a,\x80", "x" * 2001])
async def test_header_names_that_are_none_are_not_echoed(names: str) -> None:
    toml = TEXT.format(gateway=f'cors_origins = ["{PAGE}"]')
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        headers = {"Origin": PAGE, **ASK, "Access-Control-Request-Headers": names}
        async with session.options(CHAT, headers=headers) as preflight:
            assert (preflight.status, "Allow-Headers" in cors_of(preflight)) == (204, False)


@pytest.mark.parametrize(
    ("options", "origin", "host", "may"),
    [
        ("", None, None, True),
        ("", "http://{host}", None, True),
        ("", "https://{host}", None, True),
        (NAMED, "http://omni.example", "omni.example", True),
        (NAMED, "https://omni.example", "omni.example:443", True),
        (NAMED, "https://omni.example:8443", "omni.example", False),
        ("", "http://{host}1", None, False),
        ("", PAGE, None, False),
        ("", "null", None, False),
        ("", "", None, False),
        ("", "http://{host}/x", None, False),
        (f'cors_origins = ["{PAGE}"]', PAGE, None, False),
        (f'allowed_origins = ["{PAGE}"]', PAGE, None, True),
        ('allowed_origins = ["https://APP.example:443"]', PAGE, None, True),
        (f'allowed_origins = ["{PAGE}"]', "http://{host}", None, True),
        (f'allowed_origins = ["{PAGE}"]', "https://evil.example", None, False),
        ('allowed_origins = ["*"]', "https://evil.example", None, True),
        ('allowed_origins = ["*"]', "null", None, True),
    ],
)
async def test_who_may_open_a_websocket(options: str, origin: str | None, host: str | None, may: Any) -> None:
    async with (
        running(TEXT.format(gateway=f'protocol = "{__name__}:SocketGateway"\n{options}')) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        headers = {} if host is None else {"Host": host}
        if origin is not None:
            headers["Origin"] = origin.format(host=f"127.0.0.1:{deployment.port}")
        if may:
            async with session.ws_connect("/v1/socket", headers=headers) as socket:
                assert await socket.receive_str() == "hello"
            return
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
        async with session.get("/v1/socket", headers=headers | upgrade | key) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"], error["type"]) == (403, "Origin", "PermissionDeniedError")
        assert error["message"] == (
            f"Origin: {headers['Origin']} came (allowed: the gateway's own, or one of gateways.openai.allowed_origins)"
        )


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.Example:443/", "https://app.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("tauri://localhost", "tauri://localhost"),
    ],
)
def test_origins_are_written_as_browsers_write_them(text: str, origin: str) -> None:
    assert origin_of(text) == origin


BAD = ["app.example", "https://app.example/x", "https://*.example", "null", "", "https://u@app.example", "https://a:x"]


@pytest.mark.parametrize("field", ["cors_origins", "allowed_origins"])
@pytest.mark.parametrize("text", [*BAD, "https://a.example?x", "https://a.example#x"])
def test_what_is_no_origin_is_refused_by_name(field: str, text: str) -> None:
    (problem,) = HttpGateway.check(msgspec.convert({field: [PAGE, text]}, HttpOptions))

    assert problem.startswith(f"{field}: '{text}' is not allowed; allowed: origins like")


def test_the_wildcard_stands_alone() -> None:
    assert HttpGateway.check(HttpOptions(cors_origins=("*",), allowed_origins=("*",))) == []
    (problem,) = HttpGateway.check(HttpOptions(cors_origins=("*", PAGE)))
    assert problem.startswith("cors_origins: '*' is not allowed")
    (problem,) = HttpGateway.check(HttpOptions(cors_origins=("*",), cors_credentials=True))
    assert problem.startswith("cors_credentials: true is not allowed with")
