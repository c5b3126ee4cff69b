"""Moshi's protocols over real sockets: the `websockets` client, and the codec of Moshi's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

sys.path.insert(0, str(Path(__file__).parent))

import echo  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy.typing as npt
    from websockets.asyncio.client import ClientConnection

    from actors.testing import Running

sphn = pytest.importorskip("sphn")

FRAME = 1920
TOML = """
[stages.echo]
adapter = "echo:Echo"
[pipelines.echo]
serve_as = "echo"
max_in_flight = 2
max_queued = 0
edges = ["in.audio -> echo.audio", "echo.audio -> out.audio", "echo.text -> out.text"]
[gateways.moshi]
protocol = "moshi"
max_lead_s = 0.0
GATEWAY
"""


@pytest.fixture
async def deployment() -> AsyncIterator[Running]:
    async with running(TOML.replace("GATEWAY", "")) as deployment:
        yield deployment


def dial(deployment: Running, path: str) -> Any:
    return connect(f"ws://127.0.0.1:{deployment.port}{path}", compression=None)


def tone(num_frames: int) -> npt.NDArray[np.float32]:
    return (0.5 * np.sin(np.arange(num_frames * FRAME) * 0.07)).astype(np.float32)


async def hear(socket: ClientConnection, tag: int, count: int = 1) -> list[bytes]:
    """What came with this tag; other messages are passed over."""
    found: list[bytes] = []
    while len(found) < count:
        data = await socket.recv()
        assert isinstance(data, bytes)
        if data[0] == tag:
            found.append(data[1:])
    return found


async def end(socket: ClientConnection) -> tuple[list[Any], int, str]:
    """Read to the end: the messages, and how it was closed."""
    found: list[Any] = []
    try:
        while True:
            found.append(await socket.recv())
    except ConnectionClosed as closed:
        assert closed.rcvd is not None
        return found, closed.rcvd.code, closed.rcvd.reason


async def until(socket: ClientConnection, kind: str) -> list[Any]:
    found: list[Any] = []
    while not found or not isinstance(found[-1], dict) or found[-1]["type"] != kind:
        data = await socket.recv()
        found.append(json.loads(data) if isinstance(data, str) else data)
    return found


# --- /api/chat ----------------------------------------------------------------------------------------------


async def test_chat_says_hello_then_echoes_sound_and_words(deployment: Running) -> None:
    writer, reader = sphn.OpusStreamWriter(24_000), sphn.OpusStreamReader(24_000)
    sound = tone(10)
    async with dial(deployment, "/api/chat?text_prompt=&text_temperature=0.7&pad_mult=0&text_seed=5") as socket:
        assert await socket.recv() == b"\x00"
        metadata = await socket.recv()
        assert metadata[0] == 4
        assert json.loads(metadata[1:]) == {"model": "echo", "sample_rate": 24_000, "channels": 1}
        for i in range(10):
            await socket.send(b"\x01" + writer.append_pcm(sound[i * FRAME : (i + 1) * FRAME]))
        heard: list[Any] = []
        words = ""
        while sum(map(len, heard)) < len(sound) or words.count("é") < 10:
            data = await socket.recv()
            if data[0] == 1:
                assert len(data) > 1
                heard.append(reader.append_bytes(data[1:]))
            elif data[0] == 2:
                words += data[1:].decode()

    samples = np.concatenate(heard)
    assert len(samples) == len(sound)
    assert 0.3 < np.sqrt(np.mean(samples[FRAME:] ** 2)) < 0.4  # of a tone of 0.5: 0.354
    assert words == "".join(f" é{i + 1}" for i in range(10))
    assert echo.Echo.seen[-1] == echo.EchoParams(seed=5)


async def test_chat_takes_the_stream_in_any_slices(deployment: Running) -> None:
    writer = sphn.OpusStreamWriter(24_000)
    stream = writer.append_pcm(tone(3))
    reader = sphn.OpusStreamReader(24_000)
    async with dial(deployment, "/api/chat") as socket:
        for start in range(0, len(stream), 50):
            await socket.send(b"\x01" + stream[start : start + 50])
        num_samples = 0
        while num_samples < 3 * FRAME:
            [data] = await hear(socket, 1)
            num_samples += len(reader.append_bytes(data))
    assert num_samples == 3 * FRAME


async def test_chat_ignores_tags_that_mean_nothing_and_tells_of_text(deployment: Running) -> None:
    writer = sphn.OpusStreamWriter(24_000)
    async with dial(deployment, "/api/chat") as socket:
        for data in (b"", b"\x06", b"\x03\x00", b"\xff\xff", b"\x00", b"\x02hi", b"\x01"):
            await socket.send(data)
        await socket.send("hello")
        assert await hear(socket, 5) == [b"message: text came (allowed: binary)"]
        await socket.send(b"\x01" + writer.append_pcm(tone(1)))
        assert await hear(socket, 2) == [" é1".encode()]


@pytest.mark.parametrize(
    ("path", "message", "code", "said"),
    [
        ("/api/chat", b"\x01" + b"garbage" * 50, 1008, "audio: it can't be decoded"),
        ("/api/chat", b"\x01" + bytes(20_000), 1009, ""),
        ("/api/chat?seed=x", None, 1008, "seed: 'x' came (allowed: an integer"),
        ("/api/chat?text_temperature=nan", None, 1008, "text_temperature: 'nan' came (allowed: a number from 0"),
        (f"/api/chat?audio_topk={'9' * 400}", None, 1008, "audio_topk: a string of 400 characters"),
        ("/api/chat?audio_topk=0", None, 1008, "audio_topk: 0 came (allowed: an integer from 1"),
        ("/api/chat?voice_prompt=../x.pt", None, 1008, "voice_prompt: '../x.pt' came (allowed: the name of a file"),
        ("/api/chat?voice_prompt=NATF2.pt", None, 1008, "voice_prompt: 'NATF2.pt' came (allowed with 'echo': nothing"),
        ("/api/chat?text_promt=x", None, 1008, "text_promt"),
        ("/api/chat?model=x", None, 1008, "x"),
    ],
)
async def test_chat_tells_what_is_wrong_and_closes(
    deployment: Running, path: str, message: bytes | None, code: int, said: str
) -> None:
    async with dial(deployment, path) as socket:
        if message is not None:
            await socket.send(message)
        messages, came, _ = await end(socket)

    assert came == code
    errors = [data[1:].decode() for data in messages if data[0] == 5]
    assert len(errors) == bool(said)
    assert said in "".join(errors)
    assert (b"\x00" in messages) == (message is not None)


async def test_parameter_that_the_stage_refuses_is_told(deployment: Running) -> None:
    async with dial(deployment, "/api/chat?audio_topk=501") as socket:
        messages, code, _ = await end(socket)

    assert code == 1008
    assert any(data[0] == 5 and b"audio_topk" in data for data in messages)


async def test_failing_stage_is_told(deployment: Running) -> None:
    writer = sphn.OpusStreamWriter(24_000)
    async with dial(deployment, "/api/chat?text_prompt=fail") as socket:
        for _ in range(3):
            await socket.send(b"\x01" + writer.append_pcm(tone(1)))
        messages, code, _ = await end(socket)

    assert code == 1011
    assert b"it broke" in messages[-1]
    assert messages[-1][0] == 5


@pytest.mark.parametrize("path", ["/api/chat", "/v1/audio/duplex"])
async def test_beyond_capacity_the_socket_closes_with_1013_until_one_is_free(deployment: Running, path: str) -> None:
    async with dial(deployment, "/api/chat") as first, dial(deployment, "/api/chat") as second:
        assert await first.recv() == await second.recv() == b"\x00"
        async with dial(deployment, path) as third:
            if path != "/api/chat":
                await third.send(json.dumps({"type": "open"}))
            messages, code, reason = await end(third)
        assert (messages, code) == ([], 1013)
        assert reason
        await first.close()
        hello: Any = None
        while hello != b"\x00":  # the coordinator hears of the end a moment later
            async with dial(deployment, "/api/chat") as fourth:
                with contextlib.suppress(ConnectionClosed):
                    hello = await fourth.recv()


# --- /v1/audio/duplex ---------------------------------------------------------------------------------------


async def test_duplex_returns_every_sample_and_says_when_it_is_done(deployment: Running) -> None:
    sound = np.random.default_rng(0).uniform(-1, 1, 30 * FRAME).astype("<f4")
    async with dial(deployment, "/v1/audio/duplex") as socket:
        await socket.send(json.dumps({"type": "open", "persona": "You are Ana", "seed": 3}))
        assert (await until(socket, "ready"))[-1] == {"type": "ready", "model": "echo"}
        for start in range(0, len(sound), 7000):
            await socket.send(sound[start : start + 7000].tobytes())
        await socket.send(json.dumps({"type": "close"}))
        events = await until(socket, "done")
        _, code, _ = await end(socket)

    assert code == 1000
    assert b"".join(data for data in events if isinstance(data, bytes)) == sound.tobytes()
    assert sum(isinstance(event, dict) and event["type"] == "text" for event in events) == 9
    assert echo.Echo.seen[-1] == echo.EchoParams(instructions="You are Ana", seed=3)


async def test_duplex_opens_by_sound_and_makes_it_good(deployment: Running) -> None:
    bad = np.array([np.nan, np.inf, -np.inf, 2.0, -2.0, 0.25], "<f4")
    async with dial(deployment, "/v1/audio/duplex") as socket:
        await socket.send(bad.tobytes())
        events = [await socket.recv(), await socket.recv()]

    assert json.loads(events[0])["type"] == "ready"
    assert np.frombuffer(events[1], "<f4").tolist() == [0, 0, 0, 1, -1, 0.25]


async def test_duplex_tells_of_mistakes_and_goes_on(deployment: Running) -> None:
    mistakes: list[tuple[Any, str]] = [
        ("{", "message: "),
        ("[]", "message: "),
        ("{}", "type: missing"),
        ('{"type": "clse"}', "type: 'clse' came (allowed: close)"),
        ('{"type": "open"}', "session already open"),
        (b"abc", "audio: 3 bytes came (allowed: a multiple of 4"),
    ]
    first: list[tuple[Any, str]] = [
        ('{"type": "go"}', "type: 'go' came (allowed at first: open)"),
        ('{"type": "open", "persna": "x"}', "persna"),
        ('{"type": "open", "voice": 3}', "strings"),
    ]
    async with dial(deployment, "/v1/audio/duplex") as socket:
        for data, said in first:
            await socket.send(data)
            assert said in (await until(socket, "error"))[-1]["error"]
        await socket.send('{"type": "open"}')
        await until(socket, "ready")
        for data, said in mistakes:
            await socket.send(data)
            assert said in (await until(socket, "error"))[-1]["error"]
        await socket.send(tone(1).tobytes())
        assert await socket.recv() == tone(1).tobytes()


async def test_client_that_takes_nothing_stops_its_own_conversation_only(deployment: Running) -> None:
    """It sends for ever and reads nothing: what waits for it is bounded, and another client is served."""
    sent = 0
    async with dial(deployment, "/v1/audio/duplex") as greedy:
        await greedy.send('{"type": "open"}')

        async def flood() -> None:
            nonlocal sent
            while True:
                await greedy.send(bytes(4 * 100_000))
                sent += 1

        flooding = asyncio.create_task(flood())
        async with dial(deployment, "/v1/audio/duplex") as other:
            await other.send('{"type": "open"}')
            for _ in range(200):
                await other.send(tone(1).tobytes())
                while not isinstance(await other.recv(), bytes):
                    pass
        before = sent
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        greedy.transport.abort()  # it would wait for its goodbye to be read
    assert before < 400  # 160 MB in a machine that held it all


# --- the rest -----------------------------------------------------------------------------------------------


async def test_sound_that_comes_too_fast_is_paced_and_the_oldest_dropped() -> None:
    """Ten seconds at once: what may be sent ahead and what may wait come back, the newest last."""
    toml = TOML.replace("max_lead_s = 0.0", "max_lead_s = 0.2").replace("GATEWAY", "max_waiting_s = 0.4")
    writer, reader = sphn.OpusStreamWriter(24_000), sphn.OpusStreamReader(24_000)
    silence_then_tone = np.concatenate([np.zeros(120 * FRAME, np.float32), tone(5)])
    async with running(toml) as deployment, dial(deployment, "/api/chat") as socket:
        for start in range(0, len(silence_then_tone), FRAME):
            await socket.send(b"\x01" + writer.append_pcm(silence_then_tone[start : start + FRAME]))
        samples = np.zeros(0, np.float32)
        while np.abs(samples).sum() < 0.25 * 5 * FRAME:  # of a tone of 0.5: 0.318 a sample
            [data] = await hear(socket, 1)
            samples = np.concatenate([samples, reader.append_bytes(data)])

    assert len(samples) < 60 * FRAME


async def test_health_needs_no_key_and_conversations_do() -> None:
    async with running(TOML.replace("GATEWAY", 'api_keys = ["secret"]')) as deployment:
        async with aiohttp.ClientSession(deployment.url) as session, session.get("/health") as response:
            assert response.status == 200
            assert (await response.json())["status"] == "ok"
        async with aiohttp.ClientSession(deployment.url) as session, session.get("/api/chat") as response:
            assert response.status == 401
        url = f"ws://127.0.0.1:{deployment.port}/api/chat"
        async with connect(url, additional_headers={"Authorization": "Bearer secret"}) as socket:
            assert await socket.recv() == b"\x00"


@pytest.mark.parametrize("path", ["/api/chat", "/v1/audio/duplex"])
async def test_server_that_stops_says_so(deployment: Running, path: str) -> None:
    """A conversation has no end of its own: it goes on while the drain lasts."""
    writer = sphn.OpusStreamWriter(24_000)
    async with dial(deployment, path) as socket:
        is_chat = path == "/api/chat"
        await socket.send(b"\x01" + writer.append_pcm(tone(1)) if is_chat else tone(1).tobytes())
        await socket.recv()
        draining = asyncio.create_task(deployment.gateway.server.drain(0.2))
        messages, code, reason = await end(socket)
        await draining

    assert code == 1013
    assert "stopping" in reason
    last = messages[-1][1:].decode() if is_chat else json.loads(messages[-1])["error"]
    assert "stopping" in last


async def test_client_that_has_not_opened_is_closed_when_the_server_stops(deployment: Running) -> None:
    async with dial(deployment, "/v1/audio/duplex") as socket:
        await (await socket.ping())
        draining = asyncio.create_task(deployment.gateway.server.drain(30.0))
        _, code, reason = await end(socket)
        assert await draining

    assert (code, "stopping" in reason) == (1013, True)


async def test_silent_client_loses_its_conversation() -> None:
    toml = TOML.replace("GATEWAY", "idle_timeout_s = 0.2")
    async with running(toml) as deployment, dial(deployment, "/api/chat") as socket:
        messages, code, reason = await end(socket)
    assert code == 1008
    assert "none came in time" in reason
    assert messages[-1][0] == 5
