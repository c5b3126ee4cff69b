from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Pil
from PIL import ImageDraw

from adapters import shipped
from adapters.transformers_image_text import TransformersImageText
from omni_bus.errors import BadInput, StageFailed, StartFailed
from omni_bus.testing import make_engine, run_streaming, start_streaming
from omni_bus.wire.payloads import Blob, Image, Json, Video

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_bus.testing import Collected
    from omni_bus.wire.payloads import Payload

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

FOLDER = shipped.FOLDER / "emoji-vlm"
SIDE = 64
COLOURS = {"red": (220, 38, 38), "blue": (37, 99, 235), "green": (22, 163, 74)}
DESCRIBE, LEFT, RIGHT = "describe the picture", "what is on the left", "what is on the right"


def drawn(*things: str) -> Any:
    """Draw one thing, or one on the left and one on the right: ``red circle``."""
    picture = Pil.new("RGB", (SIDE, SIDE), "white")
    size = 48 if len(things) == 1 else 28
    for thing, middle in zip(things, (32,) if len(things) == 1 else (16, 48), strict=True):
        colour, kind = thing.split()
        # Drawn large and made small, for soft edges.
        layer = Pil.new("RGBA", (256, 256))
        draw = ImageDraw.Draw(layer)
        if kind == "circle":
            draw.ellipse((6, 6, 250, 250), fill=COLOURS[colour])
        else:
            draw.rectangle((20, 20, 236, 236), fill=COLOURS[colour])
        layer = layer.resize((size, size), Pil.Resampling.LANCZOS)
        picture.paste(layer, (middle - size // 2, (SIDE - size) // 2), layer)
    return picture


def payload_of(picture: Any) -> Image:
    pixels = np.asarray(picture)
    pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
    height, width, channels = pixels.shape
    return Image(height, width, channels, Blob(pixels.tobytes()))


PAIR = drawn("red circle", "blue square")


def asking(question: str, *pictures: Image, **media: list[Payload]) -> dict[str, list[Payload]]:
    parts = [{"type": "image"} for _ in pictures] + [{"type": "video"} for _ in media.get("video", ())]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    return {"prompt": [Json({"messages": messages})], "images": list(pictures), **media}


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersImageText]:
    engine = make_engine(TransformersImageText, {"model": str(FOLDER)})
    yield engine
    engine.close()


async def ask(
    engine: TransformersImageText,
    inputs: dict[str, list[Payload]],
    params: dict[str, Any] | None = None,
    outputs: Sequence[str] = ("text",),
) -> Collected:
    return await run_streaming(
        engine, inputs, {"temperature": 0.0, "max_tokens": 16, **(params or {})}, outputs=outputs
    )


# --- answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("things", "question", "answer"),
    [
        (("red circle", "blue square"), DESCRIBE, "a red circle and a blue square"),
        (("red circle", "blue square"), LEFT, "red circle"),
        (("red circle", "blue square"), RIGHT, "blue square"),
        (("blue square", "red circle"), LEFT, "blue square"),
        (("green circle",), DESCRIBE, "a green circle"),
    ],
)
async def test_answer_is_about_the_picture(
    engine: TransformersImageText, things: tuple[str, ...], question: str, answer: str
) -> None:
    result = await ask(engine, asking(question, payload_of(drawn(*things))))

    assert result.text == answer
    assert result.finish.reason == "stop"
    assert [payload.num_tokens for payload in result.port("text")] == [1] * len(answer.split())


