"""Read a deployment: files, environment and arguments to one checked configuration that knows each value's origin.

Later ones win; tables merge key by key, everything else (lists too) is replaced whole:

1. defaults of the schema
2. files named by ``base``, the farthest first
3. the file itself
4. ``[platform.NAME]`` of these files in the same order, NAME being ``cuda``, ``rocm`` or ``cpu``
5. what a model's checkpoint says, where the command line names a model
6. the environment: ``OMNI_BUS__STAGES__LLM__REPLICAS=2``, letters' case and ``-`` or ``_`` don't matter for known keys
7. ``-o stages.llm.replicas=2``, in the order given

Values of the last two are TOML values, and plain text where they are none.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, cast

import msgspec

from omni_bus.config.graph import build, slot_problems, with_voices
from omni_bus.config.layer import DEFAULT, Layer, Origin, Problem, Table, has_secret, is_secret, show_path, show_value
from omni_bus.config.lines import key_lines
from omni_bus.config.schema import DeploymentConfig
from omni_bus.config.validate import FILE_KEYS, AdapterClass, Draft, GatewayClass, show_problem, validate
from omni_bus.core.pipeline import Pipeline
from omni_bus.engine import Engine
from omni_bus.errors import ConfigError, unknown_name

PLATFORMS = ("cuda", "rocm", "cpu")
ENVIRONMENT_PREFIX = "OMNI_BUS__"

_MAX_SHOWN_CHARACTERS = 80
_MAX_FILE_BYTES = 4 * 1024 * 1024
_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")


class Loaded(msgspec.Struct):
    """A deployment without a known fault."""

    path: str
    config: DeploymentConfig
    pipelines: dict[str, Pipeline]
    served: dict[str, tuple[str, ...]]
    """The pipelines of each gateway."""
    origins: dict[str, Origin]
    """Where each value that is not a default was written: ``stages.llm.replicas`` to ``-o stages.llm.replicas=2``."""
    adapters: dict[str, type[Engine]]
    """The class of each stage's adapter."""
    protocols: dict[str, type[Any]]
    """The class of each gateway."""
    why: tuple[str, ...] = ()
    """Where the command line names a model: why this deployment serves it."""

    def origin(self, key: str) -> Origin:
        """Return where a value came from; `DEFAULT` where nobody wrote it."""
        return self.origins.get(key, DEFAULT)


def load(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    platform: str,
    adapter_class: AdapterClass,
    gateway_class: GatewayClass,
    of_model: Layer | None = None,
    why: tuple[str, ...] = (),
) -> Loaded:
    """Read, merge and check a deployment.

    Args:
        path: the TOML file.
        overrides: ``dotted.key=value``, as given with ``-o``.
        environ: environment variables; only those with `ENVIRONMENT_PREFIX` count.
        platform: one of `PLATFORMS`: which ``[platform.…]`` tables apply.
        adapter_class: the class of an adapter's name.
        gateway_class: the class of a protocol's name.
        of_model: what a model's checkpoint says.
        why: lines that say why the file serves that model.

    Raises:
        ConfigError: with every problem at once, each with file and line (or variable, or argument) and key path.
    """
    file = os.fspath(path)
    files = _read_chain(file)
    plain, by_platform, lines = _combine(files)
    merged = Layer()
    merged.lay(plain)
    merged.lay(by_platform.get(platform, Layer()))
    merged.lay(of_model or Layer())
    misread = _lay_environment(merged, environ) + _lay_overrides(merged, overrides)

    name = _name_of(file)
    draft = validate(merged.values, name, adapter_class, gateway_class)
    graph = build(draft.adapters, draft.pipelines, draft.gateways, draft.protocols)
    # What is wrong with a value by itself is not said again about the graph.
    said = {at for problem in draft.problems if (at := problem.path)[0] == "pipelines" or len(at) == 1}
    if not draft.problems:
        graph.problems += slot_problems(graph.pipelines, draft.stages, draft.adapters)
    problems = draft.problems + [problem for problem in graph.problems if problem.path not in said]
    lines += _show(problems, merged, file) + misread
    lines += _problems_elsewhere(plain, by_platform, platform, name, draft)
    if lines:
        raise ConfigError(dict.fromkeys(" ".join(line.splitlines()) for line in lines))
    config = draft.config()
    adapters = {stage: found for stage, found in draft.adapters.items() if found is not None}
    return Loaded(
        path=file,
        config=config,
        pipelines=with_voices(graph.pipelines, config.stages, adapters),
        served=graph.served,
        origins={show_path(at): origin for at, origin in merged.origins.items()},
        adapters=adapters,
        protocols={gateway: found for gateway, found in draft.protocols.items() if found is not None},
        why=why,
    )


