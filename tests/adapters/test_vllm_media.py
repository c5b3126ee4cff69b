"""Pictures through vLLM, on a real vision model that is small enough to start in seconds; and its sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image as Pil
from PIL import ImageDraw

from adapters import shipped, vllm_options
from adapters.vllm_text import VllmText
from omni_bus.errors import BadInput
from omni_bus.testing import Collected, StepDriver, make_engine
from omni_bus.wire.payloads import Audio, Blob, Image, Json

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.model,
    pytest.mark.timeout(300),
    # torch's own, at the import of its compiler and where vLLM looks its modules through; vLLM's call of xgrammar.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
    pytest.mark.skipif(vllm_options.installed_version() is None, reason="vLLM is missing"),
]

FOLDER = shipped.FOLDER / "emoji-vlm"
OPTIONS = {
    "model": str(FOLDER),
    "max_num_seqs": 2,
    "context_length": 256,
    "kv_cache_gib": 0.0625,
    "engine": {"model_impl": "transformers"},
}
DESCRIBE = "describe the picture"
COLOURS = {"red": (220, 38, 38), "blue": (37, 99, 235), "green": (22, 163, 74)}


def drawn(*colours: str) -> Image:
    """Draw a disc, or one on the left and one on the right."""
    picture = Pil.new("RGB", (64, 64), "white")
    size = 48 if len(colours) == 1 else 28
    for colour, middle in zip(colours, (32,) if len(colours) == 1 else (16, 48), strict=True):
        box = (middle - size // 2, 32 - size // 2, middle + size // 2, 32 + size // 2)
        ImageDraw.Draw(picture).ellipse(box, fill=COLOURS[colour])
    return Image(64, 64, 3, Blob(np.asarray(picture).tobytes()))


def asking(question: str, *pictures: Image) -> dict[str, list[Any]]:
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": question}]
    return {"prompt": [Json({"messages": [{"role": "user", "content": parts}]})], "images": list(pictures)}


def answer(engine: VllmText, inputs: dict[str, list[Any]], *outputs: str) -> Collected:
    driver = StepDriver(engine)
    params = {"temperature": 0.0, "max_tokens": 16}
    [collected] = driver.run(driver.add(inputs, params, outputs=outputs or ("text",)))
    if collected.error is not None:
        raise collected.error
    return collected


def test_engine_that_slept_answers_as_before_and_counts_anew() -> None:
    engine = make_engine(VllmText, OPTIONS)
    try:
        before = answer(engine, asking(DESCRIBE, drawn("red")))
        with pytest.raises(BadInput, match=r"level: 1 came \(allowed: 2; vLLM has no sleep mode on a CPU\)"):
            engine.sleep(1)
        counted = {metric.name: metric for metric in engine.metrics()}
        [tokens] = counted["vllm:generation_tokens"].samples
        assert tokens.value > before.finish.usage.completion_tokens, "the warm-up is counted too"
        assert [sample.value for sample in counted["vllm:num_requests_running"].samples] == [0.0]

        engine.sleep(2)
        assert engine.metrics() == ()
        engine.wake(lambda phase, fraction: None)

        assert answer(engine, asking(DESCRIBE, drawn("red"))).text == before.text
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmText]:
    engine = make_engine(VllmText, OPTIONS)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("colours", "question", "text"),
    [
        (("red", "blue"), DESCRIBE, "a red circle and a blue circle"),
        (("red", "blue"), "what is on the left", "red circle"),
        (("green", "red"), "what is on the left", "green circle"),
        (("green",), DESCRIBE, "a green circle"),
    ],
)
def test_answer_is_about_the_picture(engine: VllmText, colours: tuple[str, ...], question: str, text: str) -> None:
    assert answer(engine, asking(question, drawn(*colours))).text.strip() == text


def test_requests_with_pictures_do_not_mix(engine: VllmText) -> None:
    driver = StepDriver(engine)
    params = {"temperature": 0.0, "max_tokens": 16}
    requests = [driver.add(asking(DESCRIBE, drawn(colour)), params, outputs=["text"]) for colour in ("red", "blue")]

    assert [found.text.strip() for found in driver.run(*requests)] == ["a red circle", "a blue circle"]


def test_picture_is_many_tokens_of_the_prompt(engine: VllmText) -> None:
    found = answer(engine, asking(DESCRIBE, drawn("red")), "text", "rendered")

    assert found.finish.usage.prompt_tokens > 64


def test_sound_is_refused_by_a_model_that_only_sees(engine: VllmText) -> None:
    parts = [{"type": "audio"}, {"type": "text", "text": "what is this"}]
    prompt = Json({"messages": [{"role": "user", "content": parts}]})
    sound = Audio(16000, 1, "s16", Blob(bytes(3200)))

    with pytest.raises(BadInput, match=r"audio: the model reads no audio \(allowed: images\)"):
        answer(engine, {"prompt": [prompt], "audio": [sound]})
