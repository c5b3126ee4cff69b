"""The client library's duplex sessions: they outlive connections, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from omni_bus.client import (
    ConnectionLost,
    Duplex,
    EventRefused,
    PlaybackClock,
    ResumeFailed,
    connect_duplex,
)
from omni_bus.client.realtime_events import (
    AudioDelta,
    HeartbeatAck,
    ItemCreated,
    PlaybackAcknowledged,
    ResponseDone,
    ServerEvent,
    SessionReplaced,
    SessionResumed,
    SessionUpdated,
    TranscriptDelta,
    Unknown,
)
from omni_bus.client.socket import Patience
from omni_bus.core.session.limits import Limits
from tests.gateways.conversation import LOUD, deployed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def cut(live: Duplex) -> None:
    """Cut the connection without a goodbye, as a network does."""
    connection = live._socket._socket._response.connection
    assert connection is not None
    assert connection.transport is not None
    connection.transport.abort()


async def answer(live: Duplex, *, each: Callable[[ServerEvent], Any] = lambda _: None) -> list[ServerEvent]:
    """Return all events up to the end of an answer."""
    events: list[ServerEvent] = []
    async for event in live.through(ResponseDone):
        assert not isinstance(event, Unknown), event
        events.append(event)
        each(event)
    return events


def check_whole(events: list[ServerEvent], first: int) -> None:
    """Check that numbers have no gap, that no event is doubled, and that sound and words are whole."""
    numbers = [event.server_event_seq for event in events if event.server_event_seq is not None]
    assert numbers == list(range(first, first + len(numbers)))
    names = [event.event_id for event in events]
    assert len(set(names)) == len(names)
    done = events[-1]
    assert isinstance(done, ResponseDone)
    words = "".join(event.delta for event in events if isinstance(event, TranscriptDelta))
    sound = b"".join(event.delta for event in events if isinstance(event, AudioDelta))
    assert done.response.output[0].text == words != ""
    assert len(sound) == 960 * len(words)


async def test_a_session_by_commits() -> None:
    async with deployed() as deployment:
        async with connect_duplex(deployment.url) as live:
            assert live.session.id.startswith("duplex-")
            assert live.session.capabilities["supports_session_resume"] is True
            assert live.session.input_format.rate_hz == 16_000
            clock = PlaybackClock()
            assert await live.acknowledge(clock) is None
            await live.append(LOUD * 8_000)
            await live.commit(response_create=True)
            events = await answer(live)
            check_whole(events, 1)
            for event in events:
                if isinstance(event, AudioDelta):
                    assert event.sample_rate_hz == clock.rate_hz
                    clock.put(event.item_id, event.delta)
            clock.take(4_800)
            await live.acknowledge(clock)
            assert (await live.until(PlaybackAcknowledged)).event.played_ms == 100
            event_id = await live.cancel()
            with pytest.raises(EventRefused) as caught:
                await live.until(ResponseDone)
            assert (caught.value.code, caught.value.event_id) == ("response_not_active", event_id)
        with pytest.raises(ResumeFailed) as gone:  # the session ended with the block
            await live._attach()
        assert gone.value.code == "session_resume_expired"


async def test_cuts_at_every_moment_lose_and_double_nothing() -> None:
    """The connection is cut again and again, while the client listens and while it speaks."""
    async with deployed(("tokens = 3", "tokens = 12")) as deployment, connect_duplex(deployment.url) as live:
        await live.until(SessionUpdated)
        first = live.last_event + 1
        token = live.resume_token
        await live.ask("Hello")
        num_taken = 0

        def cut_often(event: ServerEvent) -> None:
            nonlocal num_taken
            num_taken += 1
            # Also between two events that the server keeps as one: the first of them comes again.
            if num_taken % 7 == 0 or isinstance(event, ItemCreated):
                cut(live)

        async def keep_speaking() -> None:
            while True:
                await live.send("session.heartbeat")
                await asyncio.sleep(0.001)

        speaking = asyncio.create_task(keep_speaking())
        events = await answer(live, each=cut_often)
        speaking.cancel()
        resumed = [event for event in events if isinstance(event, SessionResumed)]
        assert len(resumed) >= 3
        generations = [event.attachment_generation for event in resumed]
        assert all(later > earlier for earlier, later in pairwise(generations))
        check_whole(events, first)
        assert live.resume_token != token

        first = live.last_event + 1
        cut(live)
        await live.ask("Again")  # which notices the cut, and goes through once
        events = await answer(live)
        assert len([event for event in events if isinstance(event, SessionResumed)]) == 1
        check_whole(events, first)


async def test_a_gateway_that_stops_is_left_for_its_successor() -> None:
    """It says that it stops; to the caller that is a `SessionResumed` and no error."""
    async with deployed() as deployment, connect_duplex(deployment.url, resume_for_s=0.3) as live:
        await live.until(SessionUpdated)
        stopping = asyncio.create_task(deployment.gateway.drain(30))
        with pytest.raises(ResumeFailed, match=r"within 0\.3 s") as caught:  # here none succeeds it
            await anext(live)
        assert caught.value.code is None
        assert await stopping


async def test_a_session_that_is_gone_is_not_resumed() -> None:
    async with deployed() as deployment:
        async with connect_duplex(deployment.url) as live:
            await live.until(SessionUpdated)
            async with connect_duplex(deployment.url) as other:
                await other.until(SessionUpdated)
                other._token = "another"
                cut(other)
                with pytest.raises(ResumeFailed) as caught:
                    await anext(other)
                assert caught.value.code == "invalid_resume_token"
            other._token = live.resume_token
            cut(live)
            live.session = other.session
            with pytest.raises(ResumeFailed) as caught:
                await anext(live)
            assert caught.value.code in ("invalid_resume_token", "session_resume_expired")

        async with connect_duplex(deployment.url, resume_for_s=0) as live:
            await live.until(SessionUpdated)
            cut(live)
            with pytest.raises(ConnectionLost) as lost:
                await anext(live)
            assert not isinstance(lost.value, ResumeFailed)


async def test_whom_another_connection_replaces() -> None:
    async with deployed() as deployment, connect_duplex(deployment.url) as live:
        await live.until(SessionUpdated)
        socket, _ = await live._attach()
        assert [type(event) async for event in live] == [SessionReplaced]
        await socket.close()


async def test_a_silent_session_is_kept_alive() -> None:
    async with deployed() as deployment, connect_duplex(deployment.url, patience=Patience(silence_s=0.1)) as live:
        await live.until(SessionUpdated)
        await live.until(HeartbeatAck)
        await live.until(HeartbeatAck)


async def test_what_was_taken_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps so much for who resumes; an answer that is several times as long never overflows it."""
    monkeypatch.setattr("actors.sessions.Limits", partial(Limits, journal_bytes=250_000))
    long = ("tokens = 3", "tokens = 100"), ('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 60000')
    async with deployed(*long) as deployment, connect_duplex(deployment.url) as live:
        await live.until(SessionUpdated)
        first = live.last_event + 1
        await live.ask("Hello")
        events = await answer(live)
        check_whole(events, first)
        assert sum(len(event.delta) for event in events if isinstance(event, AudioDelta)) > 800_000
        cut(live)
        await live.until(SessionResumed)