def _show(problems: Sequence[Problem], layer: Layer, file: str) -> list[str]:
    """Write problems on one line each, in the order of the file."""
    placed = [(layer.find(problem.path) or Origin(file), problem) for problem in problems]
    placed.sort(key=lambda pair: (pair[0].line is None, pair[0].source, pair[0].line or 0))
    return [show_problem(problem, origin) for origin, problem in placed]


def _problems_elsewhere(
    plain: Layer, by_platform: Mapping[str, Layer], platform: str, name: str, draft: Draft
) -> list[str]:
    """Return what is wrong in tables of platforms other than this one; their adapters may be missing here."""
    lines: list[str] = []
    for other, layer in by_platform.items():
        if other == platform:
            continue
        merged = Layer()
        merged.lay(plain)
        merged.lay(layer)
        problems = validate(merged.values, name, None, None).problems
        for problem in problems:
            origin = layer.find(problem.path)
            if origin is not None and problem not in draft.problems:
                lines.append(show_problem(problem, f"{origin}: platform {other}"))
    return lines


def _name_of(file: str) -> str:
    """Return the file's name without its ending, as a deployment's name."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", FilePath(file).stem)[:64] or "deployment"


# Files.


def _read_chain(file: str) -> list[Layer]:
    """Read the file and all that it is based on, the farthest first.

    Raises:
        ConfigError: a file is missing or no TOML, or the files are based on each other in a circle.
    """
    layers: list[Layer] = []
    seen: dict[str, str] = {}
    said_by: Origin | None = None
    while True:
        real = os.path.realpath(file)
        if real in seen:
            chain = [*seen.values(), file]
            raise ConfigError([f"{said_by}: base: the files go round in a circle: {' -> '.join(chain)}"])
        seen[real] = file
        layer = _read_file(file, said_by)
        layers.insert(0, layer)
        base = layer.values.pop("base", None)
        if base is None:
            return layers
        said_by = layer.find(("base",)) or Origin(file)
        if not isinstance(base, str) or not base:
            raise ConfigError([f"{said_by}: base: {show_value(base)} is not allowed; allowed: the path of a TOML file"])
        file = os.path.normpath(os.path.join(os.path.dirname(file), base))


def _read_file(file: str, said_by: Origin | None) -> Layer:
    place = f"{said_by}: base: " if said_by else ""
    try:
        with open(file, "rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError([f"{place}{file}: no such file{_nearest_file(file)}"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{place}{file}: is a directory; a TOML file is needed{_nearest_file(file)}"]) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError([f"{place}{file}: can't be read: {getattr(error, 'strerror', None) or error}"]) from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError([f"{place}{file}: too large; allowed: {_MAX_FILE_BYTES} bytes"])
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{file}:{line}: not UTF-8: byte 0x{raw[error.start]:02x}"]) from None
    try:
        values = tomllib.loads(text)
        lines = key_lines(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax_problem(file, str(error), text)]) from None
    except RecursionError:
        raise ConfigError([f"{file}: lists or tables are nested too deeply"]) from None
    return Layer(values, {path: Origin(file, line) for path, line in lines.items()})


def _syntax_problem(file: str, message: str, text: str) -> str:
    position = _POSITION.search(message)
    lines = text.split("\n")
    if position is None:
        while len(lines) > 1 and not lines[-1].strip():
            lines.pop()
        message = message.removesuffix(" (at end of document)")
        return f"{file}:{len(lines)}:{len(lines[-1]) + 1}: not valid TOML: {message}, where the file ends"
    line, column = position.groups()
    shown = "" if _is_near_secret(lines[: int(line)]) else lines[int(line) - 1].strip()[:_MAX_SHOWN_CHARACTERS]
    return f"{file}:{line}:{column}: not valid TOML: {message[: position.start()]}" + (f" in: {shown}" if shown else "")


def _is_near_secret(lines: Sequence[str]) -> bool:
    """Whether the last line may hold a secret: its own key is one's, or that of the value that it goes on with."""
    for line in reversed(lines):
        if has_secret(line):
            return True
        if "=" in line or line.lstrip().startswith("["):
            return False
    return False


