"""Diffusion over the bus: a language model that writes the prompt, and a pipeline over three stages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import tiny  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running
from omni_bus.client import BusClient, Item
from omni_bus.wire.payloads import Image, Json, Payload, Text

if TYPE_CHECKING:
    from actors.testing import Running

pytest.importorskip("diffusers")
pytest.importorskip("xllamacpp")

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # Of diffusers, transformers and torch, at work on models of this size.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CALL = "call = { width = 64, height = 64, num_inference_steps = 3, guidance_scale = 2.0 }"

REWRITTEN = f"""
[stages.writer]
adapter = "llamacpp"
system_prompt = "Describe the picture that is asked for in one short, plain sentence."
params = {{ temperature = 0.0, max_tokens = 48 }}

[stages.picture]
adapter = "diffusers"
model = "FOLDER"
{CALL}

[pipelines.rewritten]
edges = [
  "in.messages -> writer.prompt",
  "writer.text -> picture.prompt",
  "writer.text -> out.text",
  "picture.image -> out.image",
  "picture.progress -> out.progress",
]
"""

THREE = f"""
[stages.encoder]
adapter = "diffusers-encoder"
model = "FOLDER"
{CALL}

[stages.denoiser]
adapter = "diffusers-denoiser"
model = "FOLDER"
{CALL}

[stages.decoder]
adapter = "diffusers-decoder"
model = "FOLDER"

[pipelines.picture]
edges = [
  "in.prompt -> encoder.prompt",
  "encoder.conditioning -> denoiser.conditioning",
  "encoder.embeddings -> denoiser.embeddings",
  "denoiser.latents -> decoder.latents",
  "decoder.image -> out.image",
]
"""


async def ask(deployment: Running, pipeline: str, port: str, payload: Payload, stage: str) -> dict[str, list[Any]]:
    """Return the outputs of one request, by port."""
    found = deployment.deployment
    outputs: dict[str, list[Any]] = {}
    async with (
        await BusClient.connect("test", found.listen("test"), found.coordinator_endpoint, timeout_s=20) as client,
        await client.submit(pipeline, params={stage: {"seed": 7}}) as request,
    ):
        await request.send(port, payload)
        request.finish(port)
        async for item in request:
            if isinstance(item, Item):
                outputs.setdefault(item.port, []).append(item.payload)
    return outputs


def drawn_alone(folder: str, prompt: str) -> np.ndarray[Any, Any]:
    """Return what diffusers itself draws."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    call = {"width": 64, "height": 64, "num_inference_steps": 3, "guidance_scale": 2.0}
    return np.asarray(pipeline(prompt, generator=generator, **call).images[0])


def pixels(image: Image) -> np.ndarray[Any, Any]:
    return np.frombuffer(image.data.view, np.uint8).reshape(image.height, image.width, 3)


async def test_language_model_writes_what_is_drawn(tmp_path: Path) -> None:
    folder = tiny.zimage(tmp_path)
    asked = Json({"messages": [{"role": "user", "content": "A cat on a roof."}]})
    async with running(REWRITTEN.replace("FOLDER", folder)) as deployment:
        outputs = await ask(deployment, "rewritten", "messages", asked, "picture")
    written = "".join(piece.text for piece in outputs["text"])
    [image] = outputs["image"]

    assert len(written.split()) > 3
    assert np.array_equal(pixels(image), drawn_alone(folder, written))
    assert [payload.value["phase"] for payload in outputs["progress"]] == ["encode", *["denoise"] * 3, "decode"]


async def test_three_stages_draw_over_the_bus_what_one_process_does(tmp_path: Path) -> None:
    folder = tiny.zimage(tmp_path)
    async with running(THREE.replace("FOLDER", folder)) as deployment:
        outputs = await ask(deployment, "picture", "prompt", Text("a red cube"), "denoiser")
    [image] = outputs["image"]

    assert np.array_equal(pixels(image), drawn_alone(folder, "a red cube"))