async def test_answer_equals_generate(engine: TransformersImageText) -> None:
    processor = transformers.AutoProcessor.from_pretrained(FOLDER)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32)
    inputs = processor(images=[PAIR], text=[f"<image> <bos> {DESCRIBE} <ans>"], return_tensors="pt")
    found = model.generate(
        **inputs, do_sample=False, max_new_tokens=9, output_logits=True, return_dict_in_generate=True
    )
    expected = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    result = await ask(engine, asking(DESCRIBE, payload_of(PAIR)), {"logprobs": 1})

    tokens = [token for payload in result.port("text") for token in payload.tokens]
    assert [token.id for token in tokens] == expected
    for token, row in zip(tokens, torch.cat(found.logits).log_softmax(-1), strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
    assert result.finish.usage.prompt_tokens == inputs["input_ids"].shape[1]


async def test_requests_at_once_answer_about_their_own_picture(engine: TransformersImageText) -> None:
    pairs = [("red circle", "blue square"), ("blue square", "red circle")] * 3
    results = await asyncio.gather(*(ask(engine, asking(LEFT, payload_of(drawn(*pair)))) for pair in pairs))

    assert [result.text for result in results] == [left for left, _ in pairs]
    assert engine.num_active == 0


async def test_prompt_may_be_text_with_the_models_own_marks(engine: TransformersImageText) -> None:
    prompt: list[Payload] = [Json({"text": f"<image> <bos> {LEFT} <ans>", "add_special_tokens": False})]

    assert (await ask(engine, {"prompt": prompt, "images": [payload_of(PAIR)]})).text == "red circle"


async def test_seed_repeats(engine: TransformersImageText) -> None:
    params = {"temperature": 2.0, "seed": 3, "ignore_eos": True}
    first, second, other = [
        (await ask(engine, asking(DESCRIBE, payload_of(PAIR)), params | changed)).text
        for changed in ({}, {}, {"seed": 4})
    ]

    assert first == second != other


async def test_parameters_mean_the_same_as_for_text_models(engine: TransformersImageText) -> None:
    inputs = asking(DESCRIBE, payload_of(PAIR))
    stopped = await ask(engine, inputs, {"stop": [" and"]})
    short = await ask(engine, inputs, {"max_tokens": 2})

    assert (stopped.text, stopped.finish.detail) == ("a red circle", {"stop_reason": " and"})
    assert (short.text, short.finish.reason) == ("a red", "length")


async def test_prompt_is_rendered_with_its_pictures(engine: TransformersImageText) -> None:
    result = await ask(engine, asking(LEFT, payload_of(PAIR)), {"prompt_logprobs": 1}, ["rendered"])

    [rendered] = result.port("rendered")
    assert rendered.value["token_strings"].count("<image>") == 64
    assert len(rendered.value["logprobs"]) == len(rendered.value["token_ids"]) == result.finish.usage.prompt_tokens
    assert result.finish.usage.completion_tokens == 0


# --- pictures -----------------------------------------------------------------------------------------------


async def test_transparent_is_white_and_grey_is_read(engine: TransformersImageText) -> None:
    layer = PAIR.convert("RGBA")
    pixels = np.asarray(layer).copy()
    pixels[(pixels[:, :, :3] == 255).all(axis=2)] = (0, 0, 0, 0)
    transparent = await ask(engine, asking(LEFT, payload_of(Pil.fromarray(pixels))))
    grey = await ask(engine, asking(LEFT, payload_of(PAIR.convert("L"))))

    assert transparent.text == "red circle"
    assert grey.text.endswith("circle")


async def test_larger_picture_is_made_smaller(engine: TransformersImageText) -> None:
    large = PAIR.resize((SIDE * 3, SIDE * 3), Pil.Resampling.BICUBIC)

    assert (await ask(engine, asking(RIGHT, payload_of(large)))).text == "blue square"


async def test_clip_is_seen_as_some_of_its_frames(engine: TransformersImageText) -> None:
    frame = np.asarray(PAIR).tobytes()
    one = Video(0, 1, SIDE, SIDE, 1, 25, Blob(frame))
    many = Video(0, 5, SIDE, SIDE, 1, 25, Blob(frame * 5))
    limited = make_engine(TransformersImageText, {"model": str(FOLDER), "max_video_frames": 2, "max_num_seqs": 1})
    answers = await ask(engine, asking(LEFT, video=[one]))
    rendered = await ask(limited, asking(LEFT, video=[many]), None, ["rendered"])
    limited.close()

    assert answers.text == "red circle"
    assert rendered.port("rendered")[0].value["token_strings"].count("<image>") == 2 * 64


# --- cancels and refusals -----------------------------------------------------------------------------------


async def test_cancel_ends_the_generation(engine: TransformersImageText) -> None:
    """What is drawn after the close would be counted by the answer; the thread is free when the close returns."""
    stream = start_streaming(
        engine, asking(DESCRIBE, payload_of(PAIR)), {"temperature": 0.0, "ignore_eos": True}, outputs=["text"]
    )
    assert await stream.pull() is not None
    assert engine.num_active == 1

    await stream.close()

    assert engine.num_active == 0
    assert (await ask(engine, asking(LEFT, payload_of(PAIR)))).text == "red circle"


async def test_slow_reader_suspends_the_generation(
    engine: TransformersImageText, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    from adapters.answer import Answer

    advance = Answer.advance

    def count(answer: Answer, *args: Any) -> Any:
        chosen.append(1)
        return advance(answer, *args)

    monkeypatch.setattr(Answer, "advance", count)
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}
    async with start_streaming(engine, asking(DESCRIBE, payload_of(PAIR)), params, outputs=["text"]) as stream:
        await stream.pull()
        # A second request runs to its end meanwhile: whoever isn't held back would be done by then.
        await ask(engine, asking(DESCRIBE, payload_of(PAIR)), {"ignore_eos": True, "max_tokens": 60})
        assert len(chosen) < 60 + 30


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({"prompt": []}, "prompt"),
        (asking(LEFT), "never"),
        (asking(LEFT, payload_of(PAIR)) | {"images": []}, "images"),
        (asking(LEFT) | {"images": [payload_of(PAIR)]}, "images"),
        (asking(LEFT, video=[Video(0, 0, 8, 8, 1, 25, Blob(b""))]), "video"),
        ({"prompt": [Json({"token_ids": [3]})], "images": [payload_of(PAIR)]}, "images"),
        ({"prompt": [Json({"text": "<image> <image> <bos> a"})], "images": [payload_of(PAIR)]}, "images"),
    ],
)
async def test_media_that_do_not_fit_the_prompt_are_refused(
    engine: TransformersImageText, inputs: dict[str, list[Payload]], field: str
) -> None:
    expectation: Any = contextlib.nullcontext() if field == "never" else pytest.raises(BadInput, match=f"^{field}: ")
    with expectation:
        await ask(engine, inputs)

    assert engine.num_active == 0


async def test_audio_part_is_refused(engine: TransformersImageText) -> None:
    messages = [{"role": "user", "content": [{"type": "audio"}]}]
    with pytest.raises(BadInput, match="'audio' came"):
        await ask(engine, {"prompt": [Json({"messages": messages})]})


async def test_prompt_beyond_the_context_is_refused(engine: TransformersImageText) -> None:
    with pytest.raises(BadInput, match=r"^messages: \d+ tokens leave no room .* context length is 256"):
        await ask(engine, asking("a " * 200, payload_of(PAIR)))


async def test_failing_model_fails_its_request_only(
    engine: TransformersImageText, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.CLIPVisionModel, "forward", fail)
        with pytest.raises(StageFailed, match="out of memory"):
            await ask(engine, asking(LEFT, payload_of(PAIR)))

    assert (await ask(engine, asking(LEFT, payload_of(PAIR)))).text == "red circle"


def test_model_that_reads_no_pictures_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())

    with pytest.raises(StartFailed, match=r"^model: .* can't be"):
        make_engine(TransformersImageText, {"model": str(tmp_path)})
