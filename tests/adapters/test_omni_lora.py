"""LoRA adapters on a thinker: what is said, and what the talker is sent, against PEFT's own model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

sys.path.insert(0, str(Path(__file__).parent))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from staged import Answer, messages_of  # type: ignore[import-not-found] (put on the path above)

from adapters.omni.thinker import OmniThinker
from omni_bus.errors import BadInput
from omni_bus.testing import StepDriver, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_bus.testing import Collected

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # PEFT 0.21 itself asks transformers 5.24 so when it wraps a model, which only the reference here does.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

NUM_TOKENS = 8
PIRATE, NONE = "pirate", None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_omni.qwen2_5(tmp_path_factory.mktemp("qwen2_5"))


def base_model(folder: str) -> Any:
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    thinker: Any = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    mapping = {r"^thinker\.": ""}
    return thinker.from_pretrained(folder, config=config.thinker_config, key_mapping=mapping, dtype=torch.float32)


@pytest.fixture(scope="module")
def lora(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    saved = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    targets = r"model\.(language_model|visual|audio_tower)\..*\.(q|q_proj|v_proj|down_proj)"
    config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    get_peft_model(base_model(folder), config).save_pretrained(str(saved))
    return str(saved)


@pytest.fixture(scope="module")
def thinker(folder: str, lora: str) -> Iterator[StepDriver]:
    engine = make_engine(OmniThinker, {"model": folder, "lora": {PIRATE: lora}, "context_length": 256})
    yield StepDriver(engine)
    engine.close()


def ask(driver: StepDriver, *names: str | None) -> list[Collected]:
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "token_ids": True}
    inputs = messages_of(("Tell me a story about a dragon. " * 4,))
    outputs = ["text", "hidden", "prompt_tokens"]
    return driver.run(*[driver.add(inputs, params | {"lora": name}, outputs=outputs) for name in names])


def asked(driver: StepDriver, name: str | None, *question: Any) -> Collected:
    params = {"temperature": 0.0, "max_tokens": 2, "token_ids": True, "lora": name}
    [found] = driver.run(driver.add(messages_of(question), params, outputs=["text", "hidden"]))
    assert found.error is None
    return found


def said(found: Collected) -> list[int]:
    return [token.id for piece in found.port("text") for token in piece.tokens]


@pytest.mark.parametrize("name", [NONE, PIRATE])
def test_thinker_says_and_sends_what_the_adapted_model_does(
    folder: str, lora: str, thinker: StepDriver, name: str | None
) -> None:
    model = base_model(folder)
    model = model if name is None else PeftModel.from_pretrained(model, lora)
    [found] = ask(thinker, name)
    sent = Answer(found, found)
    prompt = sent.prompt_tokens[:1].long()

    settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    with torch.inference_mode():
        whole = model.eval().generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
        states = model(input_ids=whole[:, :-1], output_hidden_states=True).hidden_states

    assert said(found) == whole[0, prompt.shape[1] :].tolist()
    assert (sent.thinker_rows - states[-1][0] - states[0][0]).abs().max() < 1e-4


def test_adapters_share_batches_but_no_prefixes(thinker: StepDriver) -> None:
    [plain], [adapted] = ask(thinker, NONE), ask(thinker, PIRATE)

    assert said(plain) != said(adapted)
    assert [said(found) for found in ask(thinker, PIRATE, NONE, PIRATE)] == [said(adapted), said(plain), said(adapted)]


@pytest.mark.parametrize("kind", ["images", "audio"])
def test_eyes_and_ears_are_adapted_for_whom_they_work_whoever_came_before(thinker: StepDriver, kind: str) -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (112, 112, 3), np.uint8)
    sound = rng.uniform(-0.5, 0.5, 16_000).astype(np.float32)
    question = (picture if kind == "images" else sound, "What is it?")

    def rows(name: str | None, before: str | None) -> torch.Tensor:
        asked(thinker, before, "Hello")
        found = asked(thinker, name, *question)
        return Answer(found, found).thinker_rows

    plain, adapted = rows(NONE, NONE), rows(PIRATE, PIRATE)
    assert torch.equal(rows(NONE, PIRATE), plain)
    assert torch.equal(rows(PIRATE, NONE), adapted)
    assert not torch.equal(plain, adapted)


def test_unknown_adapter_is_refused_by_name(thinker: StepDriver) -> None:
    with pytest.raises(BadInput, match=r"lora: 'formal' is unknown \(allowed: pirate\)"):
        ask(thinker, "formal")
