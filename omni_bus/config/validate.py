"""From a merged tree of plain values to typed tables; every reason against it, none left for a second try."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import msgspec

from omni_bus.config.allowed import allowed
from omni_bus.config.layer import Path, Problem, Table, show_path, show_value
from omni_bus.config.schema import CallerConfig, DeploymentConfig, GatewayConfig, Name, PipelineConfig, StageConfig
from omni_bus.engine import Engine
from omni_bus.errors import BadInput, did_you_mean
from omni_bus.wire.payloads import KINDS

AdapterClass: typing.TypeAlias = Callable[[str], type[Engine]]
"""From a stage's ``adapter`` to its class; raises `BadInput`."""

GatewayClass: typing.TypeAlias = Callable[[str], type[Any]]
"""From a gateway's ``protocol`` to its class; raises `BadInput`."""

FILE_KEYS = ("base", "platform")
"""Top-level keys that only a file may have; they are gone before the merged tree is checked."""

_NESTED = ("stages", "pipelines", "gateways", "callers")
_INVALID: Any = object()


class Draft(msgspec.Struct):
    """What could be understood; None where a table can't be read or a class is unknown."""

    stages: dict[str, StageConfig | None] = {}
    pipelines: dict[str, PipelineConfig | None] = {}
    gateways: dict[str, GatewayConfig | None] = {}
    callers: dict[str, CallerConfig] = {}
    rest: Table = {}
    adapters: dict[str, type[Engine] | None] = {}
    protocols: dict[str, type[Any] | None] = {}
    problems: list[Problem] = []

    def config(self) -> DeploymentConfig:
        """Return the deployment; only for a draft without problems."""
        bare = msgspec.convert({**self.rest, "stages": {}, "pipelines": {}}, DeploymentConfig)
        return msgspec.structs.replace(
            bare, stages=self.stages, pipelines=self.pipelines, gateways=self.gateways, callers=self.callers
        )


def validate(values: Table, name: str, adapter_class: AdapterClass | None, gateway_class: GatewayClass | None) -> Draft:
    """Check every table.

    Args:
        values: the merged tree.
        name: the deployment's name where the tree has none.
        adapter_class: looks adapters up; None leaves adapters' own keys unchecked.
        gateway_class: looks gateways up; None leaves gateways' own keys unchecked.
    """
    draft = Draft()
    top = {key: value for key, value in values.items() if key not in _NESTED}
    draft.rest = _fields(
        DeploymentConfig, {"name": name, **top}, (), draft.problems, skip=_NESTED, also_known=FILE_KEYS
    )
    for stage, table, path in _tables(values, "stages", draft.problems):
        _stage(stage, table, path, draft, adapter_class)
    for pipeline, table, path in _tables(values, "pipelines", draft.problems):
        named = {**table, "serve_as": table.get("serve_as") or pipeline}
        found = convert(named, PipelineConfig, path, draft.problems)
        draft.pipelines[pipeline] = _readable(PipelineConfig, named) if found is None else found
    for gateway, table, path in _tables(values, "gateways", draft.problems):
        _gateway(gateway, table, path, draft, gateway_class)
    for caller, table, path in _tables(values, "callers", draft.problems):
        _caller(caller, table, path, draft)
    for section, found in (("stages", draft.adapters), ("pipelines", draft.pipelines), ("gateways", draft.gateways)):
        if isinstance(values.get(section), dict):  # a name whose table is no table is still a known name
            found.update({name: None for name in values[section] if name not in found})
    return draft


def _tables(values: Table, section: str, problems: list[Problem]) -> Iterable[tuple[str, Table, Path]]:
    tables = values.get(section, {})
    if not isinstance(tables, dict):
        problems.append(Problem((section,), f"{show_value(tables)} is not allowed; allowed: tables [{section}.NAME]"))
        return
    for name, table in cast(Table, tables).items():
        path = (section, name)
        if isinstance(table, dict):
            yield name, cast(Table, table), path
        else:
            problems.append(Problem(path, f"{show_value(table, path)} is not allowed; allowed: a table"))


def _stage(name: str, table: Table, path: Path, draft: Draft, adapter_class: AdapterClass | None) -> None:
    draft.stages[name], draft.adapters[name] = None, None
    own, options = _split(StageConfig, table)
    adapter = own.get("adapter")
    if adapter_class is not None and isinstance(adapter, str):
        draft.adapters[name] = _look_up(adapter_class, adapter, (*path, "adapter"), draft.problems, _adapter_faults)
    if adapter is None:  # whose keys the others are is not known, but `adaptor` can be told
        known = [field.encode_name for field in msgspec.structs.fields(StageConfig) if field.name != "options"]
        hints = {key: did_you_mean(key, known) for key in options}
        draft.problems.extend(Problem((*path, key), f"unknown key{hint}") for key, hint in hints.items() if hint)
    found = draft.adapters[name]
    draft.stages[name] = _typed(StageConfig, own, options, path, draft.problems)
    if found is not None:
        checked = _options(found, StageConfig, options, path, draft.problems)
        if checked is not _INVALID:
            draft.problems.extend(_placed(path, found, reason) for reason in found.check(checked))
        if draft.stages[name] is not None:
            convert(own.get("params", {}), found.Params, (*path, "params"), draft.problems)


