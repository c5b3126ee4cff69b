"""The official client and models that make sound: a speech language model with its codec, and diffusion."""

from __future__ import annotations

import base64
import io
import sys
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import openai
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import tiny  # type: ignore[import-not-found] (put on the path above)
from text_engine import client_of  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running
from omni_bus.media.sound import FADE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

diffusers: Any = pytest.importorskip("diffusers")
transformers: Any = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(300),
    # diffusers' VAE, and torchsde at steps that end where its interval does.
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Should have t[ab]:UserWarning:torchsde"),
]

CONFIGS = Path(__file__).parents[2] / "configs"


def shipped(name: str, model: str, folder: str) -> str:
    """Return a shipped configuration with a folder for its model, on a port of its own."""
    toml = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8")
    assert f'"{model}"' in toml
    return toml.replace(f'"{model}"', f'"{folder}"').replace("port = 8000", "port = 0")


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.csm(tmp_path_factory.mktemp("csm"))


@pytest.fixture
async def client(csm: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running(shipped("transformers_speech", "sesame/csm-1b", csm)) as deployment,
        client_of(deployment.url) as client,
    ):
        yield client


def whole(csm: str, text: str, seed: int) -> np.ndarray:
    """Return what the model says by itself."""
    model = transformers.CsmForConditionalGeneration.from_pretrained(csm)
    prompt = transformers.AutoProcessor.from_pretrained(csm).apply_chat_template(
        [{"role": "0", "content": [{"type": "text", "text": text}]}], tokenize=True, return_dict=True
    )
    torch.manual_seed(seed)
    return model.generate(**prompt, output_audio=True)[0].clamp(-1, 1).numpy()


async def test_speech_is_the_models_own(client: openai.AsyncOpenAI, csm: str) -> None:
    answer = await client.audio.speech.create(
        model="csm", voice="0", input="Hello there.", response_format="wav", extra_body={"seed": 5}
    )
    with wave.open(io.BytesIO(answer.content)) as wav:
        assert (wav.getframerate(), wav.getnchannels()) == (24_000, 1)
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")

    assert np.abs(samples / 32767 - whole(csm, "Hello there.", 5)).max() < 1e-4
    assert samples.std() > 1000


async def test_speech_streams_the_same_samples(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": "csm", "voice": "0", "input": "Hello there.", "response_format": "pcm"}
    answer = await client.audio.speech.create(**fields, extra_body={"seed": 5})
    async with client.audio.speech.with_streaming_response.create(
        **fields, extra_body={"seed": 5}, stream_format="audio"
    ) as stream:
        pieces = [piece async for piece in stream.iter_bytes()]

    assert len(pieces) > 1
    assert b"".join(pieces) == answer.content


async def test_uploaded_voice_speaks_as_its_sample_does(client: openai.AsyncOpenAI) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setparams((1, 2, 24_000, 0, "NONE", ""))
        wav.writeframes((9000 * np.sin(np.arange(30_000) / 17)).astype("<i2").tobytes())
    voice = await client.audio.voices.create(
        name="Bob", consent="c-1", audio_sample=("b.wav", file.getvalue(), "audio/wav"), extra_body={"ref_text": "Hi."}
    )

    async def say(voice: Any, **more: Any) -> bytes:
        fields: dict[str, Any] = {"model": "csm", "input": "Hello there.", "response_format": "pcm"}
        answer = await client.audio.speech.create(**fields, voice=voice, extra_body={"seed": 5, **more})
        return answer.content

    spoken = await say({"id": voice.id})
    reference = f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"
    assert spoken == await say("default", ref_audio=reference, ref_text="Hi.")
    assert spoken != await say("default")


async def test_what_the_model_cannot_do_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("voice", {"voice": "heart"}),
        ("input", {"input": "x" * 400}),
        ("max_new_tokens", {"extra_body": {"max_new_tokens": 4000}}),
        ("language", {"extra_body": {"language": "en"}}),
        ("instructions", {"instructions": "angry"}),
    ]
    create: Any = client.audio.speech.create
    for param, fields in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{"model": "csm", "voice": "0", "input": "Hello."} | fields)

        assert caught.value.param == param, caught.value.message


async def test_sound_is_the_pipelines_own(tmp_path: Path) -> None:
    folder = tiny.stable_audio(tmp_path)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    arguments = {"negative_prompt": "noise", "guidance_scale": 3.5, "num_inference_steps": 3}
    own = pipeline(
        "rain", audio_start_in_s=0.25, audio_end_in_s=0.75, generator=torch.Generator().manual_seed(7), **arguments
    )
    body = {"input": "rain", "seed": 7, "audio_start": 0.25, "audio_length": 0.5, **arguments}
    async with (
        running(shipped("diffusers_audio", "stabilityai/stable-audio-open-1.0", folder)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        async with session.post("/v1/audio/generate", json=body) as response:
            assert response.status == 200, await response.text()
            with wave.open(io.BytesIO(await response.read())) as wav:
                assert (wav.getframerate(), wav.getnchannels()) == (8000, 2)
                samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2").reshape(-1, 2)
        async with session.post("/v1/audio/generate", json=body | {"input": "x" * 65}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "input"

    edge = round(FADE_S * 8000)
    assert np.abs(samples / 32767 - own.audios[0].clamp(-1, 1).numpy().T)[edge:-edge].max() < 1e-4
    assert not samples[[0, -1]].any()  # a window that was cut out