# --- a server by script ---------------------------------------------------------------------------------------------

CREATED = {"type": "session.created", "session": {"id": "s"}, "resume_token": "one", "attachment_generation": 1}
RESUMED = {**CREATED, "type": "session.resumed", "session_id": "s", "resume_token": "two"}
ITEM = {"item": {"id": "i", "type": "message"}}


def numbered(seq: int) -> dict[str, Any]:
    return {"type": "conversation.item.added", "event_id": f"e{seq}_1", "server_event_seq": seq, **ITEM}


def unnumbered(seq: int) -> dict[str, Any]:
    return {"type": "conversation.item.created", "event_id": f"e{seq}", **ITEM}


@asynccontextmanager
async def scripted(*connections: list[dict[str, Any]]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve each connection with its events, then cut it; the last one stays. Yields the first event of each client."""
    heard: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        heard.append(await socket.receive_json())
        for event in connections[len(heard) - 1]:
            await socket.send_json(event)
        if len(heard) < len(connections):
            assert request.transport is not None
            request.transport.close()
        else:
            await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get("/v1/realtime", handle)
    async with TestServer(app) as server:
        yield str(server.make_url("/")), heard


async def test_an_event_in_two_frames_that_is_cut_in_between_comes_once() -> None:
    first = [CREATED, unnumbered(1), numbered(1), unnumbered(2)]
    second = [RESUMED, unnumbered(2), numbered(2), unnumbered(3), numbered(3)]
    async with scripted(first, second) as (url, heard), connect_duplex(url) as live:
        names = [event.event_id for event in [await anext(live) for _ in range(7)]]
        assert names == ["e1", "e1_1", "e2", "", "e2_1", "e3", "e3_1"]
        assert heard[1] == {
            "type": "session.resume",
            "session_id": "s",
            "resume_token": "one",
            "last_received_server_event_seq": 1,
        }
        assert live.resume_token == "two"


async def test_an_event_that_comes_again_is_dropped_and_one_that_does_not_come_is_told() -> None:
    events = [CREATED, numbered(1), numbered(2), numbered(2), numbered(4)]
    async with scripted(events) as (url, _), connect_duplex(url) as live:
        assert [(await anext(live)).server_event_seq for _ in range(2)] == [1, 2]
        with pytest.raises(ResumeFailed, match="event 4 came after event 2") as caught:
            await anext(live)
        assert caught.value.code == "events_lost"
