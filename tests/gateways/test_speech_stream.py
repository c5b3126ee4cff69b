"""WS /v1/audio/speech/stream over a real socket, with a client that no code of ours is in."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from actors.testing import running
from gateways import speech_stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from websockets.asyncio.client import ClientConnection

    from actors.testing import Running

TOML = """
[stages.voice]
adapter = "synthetic-speech"
rate_hz = 16000
samples_per_character = 100
chunk_bytes = 400
VOICE
[pipelines.speech]
serve_as = "ramp"
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
GATEWAY
"""
STREAMED = {"response_format": "pcm", "stream_audio": True}


def toml(gateway: str = "", voice: str = "") -> str:
    return TOML.replace("GATEWAY", gateway).replace("VOICE", voice)


@pytest.fixture
async def deployment() -> AsyncIterator[Running]:
    async with running(toml()) as deployment:
        yield deployment


class Client:
    """A scripted client."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self) -> Any:
        data = await self.socket.recv()
        return json.loads(data) if isinstance(data, str) else data

    async def until(self, kind: str) -> list[Any]:
        """Everything up to an event of this type."""
        found: list[Any] = []
        while not found or not isinstance(found[-1], dict) or found[-1]["type"] != kind:
            found.append(await self.hear())
        return found

    async def code(self) -> int:
        """Read to the end; how it was closed."""
        try:
            while True:
                await self.socket.recv()
        except ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.code


@asynccontextmanager
async def client(deployment: Running, config: dict[str, Any] | None = None) -> AsyncIterator[Client]:
    async with connect(deployment.url.replace("http", "ws") + speech_stream.PATH, max_size=None) as socket:
        found = Client(socket)
        if config is not None:
            await found.say("session.config", **config)
            assert (await found.hear())["type"] == "session.configured"
        yield found


def kinds(events: list[Any]) -> list[str]:
    return [event["type"] if isinstance(event, dict) else "bytes" for event in events]


def sentences(events: list[Any]) -> list[tuple[str, bytes]]:
    """Text and sound of each sentence."""
    found: list[tuple[str, bytes]] = []
    for event in events:
        if isinstance(event, bytes):
            found[-1] = (found[-1][0], found[-1][1] + event)
        elif event["type"] == "audio.start":
            found.append((event["sentence_text"], b""))
        elif event["type"] == "audio.done":
            assert event["total_bytes"] == len(found[-1][1])
    return found


def begun(events: list[Any]) -> list[int]:
    return [event["sentence_index"] for event in events if isinstance(event, dict) and event["type"] == "audio.start"]


