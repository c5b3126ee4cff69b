"""``POST /v1/images/edits`` against a running deployment: forms with pictures by file, text and address."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from PIL import Image as Pil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

from painter import TOML, Painter  # type: ignore[import-not-found] (put on the path above)
from samples import png  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/v1/images/edits"
RED, BLUE = (255, 0, 0), (0, 0, 255)

Part = tuple[str, str | bytes]


@pytest.fixture
async def painters() -> AsyncIterator[Running]:
    Painter.seen.clear()
    async with running(TOML) as deployment:
        yield deployment


def drawn(colour: Any, size: tuple[int, int] = (24, 8), mode: str = "RGB", fmt: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    Pil.new(mode, size, colour).save(file, fmt, **more)
    return file.getvalue()


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


async def edit(deployment: Running, *parts: Part, prompt: str | None = "make it blue") -> tuple[int, Any]:
    """Send a form of fields (text) and files (bytes); return what came."""
    form = aiohttp.FormData(default_to_multipart=True)
    if prompt is not None:
        form.add_field("prompt", prompt)
    for name, value in parts:
        form.add_field(name, value, filename="p.png" if isinstance(value, bytes) else None)
    async with aiohttp.ClientSession(deployment.url) as session, session.post(PATH, data=form) as response:
        body = await response.read()
        return response.status, json.loads(body) if response.content_type == "application/json" else body


def colours(index: int = -1) -> list[tuple[int, ...]]:
    """The first pixel of each picture that a request had."""
    return [tuple(image.data.view[:3]) for image in Painter.seen[index][2]]


async def test_pictures_come_in_their_order_however_they_are_sent(painters: Running) -> None:
    status, document = await edit(
        painters, ("image", drawn(RED)), ("image[]", drawn(BLUE)), ("url", data_url(drawn((0, 255, 0)))), ("seed", "4")
    )

    assert status == 200, document
    assert colours() == [RED, BLUE, (0, 255, 0)]
    image = Painter.seen[-1][2][0]
    assert (image.width, image.height, image.channels) == (24, 8, 3)
    assert document["usage"]["input_tokens_details"] == {"text_tokens": 3, "image_tokens": 3}


async def test_fields_of_a_form_are_those_of_json(painters: Running) -> None:
    status, document = await edit(
        painters,
        ("image", drawn(RED)),
        ("n", "2"),
        ("seed", "-3"),
        ("guidance_scale", "2.5"),
        ("strength", "1"),
        ("size", "64x32"),
        ("output_format", "webp"),
        ("lora", '{"name": "ink"}'),
        ("extra_params", '{"eta": 0.5}'),
        ("return_stage_metrics", "True"),
        ("negative_prompt", "7"),
        ("user", ""),
    )

    assert status == 200, document
    params = Painter.seen[-1][1]
    assert len(document["data"]) == 2
    assert {seen[1].seed for seen in Painter.seen} == {2**63 - 3, 2**63 - 2}
    assert (params.guidance_scale, params.strength, params.negative_prompt) == (2.5, 1, "7")
    assert (params.width, params.lora, params.extra) == (64, {"name": "ink"}, {"eta": 0.5})
    assert document["metrics"]["stage_durations"]


async def test_size_auto_leaves_it_to_the_model(painters: Running) -> None:
    for parts in ([("size", "auto")], []):
        status, _ = await edit(painters, ("image", drawn(RED)), *parts)
        assert (status, Painter.seen[-1][1].width) == (200, None)


@pytest.mark.parametrize("field", ["mask", "mask_image"])
async def test_mask_keeps_its_transparency(painters: Running, field: str) -> None:
    clear = drawn((0, 0, 0, 0), mode="RGBA")
    for source in (clear, data_url(clear)):
        status, document = await edit(painters, ("image", drawn(RED)), (field, source))
        assert status == 200, document
        (mask,) = Painter.seen[-1][3]
        assert (mask.channels, bytes(mask.data.view[:4])) == (4, b"\0\0\0\0")


async def test_stream_is_of_edits(painters: Running) -> None:
    _, body = await edit(painters, ("image", drawn(RED)), ("stream", "true"), ("partial_images", "1"))

    events = body.decode().removesuffix("\n\n").split("\n\n")
    names = [event.partition("\n")[0] for event in events]
    assert names == ["event: image_edit.partial_image", "event: image_edit.completed", "data: [DONE]"]
    assert json.loads(events[1].partition("data: ")[2])["usage"]["input_tokens_details"]["image_tokens"] == 1


async def test_cmyk_and_animated_pictures_are_read(painters: Running) -> None:
    file = io.BytesIO()
    frames = [Pil.new("RGB", (24, 8), colour) for colour in (RED, BLUE)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    gif = file.getvalue()
    status, document = await edit(
        painters, ("image", drawn((0, 255, 255, 0), mode="CMYK", fmt="JPEG", quality=95)), ("image", gif)
    )

    assert status == 200, document
    cmyk, first = colours()
    assert cmyk[0] > 200
    assert max(cmyk[1:]) < 60
    assert first == RED


GOOD: Part = ("image", drawn(RED))
HUGE = png(100_000, 100_000, num_rows=1)
BAD: list[tuple[list[Part], int, str]] = [
    ([], 422, "image"),
    ([("image", drawn(RED)[:60])], 400, "image"),
    ([("image", b"")], 400, "image"),
    ([("image", b"hello, world")], 400, "image"),
    ([("image", HUGE)], 413, "image"),
    ([GOOD, ("image", drawn(RED)[:60])], 400, "image[1]"),
    ([("image", "not base64!")], 400, "image"),
    ([("url", "ftp://example.com/a.png")], 400, "url"),
    ([("url", "http://127.0.0.1/a.png")], 400, "url"),
    ([("url[]", "file:///etc/passwd")], 400, "url"),
    ([GOOD] * 17, 400, "image"),
    ([GOOD, ("mask", drawn(RED)[:60])], 400, "mask"),
    ([GOOD, ("mask", drawn(RED)), ("mask_image", drawn(RED))], 400, "mask_image"),
    ([GOOD, ("n", "0")], 400, "n"),
    ([GOOD, ("n", "10000")], 400, "n"),
    ([GOOD, ("n", "two")], 400, "n"),
    ([GOOD, ("n", "1"), ("n", "1")], 400, "n"),
    ([GOOD, ("size", "1x1")], 400, "size"),
    ([GOOD, ("size", "33x32")], 400, "size"),
    ([GOOD, ("size", "100000x100000")], 400, "size"),
    ([GOOD, ("num_inference_steps", "0")], 400, "num_inference_steps"),
    ([GOOD, ("num_inference_steps", "-1")], 400, "num_inference_steps"),
    ([GOOD, ("guidance_scale", "NaN")], 400, "guidance_scale"),
    ([GOOD, ("guidance_scale", "Infinity")], 400, "guidance_scale"),
    ([GOOD, ("guidance_scale", "1e999")], 400, "guidance_scale"),
    ([GOOD, ("seed", str(2**64))], 400, "seed"),
    ([GOOD, ("seed", "9" * 400)], 400, "seed"),
    ([GOOD, ("lora", "ink")], 400, "lora"),
    ([GOOD, ("lora", '{"name": "oil"}')], 400, "lora"),
    ([GOOD, ("input_fidelity", "high")], 400, "input_fidelity"),
    ([GOOD, ("resolution", "640")], 400, "resolution"),
    ([GOOD, ("stream", "maybe")], 400, "stream"),
    ([GOOD, ("reference_image", drawn(RED))], 400, "reference_image"),
    ([GOOD, ("imagee", drawn(RED))], 400, "imagee"),
    ([GOOD, ("prompt", "again")], 400, "prompt"),
    ([GOOD, ("prompt", drawn(RED))], 400, "prompt"),
    ([GOOD, ("model", "plain")], 400, "model"),
    ([GOOD, ("model", "nope")], 400, "model"),
]


async def test_bad_forms_are_refused_by_name(painters: Running) -> None:
    for parts, status, param in BAD:
        found, document = await edit(painters, *parts)

        error = document["error"]
        assert (found, error["param"]) == (status, param), (parts[1:], document)
        assert error["message"].startswith(param), document


async def test_form_without_a_prompt_is_refused(painters: Running) -> None:
    for prompt in (None, "", " "):
        status, document = await edit(painters, GOOD, prompt=prompt)
        assert (status, document["error"]["param"]) == (400, "prompt")


async def test_json_is_no_form(painters: Running) -> None:
    async with aiohttp.ClientSession(painters.url) as session, session.post(PATH, json={"prompt": "x"}) as response:
        assert response.status == 415


async def test_pictures_together_have_a_limit() -> None:
    toml = TOML.replace("[gateways.openai]", "[gateways.openai]\nmax_decoded_bytes = 1000")
    async with running(toml) as deployment:
        one, _ = await edit(deployment, GOOD)
        status, document = await edit(deployment, GOOD, GOOD)

    assert (one, status, document["error"]["param"]) == (200, 413, "image[1]")
