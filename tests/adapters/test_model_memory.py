"""Memory that is foretold from files, against what loaded models take."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)

from adapters import smollm2
from adapters.model_memory import Files, missing_files
from adapters.transformers_codec import CodecOptions, TransformersCodec
from adapters.transformers_model import ModelOptions
from adapters.transformers_speech import SpeechOptions, TransformersSpeech
from adapters.transformers_text import TransformersText, TransformersTextOptions
from omni_bus.testing import make_engine

pytestmark = pytest.mark.model


def bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=272,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny.byte_tokenizer(("<pad>", "</s>"), "</s>").save_pretrained(folder)
    return str(folder)


def test_text_engine_takes_what_was_foretold(llama: str) -> None:
    options = TransformersTextOptions(model=llama, max_resident=8)
    foretold = TransformersText.memory(options, has_accelerator=False)
    engine = make_engine(TransformersText, {"model": llama, "max_resident": 8})

    assert foretold is not None
    assert foretold.weights == bytes_of(engine._forward._model)
    assert foretold.cache == engine._pool.size_bytes
    engine.close()


@pytest.mark.parametrize(
    ("dtype", "has_accelerator", "number"),
    [("auto", False, 4), ("auto", True, 2), ("bfloat16", False, 2), ("float32", True, 4)],
)
def test_numbers_are_those_that_it_will_compute_with(
    llama: str, dtype: Any, *, has_accelerator: bool, number: int
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    files = Files(ModelOptions(model=llama, dtype=dtype), has_accelerator=has_accelerator)

    assert files.weights() == number * sum(weight.numel() for weight in model.parameters())
    assert files.cache(10) == 2 * 3 * 2 * 16 * 10 * number


def test_codec_is_a_part_of_its_models_weights(tmp_path: Path) -> None:
    folder = tiny.csm(tmp_path)
    model: Any = transformers.CsmForConditionalGeneration.from_pretrained(folder)
    speech = TransformersSpeech.memory(SpeechOptions(model=folder), has_accelerator=False)
    codec = TransformersCodec.memory(CodecOptions(model=folder), has_accelerator=False)

    assert speech is not None
    assert codec is not None
    assert codec.weights <= speech.weights
    # Buffers of its codebooks are among the weights that are saved.
    assert codec.weights >= bytes_of(model.codec_model)


def test_default_model_is_known_before_it_is_converted(cache: str) -> None:
    whole = Files(ModelOptions(model=smollm2.NAME), has_accelerator=False)
    converted = Files(ModelOptions(model=str(smollm2.folder_for(cache))), has_accelerator=False)

    assert (whole.weights(), whole.cache(7)) == (converted.weights(), converted.cache(7))
    assert whole.activations(5, 2) == converted.activations(5, 2)
    assert whole.context_length(None, 2048) == converted.context_length(None, 2048)


@pytest.mark.parametrize("model", ["someone/never-loaded", "./nothing", "no name at all"])
def test_model_that_is_not_here_is_unknown(model: str) -> None:
    assert Files(ModelOptions(model=model), has_accelerator=False).memory() is None


def in_shards(llama: str, folder: Path) -> list[Path]:
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    model.save_pretrained(folder, max_shard_size="40KB")
    shutil.copy(Path(llama) / "tokenizer.json", folder)
    return sorted(folder.glob("model-*.safetensors"))


def test_shards_count_once_each(llama: str, tmp_path: Path) -> None:
    assert len(in_shards(llama, tmp_path)) > 1

    (tmp_path / "copy.safetensors").write_bytes(b"not one of the model's")
    sharded = Files(ModelOptions(model=str(tmp_path), dtype="float32"), has_accelerator=False)
    single = Files(ModelOptions(model=llama, dtype="float32"), has_accelerator=False)
    assert sharded.weights() == single.weights()


def test_missing_shard_is_refused_before_anything_is_loaded(llama: str, tmp_path: Path) -> None:
    shards = in_shards(llama, tmp_path)
    shards[1].unlink()

    assert missing_files(tmp_path) == [shards[1].name]
    expected = f"lacks 1 files of its weights, {shards[1].name} among them"
    [problem] = TransformersText.check(TransformersTextOptions(model=str(tmp_path)))
    assert problem == f"model: '{tmp_path}' {expected}"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, b"\x08" + b"\0" * 7 + b"{broken}", b"\x0b" + b"\0" * 7 + json.dumps({"a": 1234}).encode()],
)
def test_broken_weights_count_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)

    assert Files(ModelOptions(model=str(tmp_path)), has_accelerator=False).memory() is None


def test_pipelines_parts_are_added_up(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "model_index.json").write_text("{}")
    for part, name in (("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (tmp_path / part).mkdir()
        save_file({"x": torch.zeros(10)}, tmp_path / part / f"{name}.safetensors")
        save_file({"x": torch.zeros(10)}, tmp_path / part / f"{name}.fp16.safetensors")

    assert Files(ModelOptions(model=str(tmp_path)), has_accelerator=False).weights() == 80
