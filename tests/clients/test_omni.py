"""The official client and an omni model in stages: everything in, text and speech out together."""

from __future__ import annotations

import base64
import io
import math
import sys
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from PIL import Image
from text_engine import client_of  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

CONFIGS = Path(__file__).parents[2] / "configs"

SHIPPED = {
    "qwen2_5_omni": ("Qwen/Qwen2.5-Omni-7B", "qwen2.5-omni", tiny_omni.qwen2_5),
    "qwen3_omni": ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "qwen3-omni", tiny_omni.qwen3),
}
"""Configurations, the model that each has, what it is served as, and a tiny one of its kind."""

FRAME = {"qwen2.5-omni": 480, "qwen3-omni": 1920}
"""Samples that a frame of codes comes to."""

PARAMS = {
    "omni-thinker": "{ temperature = 0.0, max_tokens = 12 }",
    "omni-talker": "{ max_tokens = 20, min_tokens = 16, seed = 1 }",
    "omni-code2wav": "{ seed = 1 }",
}


@pytest.fixture(scope="module", params=list(SHIPPED))
def shipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A shipped configuration with a tiny model, and what it is served as."""
    name: str = request.param
    model, served, save = SHIPPED[name]
    folder = save(tmp_path_factory.mktemp(name))
    toml = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8")
    assert toml.count(f'"{model}"') == 3
    for adapter, params in PARAMS.items():
        toml = toml.replace(f'adapter = "{adapter}"', f'adapter = "{adapter}"\nparams = {params}')
    return toml.replace(f'"{model}"', f'"{folder}"').replace("port = 8000", "port = 0"), served


@pytest.fixture
async def client(shipped: tuple[str, str]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with running(shipped[0]) as deployment, client_of(deployment.url) as client:
        yield client


def a_picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)).save(file, "png")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def a_sound(num_frames: int = 16_000, channels: int = 1, level: int = 3000) -> dict[str, Any]:
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setparams((channels, 2, 16_000, 0, "NONE", ""))
        wave_form = level * np.sin(np.arange(num_frames * channels) / 17)
        wav.writeframes(wave_form.astype("<i2").tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


def fields(served: str, *parts: Any, **more: Any) -> dict[str, Any]:
    voice = {"extra_body": {"voice": more.pop("voice")}} if "voice" in more else {}
    return {"model": served, "messages": ask(*parts), **voice, **more}


async def test_text_and_speech_stream_together(client: openai.AsyncOpenAI, shipped: tuple[str, str]) -> None:
    stream: Any = await client.chat.completions.create(
        **fields(shipped[1], "What is that? ", a_picture(), a_sound()),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    kinds = [chunk.modality for chunk in chunks if chunk.choices]
    assert kinds.count("audio") >= 1
    assert kinds.count("text") > 3
    assert {chunk.choices[0].index for chunk in chunks if chunk.choices} == {0}
    assert sum(bool(chunk.choices and chunk.choices[0].finish_reason) for chunk in chunks) == 1
    usage = chunks[-1].usage
    assert usage.completion_tokens == 12
    of_prompt, of_answer = dict(usage.prompt_tokens_details), dict(usage.completion_tokens_details)
    assert sum(of_prompt[f"{kind}_tokens"] for kind in ("text", "audio", "image", "video")) == usage.prompt_tokens
    assert min(of_prompt["text_tokens"], of_prompt["image_tokens"], of_prompt["audio_tokens"]) > 5
    assert of_answer["text_tokens"] == 12
    assert 16 <= of_answer["audio_tokens"] <= 20


async def test_speech_is_as_long_as_its_codes(client: openai.AsyncOpenAI, shipped: tuple[str, str]) -> None:
    answer = await client.chat.completions.create(**fields(shipped[1], "Hello.", modalities=["text", "audio"]))

    message = answer.choices[0].message
    assert message.audio is not None
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as wav:
        assert wav.getframerate() == 24_000
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")
    assert answer.usage is not None
    of_prompt, of_answer = answer.usage.prompt_tokens_details, answer.usage.completion_tokens_details
    assert of_prompt is not None
    assert of_answer is not None
    assert dict(of_prompt)["text_tokens"] == answer.usage.prompt_tokens
    assert of_prompt.audio_tokens == 0
    assert math.ceil(len(samples) / FRAME[shipped[1]]) == of_answer.audio_tokens  # Qwen3's last frame is cut short
    assert samples.std() > 100


async def test_text_alone_is_the_same_text(client: openai.AsyncOpenAI, shipped: tuple[str, str]) -> None:
    both = await client.chat.completions.create(**fields(shipped[1], "Hello."))
    text = await client.chat.completions.create(**fields(shipped[1], "Hello.", modalities=["text"]))

    assert text.choices[0].message.content == both.choices[0].message.content
    assert text.choices[0].message.audio is None


async def test_voices_sound_different(client: openai.AsyncOpenAI, shipped: tuple[str, str]) -> None:
    sounds = [
        (await client.chat.completions.create(**fields(shipped[1], "Hello.", voice=voice))).choices[0].message.audio
        for voice in ("Chelsie", "ethan", "Ethan")
    ]

    data = [sound.data for sound in sounds if sound is not None]
    assert data[0] != data[1] == data[2]
    listed = await client.get("/audio/voices", cast_to=dict[str, Any])
    assert listed["voices"] == ["chelsie", "default", "ethan"]


async def test_what_the_model_cannot_take_is_refused_by_name(
    client: openai.AsyncOpenAI, shipped: tuple[str, str]
) -> None:
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("voice", ("Hello.",), {"voice": "Bob"}),
        ("audio", (a_sound(16_000 * 11), "Long?"), {}),
        ("audio", (a_sound(100), "Short?"), {}),
        ("messages", ("Look: <|image_pad|>",), {}),
    ]
    for param, parts, more in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**fields(shipped[1], *parts, **more))

        assert param in str(caught.value.param) or param in caught.value.message, caught.value.message
        assert param != "voice" or "helsie" in caught.value.message
    answer = await client.chat.completions.create(**fields(shipped[1], a_sound(channels=8, level=0), "Silence?"))
    assert answer.choices[0].message.content
