"""``omni-bus check``: the merged configuration with the origin of each value, and its pipelines as a drawing."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from omni_bus.cli.deployment import (
    add_config_arguments,
    detect_platform,
    insecurities,
    load_deployment,
    memory_ledger,
)
from omni_bus.config.graph import warnings
from omni_bus.config.layer import DEFAULT, hide_secrets, show_path, show_value
from omni_bus.config.ledger import Ledger, show_bytes
from omni_bus.config.load import Loaded
from omni_bus.config.settings import Setting, settings
from omni_bus.core.pipeline import IN, OUT, Pipeline
from omni_bus.errors import ConfigError, did_you_mean
from omni_bus.runtime.cores import available_cores

_WIDTH = 100
_ORIGIN_COLUMN = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--explain", metavar="KEY", help="explain one key, or all keys of a table, as in stages.llm")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the checked deployment; return 0, or 1 after printing every problem on stderr."""
    try:
        loaded = load_deployment(args)
        ledger = memory_ledger(loaded)
        found = settings(loaded)
        if args.explain is not None:
            found = _below(found, args.explain)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        if args.json:
            _print_json({"problems": error.problems})
        return 1
    hints = [*warnings(loaded.config.stages, available_cores()), *ledger.warnings, *insecurities(loaded)]
    if args.json:
        whole = _as_json(loaded, found, hints) | {"memory": _memory_json(ledger)}
        _print_json({"settings": [_explained(s) for s in found]} if args.explain else whole)
        return 0
    if args.explain is not None:
        _write("\n\n".join(_explain(setting) for setting in found))
        return 0
    _write("\n".join([*_head(loaded), "", *_merged(found), *_drawing(loaded), *_memory_table(ledger)]))
    for hint in hints:
        print(f"warning: {hint}", file=sys.stderr)
    return 0


def _write(text: str) -> None:
    """Print; on a terminal without Unicode with plain characters in the place of lines and arrows."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(str.maketrans({"─": "-", "→": ">", "…": "~"})).encode("ascii", "replace").decode()
    print(text)


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


# The merged configuration, written as the TOML that would give the same.


def _head(loaded: Loaded) -> list[str]:
    config = loaded.config
    counts = ((len(config.stages), "stage"), (len(config.pipelines), "pipeline"), (len(config.gateways), "gateway"))
    words = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    lines = [f"{loaded.path} is good: {words}; platform {detect_platform()}"]
    for line in loaded.why:
        lines += textwrap.wrap(line, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
    return lines


def _merged(found: Sequence[Setting]) -> list[str]:
    lines: list[str] = []
    table: tuple[str | int, ...] = ()
    for setting in found:
        if setting.path[:-1] != table:
            table = setting.path[:-1]
            lines += ["", f"[{show_path(table)}]"]
        lines += _toml_lines(setting)
    return [*lines, ""]


def _toml_lines(setting: Setting) -> list[str]:
    """Write one key; its origin is the comment, in a column of its own."""
    key = show_path(setting.path[-1:])
    if setting.value is None:
        return [_beside(f"# {key} is not set", setting)]
    whole = f"{key} = {show_value(setting.value, setting.path, max_characters=None)}"
    if not isinstance(setting.value, list | tuple) or len(whole) < _ORIGIN_COLUMN:
        return [_beside(whole, setting)]
    items = [f"  {show_value(item, setting.path, max_characters=None)}," for item in setting.value]
    return [_beside(f"{key} = [", setting), *items, "]"]


def _beside(text: str, setting: Setting) -> str:
    return f"{text:<{_ORIGIN_COLUMN}} # {setting.origin}"


# Pipelines, stages and gateways.


def _drawing(loaded: Loaded) -> list[str]:
    lines: list[str] = []
    for pipeline in loaded.pipelines.values():
        lines += _draw_pipeline(pipeline)
    lines += _stage_table(loaded)
    if loaded.config.gateways:
        lines += _gateway_table(loaded)
    return lines[:-1]


def _draw_pipeline(pipeline: Pipeline) -> list[str]:
    """Draw one line for each edge: ``in.messages ─json─→ llm.prompt``, in the order in which data flows."""
    names = ", ".join((pipeline.serve_as, *pipeline.aliases))
    depth = _depths(pipeline)
    edges = sorted(pipeline.edges, key=lambda edge: (depth[edge.source], edge.target != OUT))
    sources = [f"{edge.source}.{edge.source_port}" for edge in edges]
    source_width = max(map(len, sources))
    kind_width = max(len(edge.kind) for edge in edges)
    lines = [f"pipeline {pipeline.name}, served as {names}"]
    for edge, source in zip(edges, sources, strict=True):
        arrow = f"─{edge.kind}{'─' * (kind_width - len(edge.kind) + 1)}→"
        lines.append(f"  {source:<{source_width}} {arrow} {edge.target}.{edge.target_port}")
    if pipeline.voices:
        voices = ", ".join(pipeline.voices)
        lines += textwrap.wrap(voices, _WIDTH, initial_indent="  voices  ", subsequent_indent=" " * 10)
    return [*lines, ""]


def _depths(pipeline: Pipeline) -> dict[str, int]:
    """Return the length of the longest path from ``in`` to each stage."""
    depth = {IN: 0, OUT: 0} | dict.fromkeys(pipeline.stages, 0)
    for _ in pipeline.stages:
        for edge in pipeline.edges:
            if edge.target != OUT:
                depth[edge.target] = max(depth[edge.target], depth[edge.source] + 1)
    return depth


def _stage_table(loaded: Loaded) -> list[str]:
    """Write one row for each stage, with its adapter's ports below."""
    rows = [("stage", "adapter", "replicas", "threads")]
    for name, stage in loaded.config.stages.items():
        rows.append((name, stage.adapter, str(stage.replicas), str(stage.threads or "shared")))
    head, *body = _table(rows)
    lines = [head]
    for row, found in zip(body, loaded.adapters.values(), strict=False):
        ports = (("accepts", _ports(found.accepts, found.optional_inputs)), ("emits", _ports(found.emits)))
        lines.append(row)
        for side, text in ports:
            lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {side:<8}", subsequent_indent=" " * 10)
    return [*lines, ""]


