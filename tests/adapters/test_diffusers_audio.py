from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)

from adapters.diffusers_audio import DiffusersAudio
from omni_bus.errors import BadInput, ConfigError, StageFailed, StartFailed
from omni_bus.testing import make_engine, run_streaming, start_streaming
from omni_bus.wire.payloads import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_bus.wire.payloads import Payload

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # diffusers' VAE, and torchsde at steps that end where its interval does.
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Should have t[ab]:UserWarning:torchsde"),
]
diffusers: Any = pytest.importorskip("diffusers")

RATE_HZ = 8000
WINDOW = 256 * 32
"""Samples of each channel that the model always computes."""


def says(words: str) -> dict[str, list[Payload]]:
    return {"prompt": [Text(words)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.stable_audio(tmp_path_factory.mktemp("stable_audio"))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[DiffusersAudio]:
    engine = make_engine(DiffusersAudio, {"model": folder, "call": {"num_inference_steps": 3}, "max_num_seqs": 2})
    yield engine
    engine.close()


def alone(folder: str, **arguments: Any) -> bytes:
    """Return what diffusers itself makes of a call, as PCM."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    sound = np.asarray(pipeline(generator=torch.Generator().manual_seed(7), **arguments).audios[0])
    return (np.clip(sound.T, -1, 1) * 32767).round().astype("<i2").tobytes()


async def test_sound_is_the_pipelines_own(engine: DiffusersAudio, folder: str) -> None:
    params = {
        "seed": 7,
        "audio_length": 0.5,
        "audio_start": 0.25,
        "negative_prompt": "noise",
        "guidance_scale": 3.5,
        "num_inference_steps": 4,
    }
    said = await run_streaming(engine, {"prompt": [Text("a dog "), Text("barks")]}, params)

    assert said.pcm == alone(
        folder,
        prompt="a dog barks",
        audio_start_in_s=0.25,
        audio_end_in_s=0.75,
        negative_prompt="noise",
        guidance_scale=3.5,
        num_inference_steps=4,
    )
    assert np.frombuffer(said.pcm, "<i2").std() > 1000
    [piece] = said.port("audio")
    assert (piece.rate_hz, piece.channels, piece.num_frames) == (RATE_HZ, 2, RATE_HZ // 2)


async def test_defaults_are_the_pipelines_and_the_stages(engine: DiffusersAudio, folder: str) -> None:
    said = await run_streaming(engine, says("rain"), {"seed": 7})

    assert said.pcm == alone(folder, prompt="rain", num_inference_steps=3)
    assert [piece.num_frames for piece in said.port("audio")] == [RATE_HZ, WINDOW - RATE_HZ]


async def test_seed_gives_the_same_sound_beside_others(engine: DiffusersAudio) -> None:
    one = await run_streaming(engine, says("rain"), {"seed": 1})
    two = await run_streaming(engine, says("wind"), {"seed": 2, "num_inference_steps": 6})
    beside = await asyncio.gather(
        run_streaming(engine, says("rain"), {"seed": 1}),
        run_streaming(engine, says("wind"), {"seed": 2, "num_inference_steps": 6}),
    )

    assert [said.pcm for said in beside] == [one.pcm, two.pcm]
    assert one.pcm != (await run_streaming(engine, says("rain"), {"seed": 2})).pcm
    assert (await run_streaming(engine, says("rain"))).pcm != (await run_streaming(engine, says("rain"))).pcm


async def test_cancel_stops_at_the_next_step(engine: DiffusersAudio, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, has_begun, may_go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    step = diffusers.CosineDPMSolverMultistepScheduler.step
    num_steps = 0

    def slow_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            loop.call_soon_threadsafe(has_begun.set)
            may_go_on.wait()
        return step(*args, **kwargs)

    monkeypatch.setattr(diffusers.CosineDPMSolverMultistepScheduler, "step", slow_step)
    async with start_streaming(engine, says("rain"), {"num_inference_steps": 1000}) as stream:
        pull = asyncio.create_task(stream.pull())
        await has_begun.wait()
        pull.cancel()
        loop.call_soon(may_go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await pull

    assert num_steps == 3


@pytest.mark.parametrize(
    ("words", "params", "field"),
    [
        ("", {}, "prompt"),
        (" \n", {}, "prompt"),
        ("x" * 65, {}, "prompt"),
        ("x" * 100_000, {}, "prompt"),
        ("rain", {"negative_prompt": "x" * 65}, "negative_prompt"),
        ("rain", {"negative_prompt": "noise", "guidance_scale": 1.0}, "negative_prompt"),
        ("rain", {"audio_length": 1.5}, "audio_length"),
        ("rain", {"audio_length": 0.5, "audio_start": 0.6}, "audio_start"),
    ],
)
async def test_what_the_model_cannot_do_is_refused(
    engine: DiffusersAudio, words: str, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput, match=rf"^{field}: .*\(allowed: ") as caught:
        await run_streaming(engine, says(words), params)

    assert caught.value.field == field


async def test_argument_that_the_call_does_not_take_is_refused_by_name(
    engine: DiffusersAudio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ACE-Step, which knows no negative prompt."""
    monkeypatch.setattr(engine, "_takes", engine._takes - {"negative_prompt"})
    with pytest.raises(BadInput, match=r"^negative_prompt: the model has no such setting"):
        await run_streaming(engine, says("rain"), {"negative_prompt": "noise"})


async def test_other_pipelines_are_served_by_what_their_call_takes(tmp_path: Path) -> None:
    """Another name for the length, another callback, another limit, one channel; no windows."""
    folder = tiny.longcat_audio(tmp_path)
    engine = make_engine(DiffusersAudio, {"model": folder, "call": {"num_inference_steps": 3}})
    try:
        said = await run_streaming(engine, says("rain"), {"seed": 7, "audio_length": 0.5})
        with pytest.raises(BadInput, match=r"^audio_start: .*\(allowed: 0\)"):
            await run_streaming(engine, says("rain"), {"audio_length": 0.5, "audio_start": 0.1})
        with pytest.raises(BadInput, match=r"^audio_length: .*\(allowed: at most 30 s\)"):
            await run_streaming(engine, says("rain"), {"audio_length": 31.0})
    finally:
        engine.close()

    assert said.pcm == alone(folder, prompt="rain", audio_duration_s=0.5, num_inference_steps=3)
    assert [(piece.rate_hz, piece.channels, piece.num_frames) for piece in said.port("audio")] == [(8000, 1, 4000)]
    assert np.frombuffer(said.pcm, "<i2").std() > 100


async def test_failure_inside_the_pipeline_is_the_stages(
    engine: DiffusersAudio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(diffusers.StableAudioPipeline, "encode_duration", fail)
    with pytest.raises(StageFailed, match="ValueError: no"):
        await run_streaming(engine, says("rain"))


def test_folder_without_a_pipeline_is_found_by_the_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_index"):
        make_engine(DiffusersAudio, {"model": str(tmp_path)})


def test_unknown_argument_of_the_call_is_refused_at_the_start(folder: str) -> None:
    with pytest.raises(StartFailed, match=r"unknown argument 'guidance_scal'; did you mean 'guidance_scale'"):
        make_engine(DiffusersAudio, {"model": folder, "call": {"guidance_scal": 2.0}})


def test_broken_checkpoint_is_refused_at_the_start(folder: str, tmp_path: Path) -> None:
    for path in Path(folder).rglob("*"):
        if path.is_file():
            copied = tmp_path / path.relative_to(folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())
    for weights in (tmp_path / "vae").glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])

    with pytest.raises(StartFailed, match=r"^model: "):
        make_engine(DiffusersAudio, {"model": str(tmp_path)})
