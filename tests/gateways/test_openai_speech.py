"""Texts that are read aloud: a file, a stream of bytes and a stream of events are the same sound."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import struct
import sys
import wave
from pathlib import Path
from typing import Any

import aiohttp
import av
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from parrot import Parrot  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.openai_audio_answers import SpeechEvent
from omni_bus.media.encoder import MEDIA_TYPES, wav_header

SPEECH = "/v1/audio/speech"
TOML = """
[stages.voice]
adapter = "synthetic-speech"
[stages.parrot]
adapter = "parrot:Parrot"
[pipelines.speech]
serve_as = "ramp"
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
[pipelines.cloning]
serve_as = "parrot"
edges = ["in.text -> parrot.text", "in.reference -> parrot.reference", "parrot.audio -> out.audio"]
[gateways.openai]
"""
PAST_THE_FIRST_WINDOWS = 40
"""A step that comes only when the gateway has taken the first pieces: an edge's window is 8 chunks."""

WORDS = "Some words to be read aloud."
RAMP = b"".join(struct.pack("<h", i % 65536 - (65536 if i % 65536 > 32767 else 0)) for i in range(480 * len(WORDS)))


@pytest.fixture
async def speaking():
    async with running(TOML) as deployment:
        yield deployment


async def say(deployment: Running, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    sent = {"input": WORDS, **fields}
    async with aiohttp.ClientSession(deployment.url) as session, session.post(SPEECH, json=sent) as response:
        return response.status, dict(response.headers), await response.read()


async def events(deployment: Running, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; their names are those of their types."""
    status, headers, body = await say(deployment, stream=True, **fields)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), body
    found = []
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        msgspec.convert(document, SpeechEvent)
        found.append(document)
    return found


def decoded(file: bytes) -> tuple[int, float, bytes]:
    """Return the rate, the seconds and (of what is s16 inside) the samples."""
    with av.open(io.BytesIO(file), "r") as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        num_frames = sum(frame.size for frame in frames) // len(stream.layout.channels)
        return stream.rate, num_frames / stream.rate, b"".join(frame.tobytes() for frame in frames)


async def test_a_file_is_wav_unless_another_format_is_named(speaking: Running) -> None:
    status, headers, body = await say(speaking)

    assert (status, headers["Content-Type"]) == (200, "audio/wav")
    with wave.open(io.BytesIO(body)) as file:
        assert (file.getframerate(), file.getnchannels()) == (24000, 1)
        assert file.readframes(10**6) == RAMP
    assert {name: headers[name] for name in ("X-Sample-Rate", "X-Channels", "X-Bit-Depth")} == {
        "X-Sample-Rate": "24000",
        "X-Channels": "1",
        "X-Bit-Depth": "16",
    }
    # A voice without tokens counts the characters that it was given.
    tokens = {name: headers[f"X-VLLM-OMNI-{name}-TOKENS"] for name in ("INPUT", "OUTPUT", "TOTAL", "INPUT-TEXT")}
    assert tokens == {"INPUT": "28", "OUTPUT": "0", "TOTAL": "28", "INPUT-TEXT": "28"}


@pytest.mark.parametrize("fmt", MEDIA_TYPES)
async def test_every_format_is_as_long_whole_streamed_and_in_events(speaking: Running, fmt: str) -> None:
    fields = {"response_format": fmt, "extra_params": {"samples_per_character": 4800}}
    status, headers, whole = await say(speaking, **fields)
    _, streamed_headers, streamed = await say(speaking, **fields, stream_format="audio")
    *deltas, done = await events(speaking, **fields)

    assert status == 200
    assert headers["Content-Type"] == streamed_headers["Content-Type"] == MEDIA_TYPES[fmt]  # type: ignore[index]
    assert streamed_headers["Transfer-Encoding"] == "chunked"
    in_events = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert {delta["response_format"] for delta in deltas} == {fmt}
    assert done["usage"]["input_tokens"] == 28
    if fmt in ("pcm", "pcm16"):
        assert whole == streamed == in_events
        return
    seconds = len(WORDS) * 4800 / 24000
    for file in (whole, streamed, in_events):
        rate_hz, found_s, samples = decoded(file)
        assert (rate_hz, found_s) == (48000 if fmt == "opus" else 24000, pytest.approx(seconds, abs=0.1))
        if fmt in ("wav", "flac"):
            assert samples == decoded(whole)[2]
            assert found_s == seconds


async def test_a_stream_of_wav_events_begins_with_the_bare_head(speaking: Running) -> None:
    first, *deltas, done = await events(speaking)

    assert base64.b64decode(first["audio"]) == wav_header(24000, 1, None)
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == RAMP
    assert done["type"] == "speech.audio.done"


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream_format": "sse"}, {"stream_format": "audio"}])
async def test_either_field_asks_for_a_stream(speaking: Running, fields: dict[str, Any]) -> None:
    _, headers, _ = await say(speaking, **fields)

    assert headers["Transfer-Encoding"] == "chunked"
    assert headers["Content-Type"].startswith("audio/" if fields.get("stream_format") == "audio" else "text/event")


@pytest.mark.parametrize(
    ("fields", "factor"), [({"sample_rate": 8000}, 1 / 3), ({"speed": 4}, 0.25), ({"speed": 0.25}, 4)]
)
async def test_rate_and_speed_are_made_here_where_a_voice_has_none(
    speaking: Running, fields: dict[str, Any], factor: float
) -> None:
    _, headers, whole = await say(speaking, response_format="pcm", **fields)
    _, _, streamed = await say(speaking, response_format="pcm", stream_format="audio", **fields)

    assert len(whole) == int(len(RAMP) * factor)
    assert whole == streamed
    assert headers["X-Sample-Rate"] == str(fields.get("sample_rate", 24000))


@pytest.mark.parametrize(
    ("speed", "own", "frames"), [(1.5, 1.5, 1600), (4, 2.0, 800), (0.25, 0.5, 3200), (1, 1.0, 1600)]
)
async def test_a_voice_does_as_much_of_the_speed_as_it_can(
    speaking: Running, speed: float, own: float, frames: int
) -> None:
    Parrot.seen.clear()
    _, _, body = await say(speaking, model="parrot", input="word", response_format="pcm", speed=speed)

    assert Parrot.seen[0][1].speed == own
    assert len(body) == 2 * frames


async def test_fields_reach_the_voice_under_its_names(speaking: Running) -> None:
    Parrot.seen.clear()
    fields = {"voice": {"id": "Alice"}, "language": "french", "instructions": "Softly.", "seed": -1}
    more = {"max_new_tokens": 9, "task_type": "VoiceDesign", "extra_params": {"temperature": 0.5}}
    status, headers, _ = await say(speaking, model="parrot", **fields, **more)

    (text, params, reference) = Parrot.seen[0]
    assert status == 200
    assert (text, reference) == (WORDS, None)
    assert (params.voice, params.language, params.instructions) == ("alice", "French", "Softly.")
    assert (params.seed, params.max_new_tokens, params.task_type) == (2**63 - 1, 9, "VoiceDesign")
    assert params.temperature == 0.5
    assert headers["X-VLLM-OMNI-INPUT-TOKENS"] == headers["X-VLLM-OMNI-OUTPUT-TOKENS"] == "6"  # as the stage counts


@pytest.mark.parametrize("fields", [{}, {"voice": "default"}, {"speaker": "default"}, {"language": "auto"}])
async def test_what_asks_for_nothing_sets_nothing(speaking: Running, fields: dict[str, Any]) -> None:
    Parrot.seen.clear()
    await say(speaking, model="parrot", **fields)

    assert Parrot.seen[0][1] == Parrot.Params()


def wav_of(seconds: float, channels: int = 1) -> str:
    frames = round(8000 * seconds)
    file = wav_header(8000, channels, 2 * frames * channels) + struct.pack("<h", 1000) * frames * channels
    return "data:audio/wav;base64," + base64.b64encode(file).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"ref_audio": wav_of(1.5), "ref_text": "a word"},
        {"ref_audio": [wav_of(1.5, channels=2)], "ref_text": "a word", "task_type": "Base"},
        {"references": [{"audio_path": wav_of(1.5), "text": "a word"}]},
    ],
    ids=["ref_audio", "a list", "references"],
)
async def test_a_voice_is_spoken_with(speaking: Running, fields: dict[str, Any]) -> None:
    Parrot.seen.clear()
    status, headers, body = await say(speaking, model="parrot", input="twice said", response_format="pcm", **fields)

    assert status == 200, body
    assert body == struct.pack("<h", 1000) * 24_000  # itself, once for each word
    assert headers["X-Sample-Rate"] == "8000"
    _, params, reference = Parrot.seen[0]
    assert reference is not None
    assert (params.task_type, params.reference_text) == ("Base", "a word")
    assert (reference.num_frames, reference.channels) == (12_000, 1)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"ref_audio": wav_of(0.5)}, "ref_audio", "0.50 s of sound came (allowed: 1 to 30 s)"),
        ({"references": [{"audio_path": wav_of(31)}]}, "references[0].audio_path", "1 to 30 s"),
        ({"ref_audio": ["data:audio/wav;base64,AAAA"]}, "ref_audio[0]", "ref_audio[0]: "),
        ({"ref_audio": "ftp://a/b.wav"}, "ref_audio", "data:, http"),
        ({"ref_audio": "http://127.0.0.1/a.wav"}, "ref_audio", "this server fetches none"),
    ],
)
async def test_references_that_cant_be_read(speaking: Running, fields: dict[str, Any], param: str, words: str) -> None:
    status, _, body = await say(speaking, model="parrot", **fields)

    error = json.loads(body)["error"]
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


async def test_refusals_of_the_stage_come_under_the_bodys_names(speaking: Running) -> None:
    status, _, body = await say(speaking, model="parrot", extra_params={"temperature": "hot"})

    assert (status, json.loads(body)["error"]["param"]) == (400, "extra_params.temperature")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream_format": "audio"}])
async def test_failures_before_the_first_sound_have_a_status(speaking: Running, fields: dict[str, Any]) -> None:
    status, headers, body = await say(speaking, extra_params={"fail_at_step": 0}, **fields)
    nothing, _, refusal = await say(speaking, model="parrot", input="\U0001f642 ... \u2026", **fields)

    assert status == 500
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(body)["error"]["stage"] == "voice"
    assert (nothing, json.loads(refusal)["error"]["param"]) == (400, "input")


async def test_failure_in_mid_stream_says_to_discard_what_came(speaking: Running) -> None:
    failing = {"fail_at_step": PAST_THE_FIRST_WINDOWS, "samples_per_character": 48_000}
    *deltas, error = await events(speaking, extra_params=failing)

    assert deltas
    assert error["type"] == "speech.audio.error"
    assert error["error"]["code"] == 500
    assert (error["error"]["partial_audio"], error["error"]["action"]) == (True, "discard")
    with pytest.raises(aiohttp.ClientPayloadError):
        await say(speaking, extra_params=failing, stream_format="audio")


async def test_a_file_beyond_the_limit_asks_for_a_stream() -> None:
    async with running(TOML + "max_answer_bytes = 20000\n") as deployment:
        for fmt in ("wav", "pcm", "flac"):
            many = {"samples_per_character": 10_000}
            status, _, body = await say(deployment, extra_params=many, response_format=fmt)
            assert (status, json.loads(body)["error"]["param"]) == (400, "stream_format")
        status, _, body = await say(deployment, extra_params=many, stream_format="audio")
        assert (status, len(body)) == (200, 44 + 2 * 10_000 * len(WORDS))


async def test_texts_are_as_long_as_the_table_says() -> None:
    async with running(TOML + "max_speech_chars = 10\n") as deployment:
        status, _, body = await say(deployment, input="x" * 11)
        assert (status, json.loads(body)["error"]["param"]) == (400, "input")
        assert (await say(deployment, input="x" * 10))[0] == 200


@pytest.mark.parametrize("fmt", ["pcm", "flac"])
async def test_a_client_that_stops_reading_stops_the_voice(speaking: Running, fmt: str) -> None:
    """A minute and more of sound for a client that takes none of it, and then all; nothing is lost."""
    fields = {"response_format": fmt, "stream_format": "audio", "extra_params": {"samples_per_character": 96_000}}
    sent = json.dumps({"input": WORDS * 4, **fields})
    head = f"POST {SPEECH} HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    stage = speaking.stages["voice.0"]
    await loop.sock_connect(slow, ("127.0.0.1", speaking.port))
    await loop.sock_sendall(slow, (head + sent).encode())
    async with aiohttp.ClientSession(speaking.url) as session:
        while not stage.stats.suspended:
            async with session.get("/health") as response:
                await response.read()
    num_steps = len(WORDS) * 4 * 96_000 // 4800
    assert stage.stats.steps < num_steps / 2
    assert (await say(speaking))[0] == 200
    assert stage.stats.suspended == 1

    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += await loop.sock_recv(slow, 2**18)
    slow.close()
    assert len(received) > (2 * num_steps * 4800 if fmt == "pcm" else num_steps)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream_format": "audio", "response_format": "mp3"}, {}])
async def test_a_client_that_leaves_frees_the_voice(speaking: Running, fields: dict[str, Any]) -> None:
    stage = speaking.stages["voice.0"]
    endless = {"samples_per_character": 100_000, "step_time_s": 0.001}
    async with aiohttp.ClientSession(speaking.url) as session:
        body = {"input": WORDS * 9, "extra_params": endless, **fields}
        asked = asyncio.create_task(session.post(SPEECH, json=body))
        while not stage.stats.active:
            async with session.get("/health") as response:
                await response.read()
        if fields:
            response = await asked
            await response.content.readany()
            response.close()
        else:
            asked.cancel()
        while stage.stats.cancelled < 1 or stage.stats.active:
            async with session.get("/health") as response:
                await response.read()
    assert (await say(speaking))[0] == 200
