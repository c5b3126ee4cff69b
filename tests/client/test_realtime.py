"""The client library's live conversations, with a running deployment on synthetic engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import WSMsgType, web

from omni_bus.client import ConnectFailed, ConnectionLost, EventRefused, connect_duplex, connect_realtime
from omni_bus.client.realtime import sound_bytes
from omni_bus.client.realtime_events import (
    EVENTS,
    AudioDelta,
    ErrorEvent,
    Format,
    InputCommitted,
    ItemRetrieved,
    ItemTruncated,
    ResponseCreated,
    ResponseDone,
    SessionUpdated,
    SpeechStarted,
    TextDelta,
    TranscriptDelta,
    TranscriptionCompleted,
    Unknown,
)
from omni_bus.client.socket import Patience
from omni_bus.errors import BadInput
from tests.gateways.conversation import LOUD, QUIET, deployed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp.test_utils import TestServer

    from omni_bus.client.realtime_events import Response
    from omni_bus.core.session.server_events import ServerEvent


def answered(events: Sequence[ServerEvent]) -> Response:
    """Return the response that ends events, all of which are known, and whose sound is as long as its words."""
    assert not [event for event in events if isinstance(event, Unknown)]
    words = "".join(event.delta for event in events if isinstance(event, TranscriptDelta))
    sound = b"".join(event.delta for event in events if isinstance(event, AudioDelta))
    assert len(sound) == 960 * len(words)
    done = events[-1]
    assert isinstance(done, ResponseDone)
    return done.response


async def test_a_conversation_in_writing_and_aloud() -> None:
    async with deployed() as deployment, connect_realtime(deployment.url, model="synthetic-sessions") as live:
        assert live.session.model == "synthetic-sessions"
        assert live.session.input_format.rate_hz == 24_000
        await live.update({"audio": {"input": {"transcription": {}}}})
        await live.until(SessionUpdated)
        await live.ask("Hello", output_modalities=["text"])
        events = [event async for event in live.through(ResponseDone)]
        words = "".join(event.delta for event in events if isinstance(event, TextDelta))
        assert answered(events).output[0].text == words != ""

        for sample, num_ms in ((LOUD, 600), (QUIET, 900)):
            await live.append(np.frombuffer(sample * 24 * num_ms, np.int16))
        started = await live.until(SpeechStarted)
        heard = await live.until(TranscriptionCompleted)
        assert heard.item_id == started.item_id
        assert heard.transcript.startswith("heard ")
        response = answered([event async for event in live.through(ResponseDone)])
        assert response.timings is not None

        await live.truncate(response.output[0].id, 20)
        assert (await live.until(ItemTruncated)).audio_end_ms == 20
        await live.retrieve(heard.item_id)
        kept = (await live.until(ItemRetrieved)).item.content[0]
        assert kept.audio is not None
        assert len(kept.audio) > 600 * 48


async def test_a_refused_event_is_named_and_the_conversation_goes_on() -> None:
    async with deployed() as deployment, connect_realtime(deployment.url) as live:
        event_id = await live.update({"max_output_tokens": 0})
        with pytest.raises(EventRefused) as caught:
            await live.until(SessionUpdated)
        assert (caught.value.code, caught.value.param) == ("invalid_value", "session.max_output_tokens")
        assert caught.value.event_id == event_id
        await live.cancel()
        assert (await live.until(ErrorEvent)).body.code == "response_cancel_not_active"  # asked for, so it is an event
        await live.ask("Hello")
        await live.until(ResponseDone)


async def test_servers_that_refuse() -> None:
    async with deployed(("port = 0", 'port = 0\napi_keys = ["secret"]')) as deployment:
        for connect in (connect_realtime, connect_duplex):
            with pytest.raises(ConnectFailed, match="it wants a key") as caught:
                async with connect(deployment.url):
                    pass
            assert (caught.value.status, caught.value.may_pass) == (401, False)
            with pytest.raises(ConnectFailed) as caught:
                async with connect(deployment.url, model="another", api_key="secret"):
                    pass
            assert caught.value.code == "model_not_found"
            async with connect(deployment.url, api_key="secret") as live:
                assert live.session.id
    change = ('pipelines = ["voice", "sessions", "transcription"]', 'pipelines = ["voice"]')
    async with deployed(change) as deployment:
        for connect in (connect_realtime, connect_duplex):
            with pytest.raises(ConnectFailed) as caught:
                async with connect(deployment.url):
                    pass
            assert caught.value.code == "unsupported"
    with pytest.raises(ConnectFailed) as caught:
        async with connect_realtime(deployment.url):
            pass
    assert caught.value.may_pass


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a:b"])
async def test_what_is_no_address_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(BadInput, match=r"url: .* came"):
        async with connect_realtime(url):
            pass
    with pytest.raises(BadInput, match="api_key"):
        async with connect_realtime("http://127.0.0.1:1", api_key="a\nb"):
            pass


async def test_who_reads_late_hears_all_of_a_long_answer() -> None:
    long = ("tokens = 3", "tokens = 200"), ('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 60000')
    async with (
        deployed(*long) as deployment,
        connect_realtime(deployment.url) as slow,
        connect_realtime(deployment.url) as quick,
    ):
        await slow.ask("Hello")
        await quick.ask("Hi", output_modalities=["text"])
        await quick.until(ResponseDone)
        assert answered([event async for event in slow.through(ResponseDone)]).status == "completed"


async def test_a_server_that_stops_ends_the_conversation_by_name() -> None:
    async with deployed() as deployment, connect_realtime(deployment.url) as live:
        stopping = asyncio.create_task(deployment.gateway.drain(30))
        assert (await live.until(ErrorEvent)).body.code == "server_stopping"
        with pytest.raises(ConnectionLost) as caught:
            await anext(live)
        assert (caught.value.close_code, caught.value.reason) == (1001, "the server is stopping")
        with pytest.raises(ConnectionLost):
            await live.ask("Hello?")
        assert await stopping


# --- servers that no gateway of ours is -----------------------------------------------------------------------------


async def served(behave: Callable[[web.WebSocketResponse], Awaitable[None]]) -> TestServer:
    """Return a server whose sockets are handled so."""
    from aiohttp.test_utils import TestServer

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        await behave(socket)
        return socket

    app = web.Application()
    app.router.add_get("/v1/realtime", handle)
    server = TestServer(app)
    await server.start_server()
    return server


CREATED = {"type": "session.created", "event_id": "e1", "session": {"id": "s", "type": "realtime", "newer": {}}}
PLACE = {"response_id": "r", "item_id": "i", "output_index": 0}


async def test_a_server_that_vanishes_is_noticed() -> None:
    """Neither pings nor messages are answered any more, and no close comes: a machine that lost its power."""
    pinged = asyncio.Event()
    gone = asyncio.Event()

    async def vanish(socket: web.WebSocketResponse) -> None:
        await socket.send_json(CREATED)
        while not gone.is_set():
            if (await socket.receive()).type is WSMsgType.PING:
                pinged.set()
                await gone.wait()

    server = await served(vanish)
    with pytest.raises(ConnectionLost, match="nothing came"):
        async with connect_realtime(str(server.make_url("/")), patience=Patience(silence_s=0.05)) as live:
            await live.until(ResponseDone)
    assert pinged.is_set()
    gone.set()
    await server.close()


async def test_who_does_not_read_holds_the_server_and_loses_nothing() -> None:
    sent = 0
    is_held = asyncio.Event()

    async def flood(socket: web.WebSocketResponse) -> None:
        nonlocal sent
        await socket.send_json(CREATED)
        while not is_held.is_set():
            try:
                async with asyncio.timeout(0.5):  # a write that waits so long waits for the reader
                    sent += 1
                    await socket.send_json({"type": "response.output_text.delta", "delta": "x" * 65_536} | PLACE)
            except TimeoutError:
                is_held.set()
        await socket.close()

    server = await served(flood)
    async with connect_realtime(str(server.make_url("/"))) as live:
        await is_held.wait()
        num_heard = len([event async for event in live if isinstance(event, TextDelta)])
    await server.close()
    assert num_heard == sent


async def test_events_of_other_servers() -> None:
    """What is not known, or otherwise shaped, is an event; more fields than are known are no matter."""
    frames: list[Any] = [
        {"type": "mcp_list_tools.completed", "event_id": "e2", "item_id": "i"},
        {"type": "response.created", "response": 5},
        {"type": "response.created", "response": {"id": "r", "object": "realtime.response", "more": [1]}, "more": 1},
        {"type": 7},
        [],
    ]

    async def say(socket: web.WebSocketResponse) -> None:
        await socket.send_json(CREATED)
        for frame in frames:
            await socket.send_json(frame)
        await socket.send_str("{")
        await socket.send_str("[" * 100_000)
        await socket.send_bytes(b"\xff")
        await socket.close()

    server = await served(say)
    async with connect_realtime(str(server.make_url("/v1"))) as live:
        events = [event async for event in live]
    await server.close()
    kinds = [event.kind if isinstance(event, Unknown) else event for event in events]
    assert kinds[:2] == ["mcp_list_tools.completed", "response.created"]
    assert isinstance(events[2], ResponseCreated)
    assert kinds[3:] == [""] * 5
    assert isinstance(events[0], Unknown)
    assert (events[0].event_id, events[0].fields["item_id"]) == ("e2", "i")


async def test_servers_that_begin_otherwise() -> None:
    async def chat(socket: web.WebSocketResponse) -> None:
        await socket.send_json({"type": "hello"})

    async def leave(socket: web.WebSocketResponse) -> None:
        await socket.close(code=1013, message=b"full")

    async def say_nothing(socket: web.WebSocketResponse) -> None:
        await socket.receive()

    for behaviour, words in ((chat, "hello came"), (leave, "1013: full"), (say_nothing, "no event came within")):
        server = await served(behaviour)
        with pytest.raises(ConnectFailed, match=words):
            async with connect_realtime(str(server.make_url("/")), patience=Patience(open_s=0.2)):
                pass
        await server.close()


# --- sound ----------------------------------------------------------------------------------------------------------


def test_arrays_become_the_sessions_format() -> None:
    floats = np.array([0.0, 1.0, -2.0], np.float32)
    assert bytes(sound_bytes(floats, Format())) == np.array([0, 32767, -32767], "<i2").tobytes()
    assert bytes(sound_bytes(floats, Format(type="audio/pcm_f32le"))) == floats.tobytes()
    assert bytes(sound_bytes(np.array([1, -1], np.int16)[::-1], Format())) == np.array([-1, 1], "<i2").tobytes()
    assert bytes(sound_bytes(memoryview(bytearray(b"\1\0")), Format())) == b"\1\0"


@pytest.mark.parametrize(
    ("sound", "form"),
    [
        (np.zeros((2, 2), np.int16), "audio/pcm"),
        (np.zeros(2, np.float64), "audio/pcm"),
        (np.zeros(2, np.int16), "audio/pcmu"),
        (np.zeros(2, np.int16), "audio/pcm_f32le"),
    ],
)
def test_other_arrays_are_refused(sound: Any, form: str) -> None:
    with pytest.raises(BadInput, match=r"sound: .* came"):
        sound_bytes(sound, Format(type=form))


async def test_long_sound_goes_in_pieces() -> None:
    async with (
        deployed() as deployment,
        connect_realtime(deployment.url, session={"audio": {"input": {"turn_detection": None}}}) as live,
    ):
        await live.until(SessionUpdated)
        await live.append(LOUD * 24_000 * 12)
        await live.commit()
        committed = await live.until(InputCommitted)
        assert committed.item_id is not None
        await live.retrieve(committed.item_id)
        kept = (await live.until(ItemRetrieved)).item.content[0].audio
        assert kept is not None
        assert abs(len(kept) - 48_000 * 12) <= 960


def test_known_names_are_the_gateways() -> None:
    """Each event that a session may say has its type here."""
    from typing import get_args

    from omni_bus.core.session.server_events import AnyServerEvent

    told = {kind.__struct_config__.tag for kind in get_args(AnyServerEvent)}
    assert told <= EVENTS.kinds