def _placed(path: Path, found: type[Any], reason: str) -> Problem:
    """Return a class's reason at the key that it begins with (``model: there is no …``), else at its table."""
    key, colon, rest = reason.partition(": ")
    keys = {"adapter", *(field.encode_name for field in msgspec.structs.fields(found.Options))}
    return Problem((*path, key), rest) if colon and key in keys else Problem(path, reason)


def _gateway(name: str, table: Table, path: Path, draft: Draft, gateway_class: GatewayClass | None) -> None:
    draft.gateways[name], draft.protocols[name] = None, None
    own, options = _split(GatewayConfig, table)
    own["protocol"] = protocol = own.get("protocol") or name
    if gateway_class is not None and isinstance(protocol, str):
        at = (*path, "protocol") if "protocol" in table else path
        draft.protocols[name] = _look_up(gateway_class, protocol, at, draft.problems, _gateway_faults)
    found = draft.protocols[name]
    typed = _typed(GatewayConfig, own, options, path, draft.problems)
    draft.gateways[name] = _readable(GatewayConfig, own) if typed is None else typed
    if found is not None:
        checked = _options(found, GatewayConfig, options, path, draft.problems)
        check = getattr(found, "check", None)
        if checked is not _INVALID and check is not None:
            draft.problems.extend(_placed(path, found, reason) for reason in check(checked))


def _caller(name: str, table: Table, path: Path, draft: Draft) -> None:
    _check(name, Name, path, draft.problems)
    found: CallerConfig | None = convert(table, CallerConfig, path, draft.problems)
    if found is None:
        return
    if not (found.keys or found.key_env or found.key_file):
        draft.problems.append(Problem(path, "has no key; add keys, key_env or key_file"))
    if found.burst is not None and found.requests_per_minute is None:
        draft.problems.append(Problem((*path, "burst"), "has no meaning without requests_per_minute"))
    for other, known in draft.callers.items():
        if set(found.keys) & set(known.keys):
            draft.problems.append(Problem((*path, "keys"), f"caller '{other}' has one of these keys already"))
    draft.callers[name] = found


def _split(cls: type[msgspec.Struct], table: Table) -> tuple[Table, Table]:
    """Part a table into the Struct's own keys and the adapter's or gateway's."""
    own = {field.encode_name for field in msgspec.structs.fields(cls)} - {"options"}
    return (
        {key: value for key, value in table.items() if key in own},
        {key: value for key, value in table.items() if key not in own},
    )


def _typed(cls: type[Any], own: Table, options: Table, path: Path, problems: list[Problem]) -> Any:
    struct = convert(own, cls, path, problems)
    return None if struct is None else msgspec.structs.replace(struct, options=options)


def _readable(cls: type[Any], table: Table) -> Any:
    """Return what can be read of a table with known problems, so that its graph is checked all the same; or None.

    An edge that is no text becomes an empty one: those after it keep their places.
    """
    edges = table.get("edges")
    if isinstance(edges, list):
        texts = [edge if isinstance(edge, str) else "" for edge in cast(list[Any], edges)]
        table = {**table, "edges": texts}
    good = _fields(cls, table, (), [])
    try:
        return msgspec.convert(good, cls)
    except msgspec.ValidationError:  # a required key is missing
        return None


def _options(found: Any, cls: type[msgspec.Struct], options: Table, path: Path, problems: list[Problem]) -> Any:
    """Return the adapter's or gateway's own keys in its `Options`, or `_INVALID`."""
    also_known = [field.encode_name for field in msgspec.structs.fields(cls) if field.name != "options"]
    struct = convert(options, found.Options, path, problems, also_known=also_known)
    return _INVALID if struct is None else struct


def _look_up(
    class_of: Callable[[str], type[Any]],
    name: str,
    path: Path,
    problems: list[Problem],
    faults: Callable[[Any], list[str]],
) -> type[Any] | None:
    try:
        found = class_of(name)
    except BadInput as error:
        problems.append(Problem(path, error.message))
        return None
    reasons = faults(found)
    problems.extend(Problem(path, f"'{name}' can't be used: {reason}") for reason in reasons)
    return None if reasons else found


