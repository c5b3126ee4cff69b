"""``POST /v1/images/generations`` against a running deployment: each field does what it says, or is refused by name."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from PIL import Image as Pil

sys.path.insert(0, str(Path(__file__).parent))

from able import post  # type: ignore[import-not-found] (put on the path above)
from painter import TOML, Painter  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/v1/images/generations"


@pytest.fixture
async def painters() -> AsyncIterator[Running]:
    Painter.seen.clear()
    async with running(TOML) as deployment:
        yield deployment


async def generate(deployment: Running, **fields: Any) -> dict[str, Any]:
    status, document = await post(deployment, PATH, {"prompt": "a cat"} | fields)
    assert status == 200, document
    return document


def opened(data: str) -> Any:
    return Pil.open(io.BytesIO(base64.b64decode(data)))


def pictures(document: dict[str, Any]) -> list[Any]:
    return [opened(each["b64_json"]) for each in document["data"]]


async def test_picture_is_a_png_unless_asked_otherwise(painters: Running) -> None:
    document = await generate(painters, seed=7)

    (picture,) = pictures(document)
    assert (picture.format, picture.size, picture.getpixel((0, 0))) == ("PNG", (32, 16), (7, 8, 9))
    assert (document["output_format"], document["size"]) == ("png", "32x16")
    assert document["data"][0]["url"] is document["cot_output"] is None
    assert document["metrics"] == {"stage_durations": None, "peak_memory_mb": None}
    assert document["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"text_tokens": 2, "image_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": 1},
        "total_tokens": 3,
    }


async def test_each_picture_has_the_next_seed(painters: Running) -> None:
    document = await generate(painters, n=4, seed=250)
    last = await generate(painters, n=2, seed=-1)

    assert [picture.getpixel((0, 0))[0] for picture in pictures(document)] == [250, 251, 252, 253]
    assert [params.seed for _, params, _, _ in Painter.seen[-2:]] in ([2**63 - 1, 0], [0, 2**63 - 1])
    assert len(last["data"]) == 2


@pytest.mark.parametrize(("fmt", "found"), [("jpeg", "JPEG"), ("jpg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")])
async def test_each_format_can_be_read(painters: Running, fmt: str, found: str) -> None:
    document = await generate(painters, output_format=fmt)

    assert pictures(document)[0].format == found
    assert document["output_format"] == found.lower()


async def test_url_is_a_data_url(painters: Running) -> None:
    document = await generate(painters, response_format="url", output_format="webp", seed=1)
    plain = await generate(painters, output_format="webp", seed=1)

    assert document["data"][0] == {
        "b64_json": None,
        "url": "data:image/webp;base64," + plain["data"][0]["b64_json"],
        "revised_prompt": None,
    }


@pytest.mark.parametrize("num", [1, 3])
async def test_file_is_the_picture_or_an_archive(painters: Running, num: int) -> None:
    body = {"prompt": "a cat", "n": num, "seed": 1, "response_format": "file", "output_format": "jpeg"}
    async with aiohttp.ClientSession(painters.url) as session, session.post(PATH, json=body) as response:
        data = await response.read()
        assert response.status == 200
        disposition = response.headers["Content-Disposition"]
        assert response.content_length == len(data)

    if num == 1:
        assert response.content_type == "image/jpeg"
        assert disposition.startswith('attachment; filename="image_')
        assert disposition.endswith('.jpeg"')
        assert Pil.open(io.BytesIO(data)).format == "JPEG"
        return
    assert response.content_type == "application/zip"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == ["image_0.jpeg", "image_1.jpeg", "image_2.jpeg"]
        assert archive.testzip() is None


async def test_fields_reach_the_stage(painters: Running) -> None:
    told = {
        "negative_prompt": "blur",
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "strength": 0.5,
        "seed": 5,
    }
    await generate(
        painters,
        **told,
        size="64x48",
        lora={"name": "ink", "scale": 0.5},
        layers=2,
        true_cfg_scale=4,
        extra_params={"eta": 0.1},
    )

    (prompt, params, images, masks) = Painter.seen[-1]
    assert (prompt, images, masks) == ("a cat", [], [])
    assert {name: getattr(params, name) for name in told if name != "guidance_scale"} == {
        name: value for name, value in told.items() if name != "guidance_scale"
    }
    assert (params.width, params.height, params.lora) == (64, 48, {"name": "ink", "scale": 0.5})
    # Where a request names both, each goes under its own name.
    assert params.extra == {"layers": 2, "true_cfg_scale": 4, "eta": 0.1, "guidance_scale": 2.5}


async def test_harmless_fields_change_nothing(painters: Running) -> None:
    plain = await generate(painters, seed=1)
    other = await generate(
        painters,
        seed=1,
        model="brush",
        quality="auto",
        background="opaque",
        moderation="low",
        generator_device="cpu",
        vae_use_tiling=False,
        user="me",
        size=None,
        style=None,
        extra_body={"n": 1},
    )

    assert other["data"] == plain["data"]


async def test_size_is_that_of_the_enlarged_picture(painters: Running) -> None:
    own = await generate(painters, model="large")
    told = await generate(painters, model="large", size="100x50", return_stage_metrics=True)

    assert (own["size"], told["size"]) == ("64x32", "100x50")
    assert (Painter.seen[-1][1].width, Painter.seen[-1][1].height) == (None, None)
    assert pictures(told)[0].size == (100, 50)
    assert set(told["metrics"]["stage_durations"]) == {"brush", "wide"}
    assert [each["final_output_type"] for each in told["metrics"]["stage_metrics"].values()] == ["text", "image"]


async def events_of(deployment: Running, path: str = PATH, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream that ends well."""
    body = {"prompt": "a cat", "stream": True} | fields
    async with aiohttp.ClientSession(deployment.url) as session, session.post(path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    found = [event.removeprefix("event: ").split("\ndata: ") for event in events]
    return [(name, json.loads(data)) for name, data in found]


async def test_stream_shows_partial_images_and_then_the_picture(painters: Running) -> None:
    events = await events_of(painters, partial_images=3, seed=9, output_format="jpeg")

    assert [name for name, _ in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert all(event["type"] == name for name, event in events)
    assert [event["partial_image_index"] for _, event in events[:-1]] == [0, 1, 2]
    assert {(event["size"], event["output_format"]) for _, event in events} == {("32x16", "jpeg")}
    assert opened(events[0][1]["b64_json"]).getpixel((0, 0)) == (128, 128, 128)
    assert events[-1][1]["usage"]["total_tokens"] == 3


async def test_stream_without_partial_images_is_the_pictures(painters: Running) -> None:
    events = await events_of(painters, n=2, seed=9)

    assert [name for name, _ in events] == ["image_generation.completed"] * 2
    found = {event["index"]: opened(event["b64_json"]).getpixel((0, 0))[0] for _, event in events}
    assert found == {0: 9, 1: 10}


async def test_stream_tells_of_a_failure_with_a_real_status_before_it_begins(painters: Running) -> None:
    status, document = await post(painters, PATH, {"prompt": "a cat", "stream": True, "lora": {"name": "oil"}})

    assert (status, document["error"]["param"]) == (400, "lora")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": " \n"}, "prompt"),
    ({"prompt": ["a cat"]}, "prompt"),
    ({"prompt": "x" * 100_001}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "2"}, "n"),
    ({"size": "auto"}, "size"),
    ({"size": "64"}, "size"),
    ({"size": "64×64"}, "size"),
    ({"size": [64, 64]}, "size"),
    ({"size": "0x64"}, "size"),
    ({"size": "-64x64"}, "size"),
    ({"size": "1x1"}, "size"),
    ({"size": "100000x100000"}, "size"),
    ({"size": "16384x16384"}, "size"),
    ({"size": "33x32"}, "size"),
    ({"response_format": "png"}, "response_format"),
    ({"output_format": "gif"}, "output_format"),
    ({"output_compression": 101}, "output_compression"),
    ({"output_compression": -1}, "output_compression"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"num_inference_steps": -1}, "num_inference_steps"),
    ({"num_inference_steps": 201}, "num_inference_steps"),
    ({"num_inference_steps": True}, "num_inference_steps"),
    ({"guidance_scale": -0.1}, "guidance_scale"),
    ({"guidance_scale": 20.1}, "guidance_scale"),
    ({"guidance_scale": "high"}, "guidance_scale"),
    ({"true_cfg_scale": 21}, "true_cfg_scale"),
    ({"guidance_scale_2": 2}, "guidance_scale_2"),
    ({"strength": 1.1}, "strength"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"layers": 1}, "layers"),
    ({"resolution": 512}, "resolution"),
    ({"resolution": 640}, "resolution"),
    ({"negative_prompt": ""}, "negative_prompt"),
    ({"lora": "ink"}, "lora"),
    ({"lora": {}}, "lora.name"),
    ({"lora": {"name": "oil"}}, "lora"),
    ({"lora": {"name": "ink", "scale": 11}}, "lora.scale"),
    ({"lora": {"name": "ink", "lora_path": "/etc"}}, "lora.lora_path"),
    ({"lora": {"name": "ink", "rank": 3}}, "lora.rank"),
    ({"extra_params": []}, "extra_params"),
    ({"extra_params": {"steps": 3}}, "extra_params.steps"),
    ({"extra_params": {"layers": 3}, "layers": 3}, "extra_params.layers"),
    ({"partial_images": 1}, "partial_images"),
    ({"partial_images": 4, "stream": True}, "partial_images"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "response_format": "url"}, "response_format"),
    ({"stream": True, "response_format": "file"}, "response_format"),
    ({"quality": "high"}, "quality"),
    ({"style": "vivid"}, "style"),
    ({"background": "transparent"}, "background"),
    ({"flow_shift": 3}, "flow_shift"),
    ({"system_prompt": "x"}, "system_prompt"),
    ({"vae_use_slicing": True}, "vae_use_slicing"),
    ({"generator_device": "cuda"}, "generator_device"),
    ({"image": "x"}, "image"),
    ({"num_images": 2}, "num_images"),
    ({"extra_body": {"n": 2}, "n": 2}, "extra_body.n"),
    ({"model": "nope"}, "model"),
    ({"model": "chat"}, "model"),
    ({"model": 5}, "model"),
    # This model can't.
    ({"model": "plain", "seed": 1}, "seed"),
    ({"model": "plain", "size": "64x64"}, "size"),
    ({"model": "plain", "layers": 2}, "layers"),
    ({"model": "plain", "extra_params": {"eta": 1}}, "extra_params"),
    ({"model": "plain", "lora": {"name": "ink"}}, "lora"),
    ({"model": "plain", "stream": True, "partial_images": 1}, "partial_images"),
]


