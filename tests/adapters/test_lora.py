"""LoRA adapters by request, against PEFT's own `generate` on the same files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)

from adapters.transformers_text import TransformersText
from omni_bus.errors import BadInput, ConfigError, StartFailed
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # PEFT 0.21 itself asks transformers 5.24 so when it wraps a model, which only the reference here does.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

NAMES = (None, "formal", "v1.2/brief")
"""The second has what would part a module's name."""
PROMPT = list(range(20, 60))


def base_model(folder: str) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = tiny.byte_tokenizer(("<pad>", "</s>"), "</s>")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    tiny.enliven(transformers.LlamaForCausalLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def adapters(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders: dict[str, str] = {}
    kinds = {"formal": (4, ["q_proj", "v_proj"]), "v1.2/brief": (8, ["q_proj", "o_proj", "up_proj", "down_proj"])}
    for seed, (name, (rank, targets)) in enumerate(kinds.items()):
        folder = tmp_path_factory.mktemp("lora")
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=16, target_modules=targets, init_lora_weights=False)
        get_peft_model(base_model(model), config).save_pretrained(str(folder))
        folders[name] = str(folder)
    return folders


@pytest.fixture(scope="module")
def engine(model: str, adapters: dict[str, str]) -> Iterator[TransformersText]:
    engine = make_engine(TransformersText, {"model": model, "lora": adapters})
    yield engine
    engine.close()


def inputs(ids: list[int]) -> dict[str, list[Any]]:
    return {"prompt": [Json({"token_ids": ids})]}


def params(name: str | None, **more: Any) -> dict[str, Any]:
    return {"lora": name, "temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | more


def text_of(engine: TransformersText, *names: str | None, ids: list[int] = PROMPT, **more: Any) -> list[str]:
    driver = StepDriver(engine)
    done = driver.run(*[driver.add(inputs(ids), params(name, **more)) for name in names])
    assert [each.error for each in done] == [None] * len(names)
    return [each.text for each in done]


def whole(model: str, folder: str | None) -> str:
    """What PEFT's model says."""
    found: Any = base_model(model)
    if folder is not None:
        found = PeftModel.from_pretrained(found, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([PROMPT])
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    said = found.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    return tokenizer.decode(said[0, len(PROMPT) :], skip_special_tokens=True)


def test_each_request_is_answered_by_its_adapter(
    model: str, adapters: dict[str, str], engine: TransformersText
) -> None:
    expected = [whole(model, adapters.get(name or "")) for name in NAMES]

    assert len(set(expected)) == 3
    assert [text_of(engine, name)[0] for name in NAMES] == expected


def test_batch_of_all_adapters_says_what_each_says_alone(engine: TransformersText) -> None:
    alone = {name: text_of(engine, name)[0] for name in NAMES}
    order = [*NAMES, *reversed(NAMES), None, "formal"]

    assert text_of(engine, *order) == [alone[name] for name in order]


def test_seeded_answer_is_the_same_in_any_company(engine: TransformersText) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    alone = [text_of(engine, name, **settings)[0] for name in NAMES]

    assert text_of(engine, *NAMES, *NAMES, **settings) == alone * 2


def test_base_model_is_itself_beside_adapters(model: str, engine: TransformersText) -> None:
    text_of(engine, "formal")
    plain = make_engine(TransformersText, {"model": model})

    assert text_of(engine, None) == text_of(plain, None)
    plain.close()


def test_loaded_again_after_sleep_it_still_has_them(model: str, adapters: dict[str, str]) -> None:
    engine = make_engine(TransformersText, {"model": model, "lora": adapters})
    before = text_of(engine, "formal")
    engine.sleep(2)
    engine.wake(lambda phase, fraction: None)

    assert text_of(engine, "formal") == before
    engine.close()


@pytest.mark.parametrize("name", ["unknown", "", "../formal"])
def test_unknown_adapter_is_refused_by_name(engine: TransformersText, name: str) -> None:
    with pytest.raises(BadInput) as caught:
        text_of(engine, name)

    assert caught.value.message == f"lora: '{name}' is unknown (allowed: formal, v1.2/brief)"
    assert caught.value.field == "lora"


def test_stage_without_adapters_refuses_all(model: str) -> None:
    engine = make_engine(TransformersText, {"model": model})
    with pytest.raises(BadInput, match=r"lora: 'formal' is unknown \(allowed: none\)"):
        text_of(engine, "formal")
    engine.close()


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_folder_that_is_no_adapters_is_refused_before_loading(
    model: str, adapters: dict[str, str], tmp_path: Path, file: str
) -> None:
    folder = shutil.copytree(adapters["formal"], tmp_path / "lora")
    (folder / file).unlink()
    with pytest.raises(ConfigError, match=f"lora: 'x' is not the folder of an adapter: .* has no {file}"):
        make_engine(TransformersText, {"model": model, "lora": {"x": str(folder)}})


def changed(folder: Path, change: str) -> None:
    """Break an adapter's files."""
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, settings = load_file(weights), json.loads(config.read_text())
    first = next(iter(tensors))
    if change == "lacks a weight":
        del tensors[first]
    elif change == "has one too many":
        tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = tensors[first].clone()
    elif change == "has another shape":
        tensors[first] = torch.zeros(4, 99)
    elif change == "is of another kind":
        settings["peft_type"] = "IA3"
    save_file(tensors, weights)
    config.write_text(json.dumps(settings))
    if change == "is cut":
        weights.write_bytes(weights.read_bytes()[:100])


@pytest.mark.parametrize(
    "change", ["lacks a weight", "has one too many", "has another shape", "is of another kind", "is cut"]
)
def test_adapter_that_does_not_fit_whole_is_refused(
    model: str, adapters: dict[str, str], tmp_path: Path, change: str
) -> None:
    folder = shutil.copytree(adapters["formal"], tmp_path / "lora")
    changed(folder, change)
    with pytest.raises(StartFailed, match=r"^lora: .* LoRA adapter 'x'") as caught:
        make_engine(TransformersText, {"model": model, "lora": {"x": str(folder)}})

    assert caught.value.field == "lora"
