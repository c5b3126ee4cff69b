"""Which pipeline serves a model: rules of what a checkpoint says of itself, tried in a fixed order.

A `ModelRule` names a deployment file and the models that it serves. The first of these steps that finds a rule decides:

1. the rule that the person named
2. rules that know the model by its name
3. `model_type` of ``config.json``
4. `architectures` of ``config.json``, in its order
5. `_class_name` of ``model_index.json``
6. patterns of architectures (``*ForCausalLM``)

Within a step higher priorities come first. A rule's predicate is asked only where the rule matches; one that says no,
or fails, takes its rule out. Names are never guessed from parts of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from omni_bus.errors import BadInput, unknown_name

CONFIG = "config.json"
INDEX = "model_index.json"

ReadJson = Callable[[str], Any]
"""Reads a JSON file of a model's folder; None if it isn't there; raises BadInput if it is no JSON."""


class Checkpoint:
    """What a model says of itself.

    Args:
        model: its folder or name, as the person wrote it.
        read: reads one of its files.
    """

    def __init__(self, model: str, read: ReadJson) -> None:
        self.model = model
        self._read = read
        self._files: dict[str, Any] = {}

    def file(self, name: str) -> Any:
        """Return what a JSON file of the model's folder says, None if it isn't there.

        Raises:
            BadInput: it is no JSON.
        """
        if name not in self._files:
            self._files[name] = self._read(name)
        return self._files[name]

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a JSON file of the model's folder, empty if it isn't there.

        Raises:
            BadInput: it is no JSON object.
        """
        found = self.file(name)
        if found is not None and not isinstance(found, dict):
            raise BadInput(f"model: {name} of '{self.model}' is no JSON object", field="model")
        return found or {}

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.json``; empty if there is none."""
        return self.table(CONFIG)

    @property
    def model_type(self) -> str:
        """`model_type` of the configuration; empty if it says none."""
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes that the configuration names, `architecture` being one too; empty if it names none."""
        found = self.config.get("architectures") or self.config.get("architecture") or ()
        names: Iterable[Any] = (found,) if isinstance(found, str) else found if isinstance(found, list) else ()
        return tuple(name for name in names if isinstance(name, str))

    @property
    def diffusers_class(self) -> str:
        """Class of the pipeline that ``model_index.json`` names; empty if there is none."""
        found = self.table(INDEX).get("_class_name")
        found = found[-1] if isinstance(found, list) and found else found  # of modular ones: module and class
        return found if isinstance(found, str) else ""

    def describe(self) -> str:
        """Write what the rules look at."""
        said = {
            "model_type": self.model_type,
            "architectures": ", ".join(self.architectures),
            "_class_name": self.diffusers_class,
        }
        return "; ".join(f"{key} {value}" for key, value in said.items() if value)


class ModelRule(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment file, and the models that it serves."""

    name: str
    """What ``--pipeline`` calls it."""
    config: str
    """Name of a shipped deployment file, or the path of another."""
    reason: str
    """A line for people: what serves the model."""
    stages: tuple[str, ...]
    """Stages of the file whose key `model` becomes the model."""
    pipeline: str
    """The file's pipeline; clients know it by the model's name."""
    names: frozenset[str] = frozenset()
    """Models by name."""
    model_types: frozenset[str] = frozenset()
    """Of ``config.json``."""
    architectures: frozenset[str] = frozenset()
    """Of ``config.json``; those with ``*`` are patterns, which come last."""
    diffusers_classes: frozenset[str] = frozenset()
    """Of ``model_index.json``."""
    predicate: Callable[[Checkpoint], bool] | None = None
    """Whether a checkpoint that matches is really served so."""
    settings: Callable[[Checkpoint], Mapping[str, Any]] | None = None
    """Further keys of the deployment, as nested tables, read off the checkpoint."""
    priority: int = 0
    """Rules of higher priority come first within a step."""


class Match(msgspec.Struct, frozen=True):
    """A rule, and what made it match."""

    rule: ModelRule
    because: str


class Resolution(msgspec.Struct, frozen=True):
    """How a model is served."""

    chosen: Match
    others: tuple[Match, ...]
    """Further rules that match, the next first."""
    failed: tuple[str, ...]
    """Rules that matched, and what their predicates raised."""


def resolve(checkpoint: Checkpoint, rules: Iterable[ModelRule], wanted: str | None = None) -> Resolution:
    """Choose the rule that serves a checkpoint.

    Args:
        checkpoint: the model.
        rules: all that there are.
        wanted: the name of one that is taken whatever the checkpoint says.

    Raises:
        UnknownName: no rule of the wanted name.
        BadInput: no rule matches; says what the model is and what is known.
    """
    by_name = {rule.name: rule for rule in rules}
    if wanted is not None:
        if wanted not in by_name:
            raise unknown_name("pipeline", wanted, by_name, field="--pipeline")
        return Resolution(Match(by_name[wanted], "it was asked for"), (), ())
    ordered = sorted(by_name.values(), key=lambda rule: (-rule.priority, rule.name))
    found: dict[str, Match] = {}
    dropped: dict[str, str] = {}
    failed: list[str] = []
    for matches in _steps(checkpoint):
        for rule in ordered:
            if rule.name in found or rule.name in dropped or not (because := matches(rule)):
                continue
            try:
                if rule.predicate is None or rule.predicate(checkpoint):
                    found[rule.name] = Match(rule, because)
                else:
                    dropped[rule.name] = f"{rule.name} matched, and its predicate said no"
            except Exception as error:  # noqa: BLE001 (a third party's may raise anything; the other rules still count)
                dropped[rule.name] = f"{rule.name} matched, and its predicate raised {type(error).__name__}: {error}"
                failed.append(dropped[rule.name])
    if not found:
        raise BadInput(_unknown(checkpoint, ordered, dropped.values()), field="model")
    chosen, *others = found.values()
    return Resolution(chosen, tuple(others), tuple(failed))


def _steps(checkpoint: Checkpoint) -> Iterator[Callable[[ModelRule], str]]:
    """Yield each step as a function that says why a rule matches; nothing if it doesn't."""
    model, kind, pipeline = checkpoint.model, checkpoint.model_type, checkpoint.diffusers_class
    yield lambda rule: f"its name is {model}" if model in rule.names else ""
    yield lambda rule: f"its model_type is {kind}" if kind in rule.model_types else ""
    for name in checkpoint.architectures:
        yield lambda rule, name=name: f"its architecture is {name}" if name in rule.architectures else ""
    yield lambda rule: f"its _class_name is {pipeline}" if pipeline in rule.diffusers_classes else ""
    for name in checkpoint.architectures:
        yield lambda rule, name=name: next(
            (
                f"its architecture {name} is like {pattern}"
                for pattern in sorted(rule.architectures)
                if "*" in pattern and fnmatchcase(name, pattern)
            ),
            "",
        )


def _unknown(checkpoint: Checkpoint, rules: Iterable[ModelRule], dropped: Iterable[str]) -> str:
    what = checkpoint.describe() or f"neither {CONFIG} nor {INDEX} says what it is"
    known = "; ".join(f"{rule.name}: {', '.join(sorted(_known(rule)))}" for rule in rules)
    why = "".join(f" ({line})" for line in dropped)
    return (
        f"model: no pipeline is known for '{checkpoint.model}' ({what}){why}; --pipeline NAME takes one; known: {known}"
    )


def _known(rule: ModelRule) -> frozenset[str]:
    return rule.names | rule.model_types | rule.architectures | rule.diffusers_classes
