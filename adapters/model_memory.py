"""What a model of transformers or diffusers will take of memory, read off its files without loading anything.

Weights are counted from the headers of the safetensors files; keys and values follow from the configuration; the rest,
what one step computes in between, is an estimate.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters import smollm2
from omni_bus.engine import Memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from adapters.transformers_model import ModelOptions

INDEX = "model.safetensors.index.json"

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""

_FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Types of safetensors that are converted to the type that is computed with, and their bytes."""

_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


class Files:
    """A model's files, as far as they are here.

    Args:
        options: which model, and what it computes with.
        has_accelerator: whether ``auto`` means an accelerator.
        part: of a model in several: the name that its weights begin with, and that its configuration is under.
    """

    def __init__(self, options: ModelOptions, *, has_accelerator: bool, part: str = "") -> None:
        self._part = part
        self.device = options.device
        self.folder = local_folder(options.model)
        self.is_default = options.model == smollm2.NAME
        self.on_cpu = options.device == "cpu" or (options.device == "auto" and not has_accelerator)
        self._dtype = "float32" if options.dtype == "auto" and self.on_cpu else options.dtype

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, empty if it isn't here."""
        if self.is_default:
            return smollm2.SHAPE
        whole = _read(self.folder / "config.json") if self.folder is not None else {}
        own = whole.get(f"{self._part}_config") if self._part else whole
        return own if isinstance(own, dict) else {}

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that is computed with."""
        if self._dtype == "auto":
            own = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
            return SIZES.get(own, 4)
        return SIZES[self._dtype]

    def weights(self, prefix: str = "") -> int | None:
        """Return the bytes of the weights whose names begin so, None where there are no files to count."""
        if self.is_default:
            return smollm2.NUM_PARAMETERS * (4 if self._dtype == "auto" else SIZES[self._dtype])
        if self.folder is None:
            return None
        files = weight_files(self.folder)
        size = None if self._dtype == "auto" else SIZES[self._dtype]
        total = sum(_tensor_bytes(file, prefix, size) for file in files)
        return total or None

    def cache(self, num_tokens: int) -> int:
        """Return the bytes of so many tokens' keys and values in all layers of the language model; 0 if unknown."""
        text = _text_config(self.config)
        layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
        if not isinstance(layers, int) or not isinstance(heads, int) or not heads:
            return 0
        width = text.get("head_dim") or text.get("hidden_size", 0) // heads
        return 2 * layers * (text.get("num_key_value_heads") or heads) * width * num_tokens * self.number_bytes

    def activations(self, num_tokens: int, num_rows: int) -> int:
        """Return about how much one step takes in between: the widest layer's tensors, and float32 logits.

        Args:
            num_tokens: tokens of the step.
            num_rows: tokens whose logits are wanted.
        """
        text = _text_config(self.config)
        hidden, inner = text.get("hidden_size") or 0, text.get("intermediate_size") or 0
        # The stream, its norm, queries, keys, values and what attention says; then two halves of the feed-forward part.
        return num_tokens * (6 * hidden + 3 * inner) * self.number_bytes + 2 * num_rows * text.get("vocab_size", 0) * 4

    def context_length(self, wanted: int | None, otherwise: int) -> int:
        """Return the tokens of one request: those that are wanted, else what the model can, up to `otherwise`."""
        longest = _text_config(self.config).get("max_position_embeddings")
        return wanted or min(longest if isinstance(longest, int) else otherwise, otherwise)

    def memory(self, *, prefix: str = "", cache: int = 0, activations: int = 0) -> Memory | None:
        """Return what a replica takes, None where the weights aren't here to be counted."""
        weights = self.weights(prefix or (f"{self._part}." if self._part else ""))
        return None if weights is None else Memory(self.device, weights, cache, activations)


def local_folder(model: str) -> Path | None:
    """Return the folder of a model: the one of that path, or where the hub's client has put one of that name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    for name in ("config.json", "model_index.json"):
        try:
            found = try_to_load_from_cache(model, name)
        except HFValidationError:  # no name of the hub
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that hold a model's weights, once each, those of a pipeline's parts included."""
    if (folder / "model_index.json").is_file():
        parts = [part for part in sorted(folder.iterdir()) if part.is_dir()]
        return [file for part in parts for file in _files_of_part(part)]
    return _files_of_part(folder)


def missing_files(folder: Path) -> list[str]:
    """Return the files that the index of a model in several files names and that aren't there."""
    if not (folder / INDEX).is_file():
        return []
    return sorted(name for name in _named(folder / INDEX) if not (folder / name).is_file())


def _files_of_part(folder: Path) -> list[Path]:
    for stem in ("model", "diffusion_pytorch_model"):
        if (folder / f"{stem}.safetensors").is_file():
            return [folder / f"{stem}.safetensors"]
        if (folder / f"{stem}.safetensors.index.json").is_file():
            named = sorted(_named(folder / f"{stem}.safetensors.index.json"))
            return [folder / name for name in named if (folder / name).is_file()]
    return []


def _named(index: Path) -> set[str]:
    places = _read(index).get("weight_map")
    return {name for name in places.values() if isinstance(name, str)} if isinstance(places, dict) else set()


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object, empty where there is none: a model's loader says what is wrong with it."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("text_config", "decoder_config", "llm_config"):
        if isinstance(config.get(name), dict):
            return config[name]
    return config


def _tensor_bytes(file: Path, prefix: str, number_bytes: int | None) -> int:
    """Return the bytes that a file's tensors take once they are loaded."""
    total = 0
    for name, kind, num_elements, num_bytes in _header(file):
        if name.startswith(prefix):
            is_converted = number_bytes is not None and kind in _FLOATS
            total += num_elements * number_bytes if is_converted and number_bytes else num_bytes
    return total


def _header(file: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield each tensor's name, type, number of elements, and bytes in the file; nothing of a file that is broken."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length <= _MAX_HEADER_BYTES else {}
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                yield name, tensor["dtype"], math.prod(tensor["shape"]), end - begin
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