async def over_http(deployment: Running, text: str, **fields: Any) -> bytes:
    async with (
        aiohttp.ClientSession(deployment.url) as http,
        http.post("/v1/audio/speech", json={"input": text, **fields}) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.read()


async def test_two_utterances_letter_by_letter_on_one_socket(deployment: Running) -> None:
    config = STREAMED | {"split_granularity": "sentence", "model": "ramp"}
    async with client(deployment, config) as found:
        assert found.socket.response is not None
        assert "Sec-WebSocket-Extensions" not in found.socket.response.headers  # sound is not compressed
        for number in (0, 1):
            for letter in "Hi there. Dr. Who is 3.5 m tall!":
                await found.say("input.text", text=letter)
            await found.say("input.done")
            events = await found.until("session.done")
            units = sentences(events)
            assert [text for text, _ in units] == ["Hi there.", "Dr. Who is 3.5 m tall!"]
            for text, pcm in units:
                assert pcm == await over_http(deployment, text, response_format="pcm")
            assert begun(events) == [0, 1]
            assert events[0] | {"id": ""} == {
                "type": "audio.start",
                "id": "",
                "utterance_index": number,
                "sentence_index": 0,
                "sentence_text": "Hi there.",
                "format": "pcm",
                "sample_rate": 16000,
            }
            assert events[-1] == {"type": "session.done", "utterance_index": number, "total_sentences": 2}
        await found.say("session.close")
        assert await found.code() == 1000


async def test_whole_file_is_one_frame_and_text_is_trimmed(deployment: Running) -> None:
    async with client(deployment, {}) as found:
        await found.say("input.text", text="  Hi. ")
        await found.say("input.text", text="")
        await found.say("input.text", text="You there ")
        await found.say("input.done")
        events = await found.until("session.done")

    assert kinds(events) == ["audio.start", "bytes", "audio.done", "session.done"]
    assert events[0]["sentence_text"] == "Hi. You there"
    assert events[1] == await over_http(deployment, "Hi. You there")
    assert events[1][:4] == b"RIFF"


async def test_stream_starts_before_it_is_made_and_other_rates_are_told(deployment: Running) -> None:
    async with client(deployment, STREAMED | {"sample_rate": 8000}) as found:
        await found.say("input.text", text="A longer text to speak.")
        await found.say("input.done")
        events = await found.until("session.done")

    [(text, pcm)] = sentences(events)
    assert events[0]["sample_rate"] == 8000
    assert len([event for event in events if isinstance(event, bytes)]) > 1
    assert len(pcm) == 2 * 50 * len(text)
    assert pcm == await over_http(deployment, text, response_format="pcm", sample_rate=8000)


async def test_close_comes_after_what_was_said_and_nothing_after_it(deployment: Running) -> None:
    async with client(deployment, STREAMED) as found:
        await found.say("input.text", text="Said.")
        await found.say("input.done")
        for _ in range(3):
            await found.say("session.close")
            await found.say("input.text", text="Not said.")
        events = await found.until("session.done")
        assert [text for text, _ in sentences(events)] == ["Said."]
        assert await found.code() == 1000


async def test_empty_flush_is_an_utterance_without_sentences(deployment: Running) -> None:
    async with client(deployment, {}) as found:
        await found.say("input.done")
        assert await found.hear() == {"type": "session.done", "utterance_index": 0, "total_sentences": 0}
        await found.say("input.text", text=" \n ")
        await found.say("input.done")
        assert await found.hear() == {"type": "session.done", "utterance_index": 1, "total_sentences": 0}


async def test_commit_speaks_what_came_and_goes_on(deployment: Running) -> None:
    async with client(deployment, {"split_granularity": "clause"}) as found:
        await found.say("input.text", text="One, two")
        await found.say("input.commit")
        events = await found.until("input.committed")
        assert [text for text, _ in sentences(events)] == ["One,", "two"]
        assert events[-1] | {"session_id": ""} == {
            "type": "input.committed",
            "session_id": "",
            "segment_index": 0,
            "segment_sentences": 2,
            "total_sentences": 2,
        }
        await found.say("input.text", text="three")
        await found.say("input.done")
        events = await found.until("session.done")
        assert begun(events) == [2]
        assert events[-1]["total_sentences"] == 3


async def test_config_may_change_between_utterances_and_not_within(deployment: Running) -> None:
    async with client(deployment, {"session": STREAMED}) as found:
        await found.say("input.text", text="a b c")
        await found.say("session.config", response_format="wav")
        assert "within an utterance" in (await found.hear())["message"]
        await found.say("input.done")
        assert (await found.until("session.done"))[0]["format"] == "pcm"
        await found.say("session.config", response_format="nope")
        error = await found.hear()
        assert error["error"]["param"] == "response_format"
        assert error["message"] == error["error"]["message"]
        await found.say("session.config", response_format="flac")
        assert (await found.hear())["response_format"] == "flac"
        await found.say("input.text", text="a b c")
        await found.say("input.done")
        events = await found.until("session.done")
        assert (events[0]["format"], events[1][:4]) == ("flac", b"fLaC")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"stream_audio": True}, "response_format: 'wav' came (allowed: pcm, with stream_audio)"),
        (STREAMED | {"speed": 2}, "speed: 2 came (allowed: 1 or null, with stream_audio)"),
        (STREAMED | {"extra_body": {"speed": 2}}, "speed: 2 came"),
        ({"split_granularity": "word"}, "split_granularity: 'word' came (allowed: none, sentence, clause)"),
        ({"split_granularty": "none"}, "split_granularty: unknown field"),
        ({"model": "nope"}, "model: 'nope' is not served here (allowed: ramp)"),
        ({"input": "text"}, "input: 'text' came (allowed: null"),
        ({"speaker_embedding": [1.0]}, "speaker_embedding"),
        ({"session": 3}, "session: 3 came (allowed: an object)"),
        ({"sample_rate": 3}, "sample_rate: 3 came"),
    ],
)
async def test_first_config_that_is_wrong_ends_the_session(
    deployment: Running, config: dict[str, Any], words: str
) -> None:
    async with client(deployment) as found:
        await found.say("session.config", **config)
        event = await found.hear()

        assert words in event["message"]
        assert event["type"] == "error"
        assert await found.code() == 1008


