"""By which names a gateway is addressed: pages that rebind their own name to its address get nothing from it."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from actors.testing import running
from gateways.hosts import Hosts
from gateways.http import HttpGateway, HttpOptions
from tests.gateways.test_origins import BODY, CHAT, TEXT

SOCKET = 'protocol = "tests.gateways.test_origins:SocketGateway"'
EVIL = "evil.example:8000"
UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


async def refusal(response: aiohttp.ClientResponse) -> tuple[int, str, str]:
    error = (await response.json())["error"]
    return response.status, error["param"], error["message"]


async def test_page_that_rebinds_its_name_is_refused_on_every_route() -> None:
    """For the browser it is of the gateway's own origin, so that ``Origin`` and ``Host`` agree."""
    told = f"Host: {EVIL} came (allowed: addresses, 127.0.0.1, localhost; others as gateways.openai.allowed_hosts)"
    page = {"Host": EVIL, "Origin": f"http://{EVIL}"}
    async with (
        running(TEXT.format(gateway=SOCKET)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        for path in ("/v1/models", "/health", "/metrics", "/openapi.json", "/nowhere"):
            async with session.get(path, headers={"Host": EVIL}) as response:
                assert await refusal(response) == (403, "Host", told)
        for path in (CHAT, "/sleep", "/v1/files"):
            async with session.post(path, json=BODY, headers=page) as response:
                assert await refusal(response) == (403, "Host", told)
        async with session.options(CHAT, headers=page | {"Access-Control-Request-Method": "POST"}) as response:
            assert response.status == 403
        async with session.get("/v1/socket", headers=page | UPGRADE) as response:
            assert await refusal(response) == (403, "Host", told)
        async with session.ws_connect("/v1/socket") as socket:
            assert await socket.receive_str() == "hello"


ALWAYS = [
    "",
    "127.0.0.1",
    "localhost",
    "LOCALHOST:8000",
    "app.localhost:8000",
    "localhost.",
    "10.0.0.7:8000",
    "[::1]:8000",
]
NEVER = [
    "evil.example",
    "localhost.evil.example",
    "evillocalhost",
    "127.0.0.1.evil.example",
    "evil.example@localhost",
    "localhost/evil.example",
    "localhost:port",
    "omni.example.evil.example",
    ":8000",
]


@pytest.mark.parametrize(
    ("options", "host", "may"),
    [
        *(("", host, True) for host in ALWAYS),
        *(("", host, False) for host in [*NEVER, "omni.example"]),
        *(('allowed_hosts = ["Omni.example"]', host, False) for host in NEVER),
        ('allowed_hosts = ["Omni.example"]', "omni.EXAMPLE:443", True),
        ('allowed_hosts = ["*"]', "evil.example", True),
        ('host = "localhost"', "evil.example", False),
        ('api_keys = ["k"]', "omni.example", True),
        ('api_keys = ["k"]\nallowed_hosts = ["omni.example"]', "evil.example", False),
    ],
)
async def test_which_hosts_are_served(options: str, host: str, may: Any) -> None:
    async with (
        running(TEXT.format(gateway=options)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.get("/v1/models", headers={"Host": host, "Authorization": "Bearer k"}) as response,
    ):
        assert response.status == (200 if may else 403)


def test_name_that_the_gateway_listens_on_is_its_own() -> None:
    hosts = Hosts("openai", named=(), bound="GPU-box.example")
    assert "gpu-box.example" in hosts._allowed


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "*.example", "a b", "", "-a", "a..b", "a/b"])
def test_what_is_no_host_is_refused_by_name(host: str) -> None:
    (problem,) = HttpGateway.check(msgspec.convert({"allowed_hosts": ["ok.example", host]}, HttpOptions))
    assert problem.startswith(f"allowed_hosts: '{host}' is not allowed; allowed: names like")
