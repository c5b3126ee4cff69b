"""A whole deployment over TCP with keys, through a proxy on each connection that holds frames back and cuts.

Whatever connection breaks at whatever moment: the request ends, with all of its output or with an error that says what
happened, and the next one is served.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import zmq

import omni_bus.bus.outbox
from actors.testing import running
from omni_bus.bus.curve import make_deployment_keys
from omni_bus.client import BusClient, End, Item, Request
from omni_bus.errors import OmniBusError, Unavailable
from omni_bus.wire.payloads import Audio, Json, Text
from tests.bus.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from actors.testing import Running

LIMIT_S = 45
TOML = """
bind = "tcp://127.0.0.1"
[security]
key_folder = "{keys}"
[stages.llm]
adapter = "synthetic-text"
tokens = 40
[stages.voice]
adapter = "synthetic-speech"
[pipelines.voice]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
window_chunks = 4
"""
MESSAGES = Json({"messages": [{"role": "user", "content": "hi"}]})
WORDS = " ".join(f"hi:{number}" for number in range(40))
SAMPLES = len(WORDS) * 480

NAMED = {"link_broken", "unavailable"}
"""A connection between two who work on the request broke; or the coordinator could not be asked."""


class Cables:
    """A proxy for each connection, by the names of its two ends."""

    def __init__(self) -> None:
        self._by_endpoint: dict[str, str] = {}
        self._proxies: dict[tuple[str, str], Proxy] = {}
        self._all: list[Proxy] = []
        self._starts: list[asyncio.Task[None]] = []
        self._connect = omni_bus.bus.outbox.connect

    def plug(self, dealer: zmq.Socket[bytes], endpoint: str) -> None:
        """In the place of `connect`."""
        source = dealer.getsockopt(zmq.ROUTING_ID).decode().partition(":")[0]  # pyright: ignore[reportAttributeAccessIssue]
        proxy = Proxy(endpoint)
        self._proxies[source, endpoint] = proxy
        self._all.append(proxy)
        self._starts.append(asyncio.get_running_loop().create_task(proxy.start()))
        self._connect(dealer, proxy.endpoint)

    def name(self, actor: str, endpoint: str) -> None:
        self._by_endpoint[endpoint] = actor

    def between(self, source: str, target: str) -> Proxy:
        """The proxy from one actor to another; it must have sent something before."""
        found = [
            proxy for (name, at), proxy in self._proxies.items() if (name, self._by_endpoint[at]) == (source, target)
        ]
        (proxy,) = found
        return proxy

    async def close(self) -> None:
        await asyncio.gather(*self._starts)
        for proxy in self._all:
            await proxy.close()


@pytest.fixture
def cables(monkeypatch: pytest.MonkeyPatch) -> Cables:
    cables = Cables()
    monkeypatch.setattr(omni_bus.bus.outbox, "connect", cables.plug)
    return cables


@asynccontextmanager
async def deployed(cables: Cables, folder: Path) -> AsyncIterator[tuple[Running, BusClient]]:
    """A deployment that has served one request, so that every connection was made."""
    make_deployment_keys(folder, may_replace=False)
    try:
        async with running(TOML.format(keys=folder)) as deployment:
            client = await BusClient.connect(
                "test",
                deployment.deployment.listen("test"),
                deployment.deployment.coordinator_endpoint,
                timeout_s=LIMIT_S,
                curve=deployment.deployment.curve(),
            )
            cables.name("coordinator", deployment.coordinator.endpoint)
            cables.name("test", client._driver.me.endpoint)
            for name, stage in deployment.stages.items():
                cables.name(name, stage._driver.me.endpoint)
            async with client:
                while sum(row["role"] == "stage" and row["is_ready"] for row in await client.admin("health")) < 2:
                    pass
                assert await outcome(client) == (WORDS, SAMPLES)
                yield deployment, client
    finally:
        await cables.close()


async def begun(client: BusClient) -> Request:
    request = await client.submit("voice")
    await request.send("messages", MESSAGES)
    request.finish("messages")
    return request


async def outcome(client: BusClient, at: int = -1, reached: asyncio.Event | None = None) -> tuple[str, int] | str:
    """Run a request; return what it said and how long it spoke, or the code of its error.

    Args:
        client: whose request.
        at: after so many events, before the first for 0, `reached` is set.
        reached: see `at`.
    """
    words, num_frames, num_events = "", 0, 0
    try:
        async with await begun(client) as request:
            while True:
                if reached is not None and num_events == at:
                    reached.set()
                event = await anext(request, None)
                num_events += 1
                match event:
                    case Item(payload=Text(text=text)):
                        words += text
                    case Item(payload=Audio() as audio):
                        num_frames += audio.num_frames
                    case End():
                        pass
                    case _:
                        return words, num_frames
    except OmniBusError as error:
        return error.code


async def at_rest(deployment: Running, client: BusClient) -> None:
    """Wait until nobody holds anything of any request."""
    while True:
        try:
            status: Any = await client.admin("status")
            rows = await client.admin("health")
        except Unavailable:  # the connection to the coordinator is the one that broke
            continue
        stats = [row["stats"] for row in rows if row["role"] == "stage" and row["is_live"]]
        busy = [stat for stat in stats if stat["active"] or stat["waiting"] or stat["suspended"]]
        if len(stats) == 2 and not busy and not status["requests"]["live"]:
            return


LANES = [
    ("test", "llm.0"),
    ("llm.0", "test"),
    ("llm.0", "voice.0"),
    ("voice.0", "llm.0"),
    ("voice.0", "test"),
    ("test", "voice.0"),
    ("test", "coordinator"),
    ("coordinator", "test"),
    ("llm.0", "coordinator"),
    ("coordinator", "llm.0"),
    ("voice.0", "coordinator"),
    ("coordinator", "voice.0"),
]


@pytest.mark.parametrize("at", [-1, 0, 3, 30], ids=["before", "admitted", "early", "late"])
@pytest.mark.parametrize(("source", "target"), LANES)
async def test_request_ends_well_or_with_a_named_error(
    cables: Cables, tmp_path: Path, source: str, target: str, at: int
) -> None:
    async with asyncio.timeout(LIMIT_S), deployed(cables, tmp_path / "keys") as (deployment, client):
        proxy, reached = cables.between(source, target), asyncio.Event()
        if at == -1:
            proxy.hold()
        asking = asyncio.create_task(outcome(client, at, reached))
        if at != -1:
            await asyncio.wait({asking, waiting := asyncio.create_task(reached.wait())}, return_when="FIRST_COMPLETED")
            waiting.cancel()
            proxy.hold()
        # Until a frame is held back: the request waits for it, or has no need of it.
        holding = asyncio.create_task(proxy.holds.wait())
        await asyncio.wait({asking, holding}, return_when="FIRST_COMPLETED")
        holding.cancel()

        proxy.cut()

        came = await asking
        assert came == (WORDS, SAMPLES) or came in NAMED
        await proxy.accepted()
        await at_rest(deployment, client)
        assert await outcome(client) == (WORDS, SAMPLES)


@pytest.mark.parametrize(("source", "target"), LANES[:6])
async def test_request_ends_also_while_the_connection_stays_away(
    cables: Cables, tmp_path: Path, source: str, target: str
) -> None:
    """Nobody waits for it to come back: the two ends reach the coordinator, which tells who is concerned."""
    async with asyncio.timeout(LIMIT_S), deployed(cables, tmp_path / "keys") as (deployment, client):
        proxy, reached = cables.between(source, target), asyncio.Event()
        asking = asyncio.create_task(outcome(client, 3, reached))
        await reached.wait()
        proxy.hold()
        await proxy.holds.wait()

        proxy.cut(may_return=False)

        assert await asking == "link_broken"
        await proxy.heal()
        await proxy.accepted()
        await at_rest(deployment, client)
        assert await outcome(client) == (WORDS, SAMPLES)


@pytest.mark.parametrize(("source", "target"), LANES[:6])
async def test_request_over_a_connection_that_can_not_be_made_ends(
    cables: Cables, tmp_path: Path, source: str, target: str
) -> None:
    """Its frames wait, so nothing would ever tell of it but the attempts that fail."""
    async with asyncio.timeout(LIMIT_S), deployed(cables, tmp_path / "keys") as (deployment, client):
        proxy = cables.between(source, target)
        await proxy.refuse()

        assert await outcome(client) == "link_broken"

        await proxy.heal()
        await proxy.accepted()
        await at_rest(deployment, client)
        assert await outcome(client) == (WORDS, SAMPLES)


async def test_error_says_which_connection_and_that_a_retry_is_safe(cables: Cables, tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S), deployed(cables, tmp_path / "keys") as (_, client):
        proxy = cables.between("llm.0", "voice.0")
        request = await begun(client)
        await anext(request)
        proxy.hold()
        await proxy.holds.wait()
        proxy.cut()

        with pytest.raises(OmniBusError) as caught:
            async for _ in request:
                pass

    assert caught.value.code == "link_broken"
    assert "the connection from llm.0 to voice.0 is broken, and stage " in caught.value.message
    assert caught.value.is_retry_safe
