"""``POST /v1/chat/completions`` with models that make pictures."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image as Pil

sys.path.insert(0, str(Path(__file__).parent))

from able import CHAT, post, stream  # type: ignore[import-not-found] (put on the path above)
from painter import TOML, Painter  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "a cat"}]
BODY: dict[str, Any] = {"model": "able", "messages": ASKED}


@pytest.fixture
async def painters() -> AsyncIterator[Running]:
    Painter.seen.clear()
    async with running(TOML) as deployment:
        yield deployment


def url(colour: tuple[int, int, int]) -> str:
    file = io.BytesIO()
    Pil.new("RGB", (8, 8), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def pixel(part: dict[str, Any]) -> Any:
    head, _, data = part["image_url"]["url"].partition(",")
    assert (part["type"], head) == ("image_url", "data:image/png;base64")
    return Pil.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0))


async def test_answer_is_a_list_of_pictures(painters: Running) -> None:
    status, answer = await post(
        painters, CHAT, BODY | {"seed": 3, "num_outputs_per_prompt": 2, "modalities": ["image"]}
    )

    assert status == 200, answer
    (choice,) = answer["choices"]
    assert [pixel(part) for part in choice["message"]["content"]] == [(3, 4, 5), (4, 5, 6)]
    assert (choice["finish_reason"], answer["model"], answer["metrics"]) == ("stop", "able", None)
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


async def test_stream_has_a_chunk_for_each_picture(painters: Running) -> None:
    body = BODY | {"seed": 3, "stream_options": {"include_usage": True}, "return_stage_metrics": True}
    picture, end, usage = await stream(painters, CHAT, body)

    delta = picture["choices"][0]["delta"]
    assert (picture["modality"], delta["role"], pixel(delta["content"][0])) == ("image", "assistant", (3, 4, 5))
    assert (end["choices"][0]["finish_reason"], set(end["metrics"]["stage_durations"])) == ("stop", {"brush"})
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 3)


async def test_prompt_is_what_the_user_says_in_all_turns(painters: Running) -> None:
    messages = [
        {"role": "system", "content": "you paint"},
        {"role": "user", "content": "a cat"},
        {"role": "assistant", "content": "here"},
        {"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "image_url", "image_url": url((9, 8, 7))},
                                     {"type": "text", "text": "red"}]},
    ]  # fmt: skip
    status, answer = await post(painters, CHAT, {"model": "able", "messages": messages})

    assert status == 200, answer
    prompt, _, images, _ = Painter.seen[-1]
    assert prompt == "a cat in red"
    assert [bytes(image.data.view[:3]) for image in images] == [b"\x09\x08\x07"]


@pytest.mark.parametrize("place", ["", "extra_body", "extra_args", "extra_params", "extra_body.extra_args"])
async def test_parameters_may_be_in_each_place(painters: Running, place: str) -> None:
    told: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 2.0, "width": 64, "height": 32, "cfg_scale": 3}
    for name in reversed([name for name in place.split(".") if name]):
        told = {name: told}
    status, answer = await post(painters, CHAT, BODY | told)

    assert status == 200, answer
    params = Painter.seen[-1][1]
    assert (params.num_inference_steps, params.width, params.height) == (3, 64, 32)
    assert params.extra == {"true_cfg_scale": 3, "guidance_scale": 2.0}


async def test_unknown_arguments_go_to_the_model(painters: Running) -> None:
    status, answer = await post(painters, CHAT, BODY | {"extra_args": {"eta": 0.5}})

    assert status == 200, answer
    assert Painter.seen[-1][1].extra == {"eta": 0.5}


SEED, STEPS = {"seed": 1}, {"num_inference_steps": None}
DOUBLED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"seed": 1, "extra_body": SEED}, ("seed", "extra_body.seed")),
    ({"seed": 1, "extra_args": {"seed": 2}}, ("seed", "extra_args.seed")),
    ({"extra_args": SEED, "extra_params": SEED}, ("extra_args.seed", "extra_params.seed")),
    ({"extra_body": {"extra_args": SEED, "extra_params": SEED}}, ("extra_body.extra_args.seed",)),
    ({"extra_body": SEED | {"extra_params": SEED}}, ("extra_body.seed", "extra_body.extra_params.seed")),
    ({**STEPS, "extra_params": STEPS}, ("num_inference_steps", "extra_params.num_inference_steps")),
    ({"cfg_scale": 2, "extra_body": {"true_cfg_scale": 2}}, ("true_cfg_scale", "cfg_scale")),
    ({"cfg_scale": 2, "true_cfg_scale": 2}, ("true_cfg_scale", "cfg_scale")),
    ({"extra_args": {"eta": 1}, "extra_body": {"extra_args": {"eta": 1}}}, ("extra_args.eta",)),
]


async def test_parameters_from_two_places_are_refused_with_both(painters: Running) -> None:
    for body, words in DOUBLED:
        status, document = await post(painters, CHAT, BODY | body)

        error = document["error"]
        assert (status, error["type"], error["param"]) == (400, "BadRequestError", None), (body, document)
        assert all(word in error["message"] for word in words), error["message"]
    assert Painter.seen == []


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": " "}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "a cat"}]}, "messages"),
    (said({"type": "image_url", "image_url": "x!"}, "a"), "messages[0].content[0].image_url"),
    (said({"type": "input_audio", "input_audio": {"data": "UklGRg=="}}, "a"), "messages[0].content[0].type"),
    ({"modalities": ["text"]}, "modalities"),
    ({"n": 2}, "n"),
    ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt"),
    ({"num_outputs_per_prompt": 11}, "num_outputs_per_prompt"),
    ({"width": 64}, "height"),
    ({"width": 0, "height": 64}, "width"),
    ({"width": 33, "height": 64}, "width"),
    ({"size": "64"}, "size"),
    ({"size": "33x64"}, "size"),
    ({"size": "64x64", "width": 64, "height": 64}, "size"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"extra_body": {"num_inference_steps": 0}}, "num_inference_steps"),
    ({"guidance_scale": -1}, "guidance_scale"),
    ({"layers": 11}, "layers"),
    ({"quality": "low"}, "quality"),
    ({"num_frames": 8}, "num_frames"),
    ({"seed": 2**64}, "seed"),
    ({"lora": {"path": "/x"}}, "lora.path"),
    ({"lora": {"name": "oil"}}, "lora"),
    ({"extra_args": 5}, "extra_args"),
    ({"extra_body": []}, "extra_body"),
    ({"extra_body": {"extra_params": 1}}, "extra_body.extra_params"),
    ({"extra_body": {"eta": 1}}, "eta"),
    ({"extra_args": {"steps": 1}}, "extra_args.steps"),
    ({"temperature": 1}, "temperature"),
    ({"tools": []}, "tools"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"model": "plain", "seed": 1}, "seed"),
]  # fmt: skip


async def test_bad_bodies_are_refused_by_name(painters: Running) -> None:
    for body, param in BAD:
        status, document = await post(painters, CHAT, BODY | body)

        assert (status, document["error"]["param"]) == (400, param), (body, document)


async def test_models_that_write_still_do(painters: Running) -> None:
    for body in ({"model": "chat"}, {}):
        status, answer = await post(painters, CHAT, {"messages": ASKED} | body)

        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == "a_cat:0 a_cat:1"