def _nearest_file(file: str) -> str:
    folder = file if os.path.isdir(file) else os.path.dirname(file) or "."
    try:
        known = sorted(name for name in os.listdir(folder) if name.endswith(".toml"))
    except OSError:
        return ""
    near = known[:3] if os.path.isdir(file) else difflib.get_close_matches(os.path.basename(file), known, n=1)
    if not near:
        return ""
    return "; did you mean " + " or ".join(f"'{os.path.normpath(os.path.join(folder, name))}'" for name in near) + "?"


def _combine(files: Sequence[Layer]) -> tuple[Layer, dict[str, Layer], list[str]]:
    """Lay the files over each other; return what they say for all platforms, what for each, and what is wrong."""
    plain = Layer()
    for layer in files:
        plain.lay(layer)
    by_platform: dict[str, Layer] = {}
    problems: list[Problem] = []
    tables = plain.values.get("platform", {})
    if isinstance(tables, dict):
        problems += _platform_problems(cast(Table, tables))
    else:
        problems.append(Problem(("platform",), f"{show_value(tables)} is not allowed; allowed: tables [platform.NAME]"))
    lines = [show_problem(problem, plain.find(problem.path)) for problem in problems]
    platforms = plain.cut("platform")
    if not lines:
        by_platform = {name: platforms.cut(name) for name in list(platforms.values)}
    return plain, by_platform, lines


def _platform_problems(tables: Table) -> Iterator[Problem]:
    for name, table in tables.items():
        path = ("platform", name)
        if name not in PLATFORMS:
            yield Problem(path, unknown_name("platform", name, PLATFORMS).message)
        elif not isinstance(table, dict):
            yield Problem(path, f"{show_value(table)} is not allowed; allowed: a table")
        else:
            for key in ("base", "platform"):
                if key in table:
                    yield Problem((*path, key), f"'{key}' is not allowed inside [platform.{name}]")


# Environment and arguments.


def parse_value(text: str) -> Any:
    """Read a TOML value; text that is none stands for itself."""
    try:
        table = tomllib.loads("value = " + text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _lay_environment(merged: Layer, environ: Mapping[str, str]) -> list[str]:
    problems: list[str] = []
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        parts = variable.removeprefix(ENVIRONMENT_PREFIX).split("__")
        if not all(parts):
            problems.append(f"environment {variable}: an empty key; the form is {ENVIRONMENT_PREFIX}SECTION__KEY")
            continue
        path = _existing_keys(merged.values, parts)
        if path[0] in FILE_KEYS:
            problems.append(f"environment {variable}: '{path[0]}' can only be written in a file")
        elif not _is_text(environ[variable]):
            problems.append(f"environment {variable}: not UTF-8")
        else:
            merged.put(path, parse_value(environ[variable]), Origin(f"environment {variable}"))
    return problems


def _existing_keys(table: Table, parts: Sequence[str]) -> tuple[str, ...]:
    """Spell a variable's parts as the tree does, which may have capitals and dashes; in small letters if unknown."""
    keys: list[str] = []
    level: Any = table
    for part in parts:
        known = cast(Table, level) if isinstance(level, dict) else {}
        key = next((key for key in known if key.replace("-", "_").lower() == part.lower()), part.lower())
        keys.append(key)
        level = known.get(key)
    return tuple(keys)


def _lay_overrides(merged: Layer, overrides: Sequence[str]) -> list[str]:
    problems: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        path = _parse_key(key) if equals else None
        shown = f"{key.strip()}={'***' if path and is_secret(path) else value}" if equals else text
        if path is None and has_secret(text):
            shown = "***"
        if not _is_text(text):
            problems.append(f"-o {shown}: not UTF-8")
        elif path is None:
            form = "the form is -o dotted.key=value, as in -o stages.llm.replicas=2"
            problems.append(f"-o {shown}: not a setting; {form}")
        elif path[0] in FILE_KEYS:
            problems.append(f"-o {shown}: '{path[0]}' can only be written in a file")
        else:
            merged.put(path, parse_value(value), Origin(f"-o {shown}"))
    return problems


def _is_text(text: str) -> bool:
    """Whether the operating system's bytes were UTF-8; others come as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _parse_key(text: str) -> tuple[str, ...] | None:
    """Read a dotted TOML key; None where it is none."""
    if "\n" in text or "#" in text:
        return None
    try:
        table: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(table, dict):
        ((key, table),) = cast(Table, table).items()
        path.append(key)
    return tuple(path)