def _adapter_faults(found: Any) -> list[str]:
    if not (isinstance(found, type) and issubclass(found, Engine)):
        return [f"{found!r} is not a subclass of omni_bus.engine.Engine"]
    reasons: list[str] = []
    for attribute in ("accepts", "emits"):
        ports: Any = getattr(found, attribute, None)
        if not isinstance(ports, dict):
            reasons.append(f"its class has no '{attribute}', a dict of ports and payload kinds")
            continue
        for port, kind in cast(dict[Any, Any], ports).items():
            if kind not in KINDS:
                reasons.append(f"its {attribute}[{port!r}] is {kind!r}; allowed: {', '.join(KINDS)}")
    return reasons


def _gateway_faults(found: Any) -> list[str]:
    options = getattr(found, "Options", None)
    reasons: list[str] = []
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        reasons.append("its class has no 'Options', a msgspec Struct")
    if not callable(getattr(found, "can_serve", None)):
        reasons.append("its class has no 'can_serve(pipeline)'")
    return reasons


def convert(
    table: Table, cls: type[msgspec.Struct], path: Path, problems: list[Problem], also_known: Iterable[str] = ()
) -> Any:
    """Return the table as a Struct; None after noting every reason why not.

    Args:
        table: plain values.
        cls: the Struct.
        path: where the table is.
        problems: reasons are added here.
        also_known: keys to suggest besides the Struct's own, for one that neither knows.
    """
    before = len(problems)
    good = _fields(cls, table, path, problems, also_known=also_known)
    if len(problems) > before:
        return None
    try:
        return msgspec.convert(good, cls)
    except msgspec.ValidationError as error:  # the Struct's own __post_init__
        problems.append(Problem(path, str(error)))
        return None


def _fields(
    cls: type[msgspec.Struct],
    table: Table,
    path: Path,
    problems: list[Problem],
    *,
    skip: Iterable[str] = (),
    also_known: Iterable[str] = (),
) -> Table:
    """Check each key against the Struct's field of that name; return the good ones."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    known = sorted({*fields, *also_known} - ({"options"} if cls in (StageConfig, GatewayConfig) else set()))
    good: Table = {}
    for key, value in table.items():
        if key not in fields:
            problems.append(Problem((*path, key), _unknown_key(key, known)))
            continue
        checked = _check(value, fields[key].type, (*path, key), problems)
        if checked is not _INVALID:
            good[key] = checked
    for key, field in fields.items():
        if field.required and key not in table and key not in skip:
            words = allowed(field.type)
            problems.append(Problem((*path, key), "is missing" + (f"; allowed: {words}" if words else "")))
    return good


def _unknown_key(key: str, known: list[str]) -> str:
    return f"unknown key{did_you_mean(key, known)} (known: {', '.join(known) or 'none'})"


def _check(value: Any, kind: Any, path: Path, problems: list[Problem]) -> Any:
    """Return the value if its field may hold it, else `_INVALID`; goes into lists and tables to find every reason."""
    before = len(problems)
    inner = _inner_kind(kind, value)
    if inner is not None and isinstance(value, list):
        for index, item in enumerate(cast(list[Any], value)):
            _check(item, inner, (*path, index), problems)
    elif isinstance(inner, _Whole):
        _fields(inner.kind, value, path, problems)
    elif inner is not None:
        for key, item in value.items():
            _check(item, inner, (*path, key), problems)
    elif isinstance(value, float) and not math.isfinite(value):
        problems.append(Problem(path, f"{value} is not allowed; allowed: a finite number"))
    if len(problems) == before:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problems.append(Problem(path, _not_allowed(value, kind, path, error)))
    return cast(Any, value) if len(problems) == before else _INVALID


class _Whole(NamedTuple):
    """The Struct that a table is, other than one that each of its values is."""

    kind: type[msgspec.Struct]


def _inner_kind(kind: Any, value: Any) -> Any:
    """Return the type of a list's items, of a table's values, or a table's Struct; None where one check does it all."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _inner_kind(typing.get_args(kind)[0], value)
    if origin in (typing.Union, types.UnionType):
        inner = [found for arm in typing.get_args(kind) if (found := _inner_kind(arm, value)) is not None]
        return inner[0] if len(inner) == 1 else None
    if isinstance(value, list):
        arguments = typing.get_args(kind)
        is_uniform = origin in (list, set, frozenset) or (origin is tuple and arguments[-1] is Ellipsis)
        return arguments[0] if is_uniform else None
    if isinstance(value, dict):
        if origin is dict:
            return typing.get_args(kind)[1]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return _Whole(kind) if kind.__struct_config__.tag is None else None
    return None


def _not_allowed(value: Any, kind: Any, path: Path, error: msgspec.ValidationError) -> str:
    words = allowed(kind) or str(error)
    return f"{show_value(value, path)} is not allowed; allowed: {words}"


def show_problem(problem: Problem, origin: object) -> str:
    """Write a problem on one line: where, which key, why."""
    place = f"{origin}: " if origin else ""
    key = f"{show_path(problem.path)}: " if problem.path else ""
    return f"{place}{key}{problem.message}"