@pytest.mark.parametrize("sent", ["{", "[]", '"x"', '{"type": "input.text", "text": "a"}', b"\x00", "[" * 100_000])
async def test_first_message_that_is_no_config_ends_the_session(deployment: Running, sent: str | bytes) -> None:
    async with client(deployment) as found:
        await found.socket.send(sent)
        assert (await found.hear())["type"] == "error"
        assert await found.code() == 1008


async def test_later_mistakes_are_errors_and_nothing_more(deployment: Running) -> None:
    async with client(deployment, {}) as found:
        for sent, words in (
            ("{", "message: "),
            ("[1]", "message: a list of 1 came (allowed: a JSON object)"),
            (b"\x00", "binary came"),
            ('{"type": "nope"}', "type: 'nope' came (allowed: session.config, input.text"),
            ('{"type": "input.text"}', "text: null came (allowed: a string)"),
            ('{"type": "input.text", "text": 5}', "text: 5 came"),
            ('{"type": "input.done", "why": 1}', "why: unknown field"),
            (json.dumps({"type": "input.text", "text": "x" * 140_000}), "characters came (allowed: at most 131072)"),
        ):
            await found.socket.send(sent)
            assert words in (await found.hear())["message"]
        await found.say("input.text", text="Still here.")
        await found.say("input.done")
        assert [text for text, _ in sentences(await found.until("session.done"))] == ["Still here."]


async def test_word_timestamps_are_refused_for_each_sentence(deployment: Running) -> None:
    async with client(deployment, STREAMED | {"word_timestamps": True, "split_granularity": "sentence"}) as found:
        await found.say("input.text", text="One. Two.")
        await found.say("input.done")
        events = await found.until("session.done")

    assert kinds(events) == ["error", "error", "session.done"]
    assert [event["sentence_index"] for event in events[:2]] == [0, 1]
    assert "word_timestamps: true came" in events[0]["message"]


async def test_emoji_in_two_halves_arrives_whole(deployment: Running) -> None:
    async with client(deployment, {}) as found:
        for half in (r"a\ud83d", r"\ude00b"):
            await found.socket.send('{"type": "input.text", "text": "' + half + '"}')
        await found.say("input.done")
        assert (await found.hear())["sentence_text"] == "a\U0001f600b"


async def test_sentence_that_fails_is_told_and_the_next_is_spoken() -> None:
    async with (
        running(toml(voice="params = { fail_at_step = 20 }")) as deployment,
        client(deployment, STREAMED | {"split_granularity": "sentence"}) as found,
    ):
        await found.say("input.text", text="This one fails when many of its pieces have been taken by the client. A.")
        await found.say("input.done")
        events = await found.until("session.done")

    [failed, error, done, *rest] = [event for event in events if isinstance(event, dict)]
    assert (failed["type"], error["type"], done["type"]) == ("audio.start", "error", "audio.done")
    assert (error["partial_audio"], error["action"]) == (True, "discard")
    assert done["error"] is True
    assert done["total_bytes"] > 0
    assert kinds(rest) == ["audio.start", "audio.done", "session.done"]
    assert rest[1]["error"] is False


LONG = toml().replace("_character = 100\n", "_character = 100000\n").replace("chunk_bytes = 400", "chunk_bytes = 4000")


async def test_cancel_stops_what_is_spoken_and_drops_what_waits() -> None:
    async with (
        running(LONG) as deployment,
        client(deployment, STREAMED | {"split_granularity": "sentence"}) as found,
    ):
        await found.say("input.text", text="One long one. Two long ones. And")
        start = await found.hear()
        await found.say("input.cancel")
        events = await found.until("session.done")

        assert start["sentence_text"] == "One long one."
        assert [kind for kind in kinds(events) if kind != "bytes"] == ["audio.done", "session.done"]
        done, end = events[-2:]
        assert (done["error"], done["cancelled"]) == (False, True)
        assert done["total_bytes"] == sum(len(event) for event in events[:-2])
        assert (end["utterance_index"], end["total_sentences"], end["cancelled"]) == (0, 2, True)
        await found.say("input.cancel")
        assert (await found.hear())["total_sentences"] == 0
        assert deployment.gateway.client.requests == {}


async def test_client_that_leaves_frees_the_engine() -> None:
    async with running(LONG) as deployment:
        async with client(deployment, STREAMED) as found:
            await found.say("input.text", text="Much too much to say")
            await found.say("input.done")
            await found.until("audio.start")
            assert len(deployment.gateway.client.requests) == 1
            found.socket.transport.abort()
        while deployment.gateway.client.requests or deployment.stages["voice.0"].stats.cancelled == 0:
            await deployment.gateway.client.admin("status")


