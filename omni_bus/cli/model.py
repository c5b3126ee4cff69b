"""The model that a command line names: its checkpoint is read, and a rule turns it into a deployment."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from adapters.model_rules import RULES
from omni_bus.config.layer import Layer, Origin
from omni_bus.errors import BadInput, ConfigError
from omni_bus.resolution import CONFIG, INDEX, Checkpoint, ModelRule, ReadJson, Resolution, resolve

GROUP = "omni_bus.models"
"""The entry point group of third parties' rules; each is a `ModelRule`."""

_MAX_FILE_BYTES = 16 * 1024 * 1024
_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


class ModelDeployment(msgspec.Struct, frozen=True):
    """How a model is deployed."""

    model: str
    resolution: Resolution
    layer: Layer
    """What the checkpoint sets in the rule's file."""

    def explain(self) -> tuple[str, ...]:
        """Return lines for people: which rule matched and why, which came next, which could not be asked."""
        chosen = self.resolution.chosen
        lines = [f"pipeline {chosen.rule.name} ({chosen.rule.reason}): {chosen.because}"]
        if self.resolution.others:
            second = self.resolution.others[0]
            lines.append(f"second {second.rule.name} ({second.rule.reason}): {second.because}")
        return (*lines, *self.resolution.failed)


def deploy(model: str, wanted: str | None) -> ModelDeployment:
    """Return how a model is deployed.

    Args:
        model: a folder, or a name on the model hub.
        wanted: the name of a rule that is taken whatever the checkpoint says.

    Raises:
        ConfigError: there is no such model or rule, or none is known for it.
    """
    model = model if not os.path.isdir(os.path.expanduser(model)) else os.path.normpath(os.path.expanduser(model))
    try:
        rules = all_rules()
        is_named = any(model in rule.names for rule in rules)
        checkpoint = Checkpoint(model, _nothing if is_named else reader_of(model))
        resolution = resolve(checkpoint, rules, wanted)
        return ModelDeployment(model, resolution, _layer(checkpoint, resolution.chosen.rule))
    except ConfigError:
        raise
    except BadInput as error:
        raise ConfigError([error.message]) from error


def all_rules() -> tuple[ModelRule, ...]:
    """Return the shipped rules, and those of installed packages, which replace shipped ones of their names.

    Raises:
        ConfigError: a package's can't be read.
    """
    found = {rule.name: rule for rule in RULES}
    for point in entry_points(group=GROUP):
        try:
            rule = point.load()
        except Exception as error:  # a third party's module may raise anything while it is imported
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError([f"model rule '{point.name}' can't be loaded from {point.value}: {reason}"]) from error
        if not isinstance(rule, ModelRule):
            raise ConfigError([f"model rule '{point.name}': {point.value} is no ModelRule"])
        found[rule.name] = rule
    return tuple(found.values())


def reader_of(model: str) -> ReadJson:
    """Return what reads files of a model.

    Raises:
        BadInput: there is no such model.
    """
    folder = Path(model)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in (CONFIG, INDEX)):
            raise BadInput(f"model: '{model}' is not the folder of a model: it has no {CONFIG} and no {INDEX}")
        return lambda name: _parse(folder / name, model) if (folder / name).is_file() else None
    if model.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(model):
        raise BadInput(f"model: there is no folder '{model}' (allowed: a model's folder, or a name on the model hub)")
    return _hub_reader(model)


def _hub_reader(model: str) -> ReadJson:
    """Return what reads files of a model on the hub; those that were read before need no network."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise BadInput(
            f"model: there is no folder '{model}', and the hub can't be asked without a package "
            '(pip install "omni-bus[transformers]")'
        ) from None

    def read(name: str) -> Any:
        try:
            return _parse(Path(hf_hub_download(model, name)), model)
        except LocalEntryNotFoundError as error:
            if _is_known_here(model):  # of a model that is here, what is not was not needed
                return None
            raise BadInput(f"model: there is no folder '{model}', and the hub can't be reached: {error}") from error
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:  # no such model, one that needs a licence, a name that is none
            reason = str(error).strip().splitlines()[0]
            raise BadInput(f"model: there is no folder '{model}', and none on the hub: {reason}") from error

    return read


def _is_known_here(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(model, name), str) for name in (CONFIG, INDEX))


def _parse(file: Path, model: str) -> Any:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise BadInput(f"model: {file.name} of '{model}' is too large (allowed: {_MAX_FILE_BYTES} bytes)")
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"model: {file.name} of '{model}' can't be read: {error}") from error


def _nothing(name: str) -> None:
    """Read no file: the model is known by its name."""


def _layer(checkpoint: Checkpoint, rule: ModelRule) -> Layer:
    model = checkpoint.model
    origin = Origin(f"model {model}")
    served = os.path.basename(model) if os.path.isdir(model) else model
    served = re.sub(r"\s", "_", served)
    layer = Layer()
    layer.put(("name",), re.sub(r"[^A-Za-z0-9_-]", "_", served)[-64:] or "model", origin)
    layer.put(("pipelines", rule.pipeline, "serve_as"), served, origin)
    for stage in rule.stages:
        layer.put(("stages", stage, "model"), model, origin)
    if rule.settings is not None:
        for path, value in _leaves(rule.settings(checkpoint)):
            layer.put(path, value, origin)
    return layer


def _leaves(table: Any, at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in table.items():
        found += _leaves(value, (*at, key)) if isinstance(value, dict) else [((*at, key), value)]
    return found
