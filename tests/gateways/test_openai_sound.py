"""``POST /v1/audio/generate`` against running deployments: a file of each format, and what is refused."""

from __future__ import annotations

import io
import sys
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import av
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE, post  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from omni_bus.media.encoder import wav_header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/v1/audio/generate"
RATE_HZ = 24_000
NUM_FRAMES = 100 * len("rain")

FAILING = """
[stages.rain]
adapter = "synthetic-speech"
fail_at_step = 0
[pipelines.sound]
serve_as = "sound"
edges = ["in.prompt -> rain.text", "rain.audio -> out.audio"]
[gateways.openai]
"""


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


async def generate(deployment: Running, **fields: Any) -> tuple[str, bytes]:
    async with (
        aiohttp.ClientSession(deployment.url) as session,
        session.post(PATH, json={"input": "rain"} | fields) as response,
    ):
        body = await response.read()
        assert response.status == 200, body
        assert response.content_length == len(body)
        return response.content_type, body


async def test_file_is_a_wav_unless_asked_otherwise(able: Running) -> None:
    kind, file = await generate(able)
    _, samples = await generate(able, response_format="pcm")

    assert kind == "audio/wav"
    assert file == wav_header(RATE_HZ, 1, len(samples)) + samples
    with wave.open(io.BytesIO(file)) as wav:
        assert (wav.getframerate(), wav.getnchannels(), wav.getnframes()) == (RATE_HZ, 1, NUM_FRAMES)


@pytest.mark.parametrize(
    ("fmt", "kind", "codec"),
    [
        ("flac", "audio/flac", "flac"),
        ("mp3", "audio/mpeg", "mp3float"),
        ("opus", "audio/ogg", "opus"),
        ("aac", "audio/aac", "aac"),
    ],
)
async def test_each_format_can_be_read(able: Running, fmt: str, kind: str, codec: str) -> None:
    found, file = await generate(able, response_format=fmt)

    assert found == kind
    with av.open(io.BytesIO(file), "r") as container:
        [stream] = container.streams
        assert stream.codec_context.name.startswith(codec.removesuffix("float"))
        assert sum(frame.samples for frame in container.decode(audio=0)) > 0


async def test_speed_changes_the_length(able: Running) -> None:
    sizes = [len((await generate(able, input="rain" * 50, response_format="pcm", speed=speed))[1]) for speed in (1, 2)]

    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.01)


async def test_harmless_fields_are_taken(able: Running) -> None:
    plain = await generate(able)

    assert await generate(able, speed=1, audio_start=3, stream_format="audio", user="me", model="sound") == plain
    assert await generate(able, extra_body={"response_format": "wav"}, seed=None) == plain


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": " \n\t"}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": ["rain"]}, 400, "input"),
        ({"input": "x" * 100_001}, 400, "input"),
        ({"input": "rain", "response_format": "aiff"}, 400, "response_format"),
        ({"input": "rain", "stream_format": "sse"}, 400, "stream_format"),
        ({"input": "rain", "audio_length": 0}, 400, "audio_length"),
        ({"input": "rain", "audio_length": -1}, 400, "audio_length"),
        ({"input": "rain", "audio_length": "long"}, 400, "audio_length"),
        ({"input": "rain", "audio_length": 1e9}, 400, "audio_length"),
        ({"input": "rain", "audio_start": -0.1}, 400, "audio_start"),
        ({"input": "rain", "guidance_scale": 1000.1}, 400, "guidance_scale"),
        ({"input": "rain", "guidance_scale": -1}, 400, "guidance_scale"),
        ({"input": "rain", "num_inference_steps": 0}, 400, "num_inference_steps"),
        ({"input": "rain", "num_inference_steps": 1001}, 400, "num_inference_steps"),
        ({"input": "rain", "num_inference_steps": 1.5}, 400, "num_inference_steps"),
        ({"input": "rain", "seed": 2**63}, 400, "seed"),
        ({"input": "rain", "seed": "one"}, 400, "seed"),
        ({"input": "rain", "speed": 0.1}, 400, "speed"),
        ({"input": "rain", "speed": 4.1}, 400, "speed"),
        ({"input": "rain", "negative_prompt": ""}, 400, "negative_prompt"),
        ({"input": "rain", "voice": "heart"}, 400, "voice"),
        ({"input": "rain", "n": 2}, 400, "n"),
        ({"input": "rain", "model": "nope"}, 404, "model"),
        ({"input": "rain", "model": "able"}, 404, "model"),
        # The stage has no such setting.
        ({"input": "rain", "audio_length": 1}, 400, "audio_length"),
        ({"input": "rain", "guidance_scale": 3}, 400, "guidance_scale"),
    ],
)
async def test_bad_bodies_are_refused_by_name(able: Running, body: dict[str, Any], status: int, param: str) -> None:
    found, document = await post(able, PATH, body)

    assert (found, document["error"]["param"]) == (status, param), document
    assert document["error"]["message"].partition(" (")[0].split(":")[0] in (param, f"unknown parameter '{param}'")


async def test_failure_of_the_stage_is_no_fault_of_the_caller() -> None:
    async with running(FAILING) as deployment:
        status, document = await post(deployment, PATH, {"input": "rain"})

    assert (status, document["error"]["type"]) == (500, "InternalServerError")
    assert document["error"]["stage"] == "rain"


async def test_sound_that_is_too_long_for_an_answer_is_refused() -> None:
    async with running(ABLE.replace("[gateways.openai]", "[gateways.openai]\nmax_answer_bytes = 1024")) as deployment:
        status, document = await post(deployment, PATH, {"input": "much rain, for a long time"})

    assert (status, document["error"]["param"]) == (400, "input")