async def test_bad_bodies_are_refused_by_name(painters: Running) -> None:
    for body, param in BAD:
        status, document = await post(painters, PATH, {"prompt": "a cat"} | body)

        error = document["error"]
        assert (status, error["param"], error["code"]) == (400, param, 400), (body, document)
        assert error["message"].startswith(param.split(".")[0]), (body, document)
    assert (
        "greater than or equal to 1"
        in (await post(painters, PATH, {"prompt": "a", "num_inference_steps": 0}))[1]["error"]["message"]
    )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_numbers_that_are_none_are_refused(painters: Running, number: str) -> None:
    body = f'{{"prompt": "a cat", "guidance_scale": {number}}}'
    async with (
        aiohttp.ClientSession(painters.url) as session,
        session.post(PATH, data=body, headers={"Content-Type": "application/json"}) as response,
    ):
        assert response.status == 400, await response.text()
    assert Painter.seen == []


async def test_models_that_make_no_pictures_are_listed_with_those_that_do(painters: Running) -> None:
    _, document = await post(painters, PATH, {"prompt": "a cat", "model": "chat"})

    assert document["error"]["message"] == (
        "model: 'chat' is none that makes pictures (allowed: able, plain, large, brush)"
    )


async def test_stage_that_draws_nothing_has_failed(painters: Running) -> None:
    status, document = await post(painters, PATH, {"prompt": "nothing"})

    assert (status, document["error"]["type"]) == (500, "InternalServerError")


async def test_answer_has_a_limit() -> None:
    async with running(TOML.replace("[gateways.openai]", "[gateways.openai]\nmax_answer_bytes = 1024")) as deployment:
        status, document = await post(deployment, PATH, {"prompt": "a cat", "n": 10, "size": "512x512"})

    assert (status, document["error"]["param"]) == (400, "stream")


async def test_client_that_leaves_ends_its_requests(painters: Running) -> None:
    before = Painter.num_left
    async with aiohttp.ClientSession(painters.url) as session:
        for stream in (False, True):
            began = len(Painter.seen)
            body = {"prompt": "for ever", "n": 2, "stream": stream}
            leaver = asyncio.create_task(session.post(PATH, json=body).__aenter__())
            while len(Painter.seen) < began + 2:
                assert not leaver.done()
                await session.get("/version")
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
        # Whoever comes next is served, when the others are gone.
        while Painter.num_left < before + 4:
            await generate(painters)
