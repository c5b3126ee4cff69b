"""One source of settings, and how sources are laid over each other.

A `Layer` is a tree of plain TOML values with the `Origin` of every table, value and list element in it. Laying one
layer over another keeps the origins right, so that each later message can say where a value was written.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import msgspec

Path: TypeAlias = tuple[str | int, ...]
"""Keys from the root; a number is a position in a list."""

Table: TypeAlias = dict[str, Any]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SECRET_KEY = re.compile(r"(?:^|_)(?:key|secret|password|passwd|auth_token|access_token)s?$")
_HIDDEN = "***"
_MAX_SHOWN_CHARACTERS = 80


class Origin(msgspec.Struct, frozen=True):
    """Where a value was written: a file and its line, a variable, a ``-o`` argument, or nowhere (``default``)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


DEFAULT = Origin("default")


class Problem(msgspec.Struct, frozen=True):
    """One reason to refuse a deployment, and the key that has to change."""

    path: Path
    message: str


class Layer(msgspec.Struct):
    """Values of one source, or of several laid over each other."""

    values: Table = {}
    origins: dict[Path, Origin] = {}

    def lay(self, upper: Layer) -> None:
        """Put `upper` on top: tables merge key by key, everything else is replaced whole, lists too."""
        _merge(self.values, upper.values, (), self.origins, upper.origins)

    def cut(self, key: str) -> Layer:
        """Take the table under a top-level key out and return it as a layer of its own."""
        table = self.values.pop(key, {})
        taken = {path[1:]: origin for path, origin in self.origins.items() if path[:1] == (key,)}
        self.origins = {path: origin for path, origin in self.origins.items() if path[:1] != (key,)}
        return Layer(table, taken)

    def put(self, path: tuple[str, ...], value: Any, origin: Origin) -> None:
        """Set one value, making the tables above it."""
        upper: Any = value
        for key in reversed(path):
            upper = {key: upper}
        origins: dict[Path, Origin] = {path[:depth]: origin for depth in range(1, len(path) + 1)}
        self.lay(Layer(upper, origins))

    def find(self, path: Path) -> Origin | None:
        """Return the origin of a value or of the nearest table around it."""
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.origins:
                return self.origins[path[:depth]]
        return None


def _merge(
    lower: Table, upper: Table, at: Path, lower_origins: dict[Path, Origin], upper_origins: dict[Path, Origin]
) -> None:
    for key, value in upper.items():
        path = (*at, key)
        below = lower.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            if path not in lower_origins and path in upper_origins:
                lower_origins[path] = upper_origins[path]
            _merge(below, value, path, lower_origins, upper_origins)  # pyright: ignore[reportUnknownArgumentType]
            continue
        depth = len(path)
        for stale in [old for old in lower_origins if old[:depth] == path]:
            del lower_origins[stale]
        lower_origins.update({new: origin for new, origin in upper_origins.items() if new[:depth] == path})
        lower[key] = _copy(value)


def _copy(value: Any) -> Any:
    """Copy tables, which `_merge` changes in place; everything else is never changed."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value


def show_path(path: Path) -> str:
    """Write a path as in TOML, with list positions in brackets: ``pipelines.chat.edges[2]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        key = part if _BARE_KEY.fullmatch(part) else msgspec.json.encode(part).decode()
        text += f".{key}" if text else key
    return text


def has_secret(text: str) -> bool:
    """Whether raw text that could not be read as a setting may hold a secret: some word in it is a secret's key."""
    return any(_SECRET_KEY.search(word) for word in re.findall(r"[A-Za-z0-9_]+", text))


def is_secret(path: Path) -> bool:
    """Whether the value must not be printed, judged by its key's name."""
    return any(isinstance(part, str) and _SECRET_KEY.search(part) for part in path)


def show_value(value: Any, path: Path = (), *, max_characters: int | None = _MAX_SHOWN_CHARACTERS) -> str:
    """Write a value as TOML would have it on one line; secrets are hidden, long ones cut."""
    text = _toml(value, path)
    if max_characters is not None and len(text) > max_characters:
        return text[: max_characters - 1] + "…"
    return text


def hide_secrets(value: Any, path: Path) -> Any:
    """Return the value with every secret in it replaced by ``***``."""
    if is_secret(path):
        return _HIDDEN if value else value
    if isinstance(value, dict):
        return {key: hide_secrets(inner, (*path, str(key))) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value


def _toml(value: Any, path: Path) -> str:
    if is_secret(path) and value and not isinstance(value, list | tuple):
        return f'"{_HIDDEN}"'
    match value:
        case str():
            return msgspec.json.encode(value).decode()
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return "[" + ", ".join(_toml(item, path) for item in value) + "]"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case dict():
            pairs = (f"{show_path((key,))} = {_toml(inner, (*path, key))}" for key, inner in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return "{ " + ", ".join(pairs) + " }" if value else "{}"
        case _:
            return str(value)