async def test_close_while_it_speaks_is_noticed_at_once() -> None:
    async with running(LONG) as deployment:
        async with client(deployment, STREAMED) as found:
            await found.say("input.text", text="Much too much to say")
            await found.say("input.done")
            await found.until("audio.start")
        while deployment.gateway.client.requests or deployment.stages["voice.0"].stats.cancelled == 0:
            await deployment.gateway.client.admin("status")


async def test_limits_end_the_session() -> None:
    async with running(LONG) as deployment:
        async with client(deployment, STREAMED) as found:
            await found.say("input.text", text="Speak for long")
            await found.say("input.done")
            for _ in range(speech_stream.MAX_QUEUED + 1):
                await found.say("input.done")
            assert await found.code() == 1008
        async with client(deployment, {}) as found:
            for _ in range(3):
                await found.say("input.text", text="x" * 100_000)
            assert "characters would wait (allowed: 262144)" in (await found.until("error"))[-1]["message"]
            assert await found.code() == 1009


async def test_silent_client_is_closed_but_not_while_it_listens() -> None:
    gateway = "speech_config_timeout_s = 0.2\nspeech_idle_timeout_s = 0.05"
    async with running(toml(gateway, "step_time_s = 0.02")) as deployment:
        async with client(deployment) as found:
            assert "session.config: none came in time (allowed: 0.2 s)" in (await found.hear())["message"]
            assert await found.code() == 1008
        async with client(deployment, STREAMED) as found:
            await found.say("input.text", text="This is longer than the limit")
            await found.say("input.done")
            events = await found.until("error")
            assert kinds(events)[-2:] == ["session.done", "error"]
            assert "message: none came in time" in events[-1]["message"]
            assert await found.code() == 1008


async def test_plain_request_is_told_what_is_missing(deployment: Running) -> None:
    async with (
        aiohttp.ClientSession(deployment.url) as http,
        http.get(speech_stream.PATH) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "Upgrade: none came (allowed: websocket)"


async def test_idle_socket_closes_when_the_gateway_drains(
    deployment: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(deployment, {}) as found:
        draining = asyncio.create_task(deployment.gateway.drain(30.0))
        assert "the server is stopping" in (await found.hear())["message"]
        assert await found.code() == 1013
        assert await draining
    assert [record for record in caplog.records if record.exc_info] == []


async def test_slow_reader_holds_back_the_voice_and_loses_nothing() -> None:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    slow.setblocking(False)
    text = "Two megabytes"
    async with running(LONG) as deployment:
        stage = deployment.stages["voice.0"]
        await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", deployment.port))
        url = deployment.url.replace("http", "ws") + speech_stream.PATH
        async with connect(url, sock=slow, max_queue=1, max_size=None) as connected:
            found = Client(connected)
            await found.say("session.config", **STREAMED)
            await found.say("input.text", text=text)
            await found.say("input.done")
            while not stage.stats.suspended:
                await deployment.gateway.client.admin("status")
            assert stage.stats.steps * 4000 < len(text) * 100_000
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
            [(_, pcm)] = sentences((await found.until("session.done"))[1:])

    assert len(pcm) == 2 * 100_000 * len(text)


@pytest.mark.model
async def test_real_voice_says_the_same_as_over_http() -> None:
    """The OpenAI SDK asks for the same text, voice and seed, and gets the same samples."""
    pytest.importorskip("hibari")
    hibari = """
[stages.voice]
adapter = "hibari"
[pipelines.speech]
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
"""
    config = STREAMED | {"voice": "heart", "seed": 5, "split_granularity": "sentence"}
    async with (
        running(hibari) as deployment,
        client(deployment, config) as found,
        AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        for letter in "The capital of France is Paris. Dr. Smith has 3.5 dogs.":
            await found.say("input.text", text=letter)
        await found.say("input.done")
        spoken = sentences(await found.until("session.done"))
        assert [text for text, _ in spoken] == ["The capital of France is Paris.", "Dr. Smith has 3.5 dogs."]
        for text, pcm in spoken:
            asked = sdk.audio.speech.with_streaming_response.create(
                model="speech", voice="heart", input=text, response_format="pcm", extra_body={"seed": 5}
            )
            async with asked as response:
                assert await response.read() == pcm
            assert len(pcm) > 48_000
