"""LoRA adapters that requests may name, on a model of transformers, by PEFT.

All adapters are loaded with the model, and complete: one of whose weights some have no place in the model is refused,
so that nobody who names an adapter is answered by less than it.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.packages import missing
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from adapters.transformers_model import ModelLoader

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INSTALL = 'pip install "peft>=0.21"'

_PREFIX = "base_model.model."
"""What PEFT puts before a weight's name when it saves one."""


def check_lora(adapter: str, folders: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a stage's adapters and can be seen without loading.

    Args:
        adapter: the name of the stage's adapter.
        folders: of its LoRA adapters, by name.
    """
    problems = missing(adapter, {INSTALL: ("peft",)}) if folders else []
    for name, folder in folders.items():
        path = Path(folder).expanduser()
        absent = [file for file in (CONFIG, WEIGHTS) if not (path / file).is_file()]
        if absent:
            problems.append(f"lora: '{name}' is not the folder of an adapter: {folder} has no {absent[0]}")
    return problems


def check_name(name: str | None, known: Collection[str]) -> None:
    """Refuse an adapter that the stage doesn't have.

    Raises:
        BadInput: names those that it has.
    """
    if name is not None and name not in known:
        raise BadInput(f"lora: '{name}' is unknown (allowed: {', '.join(known) or 'none'})", field="lora")


class LoraSwitch:
    """A model's adapters, of which one or none is in use; the base model is, at first.

    Args:
        loader: loads the model.
        model: the model, changed in place where there are adapters.
        folders: of the adapters, by name.

    Raises:
        StartFailed: an adapter can't be loaded, or isn't for this model.
    """

    def __init__(self, loader: ModelLoader, model: Any, folders: Mapping[str, str]) -> None:
        # PEFT takes dots for parts of a module's name.
        self._ids = {name: f"lora{index}" for index, name in enumerate(folders)}
        self._used: str | None = None
        for name, folder in folders.items():
            _load(loader, model, name, Path(folder).expanduser(), self._ids[name])
        self._layers = _layers_of(model) if folders else []
        for layer in self._layers:
            layer.enable_adapters(enabled=False)

    def use(self, name: str | None) -> None:
        """Compute with this adapter from now on, None for the base model."""
        if name == self._used:
            return
        for layer in self._layers:
            layer.enable_adapters(enabled=name is not None)
            if name is not None:  # a layer that the adapter doesn't change computes as the base model's
                layer.set_adapter(self._ids[name], inference_mode=True)
        self._used = name


def _load(loader: ModelLoader, model: Any, name: str, folder: Path, id_: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        kind = json.loads((folder / CONFIG).read_text("utf-8")).get("peft_type")
        if kind != "LORA":
            raise ValueError(f"it is of type {kind} (allowed: LORA)")
        weights = load_file(folder / WEIGHTS)
        saved = {key.removeprefix(_PREFIX) for key in weights}
        _check_places(model, saved)
        with warnings.catch_warnings():
            # Several adapters in one model are what is wanted.
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
            inject_adapter_in_model(LoraConfig.from_pretrained(str(folder)), model, adapter_name=id_)
        set_peft_model_state_dict(model, {key.removeprefix(_PREFIX): weights[key] for key in weights}, id_)
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError, SafetensorError) as error:
        raise loader.refused(f"its LoRA adapter '{name}' can't be loaded: {str(error)[:300]}", "lora") from error
    held = {key.replace(f".{id_}", "").replace(".base_layer", "") for key in model.state_dict() if f".{id_}" in key}
    if lost := sorted(saved ^ held):
        raise loader.refused(
            f"{len(lost)} weights of its LoRA adapter '{name}' don't fit, {lost[0]} among them", "lora"
        )
    model.requires_grad_(requires_grad=False)
    model.to(device=loader.device, dtype=model.dtype)  # PEFT keeps float32 beside a model of half precision
    model.eval()


def _layers_of(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _check_places(model: Any, saved: Collection[str]) -> None:
    """Refuse weights whose module the model doesn't have, before anything of the model is changed.

    Raises:
        ValueError: names the first.
    """
    modules = {key.replace(".base_layer", "") for key, _ in model.named_modules()}
    for key in sorted(saved):
        module = key.split(".lora_")[0]
        if module not in modules:
            raise ValueError(f"the model has no module {module}")