def _ports(kinds: Mapping[str, str], optional: Container[str] = ()) -> str:
    return ", ".join(f"{port} ({kind}{', optional' if port in optional else ''})" for port, kind in kinds.items())


def _gateway_table(loaded: Loaded) -> list[str]:
    rows = [("gateway", "protocol", "address", "processes", "serves")]
    for name, gateway in loaded.config.gateways.items():
        port = str(gateway.port) if gateway.port else "a free port"
        served = ", ".join(loaded.pipelines[pipeline].serve_as for pipeline in loaded.served[name])
        rows.append((name, gateway.protocol, f"{gateway.host}:{port}", str(gateway.processes), served))
    return _table(rows)


def _memory_table(ledger: Ledger) -> list[str]:
    """Write what each stage takes, and what each device has; nothing if no adapter knows."""
    rows: list[tuple[str, ...]] = [("memory", "device", "weights", "keys and values", "a step", "together")]
    for entry in ledger.entries:
        if (memory := entry.memory) is None:
            continue
        parts = (memory.weights, memory.cache, memory.activations)
        cells = (show_bytes(entry.replicas * part) if part else "" for part in parts)
        rows.append((entry.stage, entry.device, *cells, show_bytes(entry.total)))
    if len(rows) == 1:
        return []
    of_devices = [
        f"{device}: about {show_bytes(ledger.taken(device))} of {show_bytes(capacity.free)} free, "
        f"{show_bytes(capacity.total)} in all"
        for device, capacity in ledger.capacities.items()
        if ledger.taken(device)
    ]
    unknown = [entry.stage for entry in ledger.entries if entry.memory is None]
    return ["", *_table(rows)[:-1], *of_devices, *([f"not known: {', '.join(unknown)}"] if unknown else [])]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        *("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        "",
    ]


# One key.


def _below(found: Sequence[Setting], key: str) -> list[Setting]:
    """Return the settings with this key or below it.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    exact = [setting for setting in found if setting.key == key]
    below = exact or [setting for setting in found if setting.key.startswith(f"{key}.")]
    if below:
        return below
    tables = {show_path(s.path[:depth]) for s in found for depth in range(1, len(s.path))}
    known = [*(setting.key for setting in found), *tables]
    hint = did_you_mean(key, known) or f" (tables: {', '.join(sorted(tables))})"
    raise ConfigError([f"--explain {key}: no such key{hint}"])


def _explain(setting: Setting) -> str:
    words = [f"{setting.key} = {_shown(setting.value, setting)}", f"  from     {setting.origin}"]
    is_required = setting.default is msgspec.NODEFAULT
    words.append(f"  default  {'none, it must be written' if is_required else _shown(setting.default, setting)}")
    if setting.allowed:
        words.append(f"  allowed  {setting.allowed}")
    doc = field_docs(setting.owner).get(setting.field, "")
    if doc:
        words += textwrap.wrap(doc, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(words)


def _shown(value: Any, setting: Setting) -> str:
    return "not set" if value is None else show_value(value, setting.path, max_characters=None)


def field_docs(owner: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring below each field of a Struct, read from its source; nothing where there is no source."""
    docs: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        if not issubclass(cls, msgspec.Struct) or cls is msgspec.Struct:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):  # defined where no source is kept
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                text = below.value
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    docs[field.target.id] = " ".join(text.value.split())
    return docs


# For programs.


def _as_json(loaded: Loaded, found: Sequence[Setting], hints: Sequence[str]) -> dict[str, Any]:
    return {
        "path": os.path.abspath(loaded.path),
        "platform": detect_platform(),
        "settings": [_explained(setting) for setting in found],
        "pipelines": {name: _pipeline_json(pipeline) for name, pipeline in loaded.pipelines.items()},
        "served": loaded.served,
        "warnings": hints,
        "why": loaded.why,
    }


def _memory_json(ledger: Ledger) -> dict[str, Any]:
    return {
        "devices": {name: msgspec.to_builtins(capacity) for name, capacity in ledger.capacities.items()},
        "stages": {entry.stage: msgspec.to_builtins(entry) | {"total": entry.total} for entry in ledger.entries},
    }


def _pipeline_json(pipeline: Pipeline) -> dict[str, Any]:
    edges = [{name: getattr(edge, name) for name in edge.__struct_fields__} for edge in pipeline.edges]
    names = {"serve_as": pipeline.serve_as, "aliases": pipeline.aliases}
    return names | {"voices": pipeline.voices, "edges": edges}


def _explained(setting: Setting) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "key": setting.key,
        "value": hide_secrets(setting.value, setting.path),
        "origin": str(setting.origin),
        "is_default": setting.origin == DEFAULT,
        "allowed": setting.allowed,
        "doc": field_docs(setting.owner).get(setting.field, ""),
    }
    if setting.default is not msgspec.NODEFAULT:
        shown["default"] = hide_secrets(setting.default, setting.path)
    return shown
