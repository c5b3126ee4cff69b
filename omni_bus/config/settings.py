"""A loaded deployment as a flat list of settings: what ``omni-bus check`` prints and explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from omni_bus.config.allowed import allowed
from omni_bus.config.layer import Origin, Path, show_path
from omni_bus.config.load import Loaded
from omni_bus.config.schema import (
    CallerConfig,
    DeploymentConfig,
    GatewayConfig,
    PipelineConfig,
    SecurityConfig,
    StageConfig,
)

_NESTED = ("security", "stages", "pipelines", "gateways", "callers")


class Setting(msgspec.Struct, frozen=True):
    """One key of the merged deployment."""

    path: Path
    value: Any
    """A plain value; None where the key has no value."""
    origin: Origin
    default: Any
    """`msgspec.NODEFAULT` for a key that must be written."""
    allowed: str
    owner: type[msgspec.Struct]
    """The Struct whose field it is; its source documents the field."""
    field: str

    @property
    def key(self) -> str:
        """The path as in TOML."""
        return show_path(self.path)


def settings(loaded: Loaded) -> list[Setting]:
    """Return every setting, defaults too, in the order of the schema."""
    config = loaded.config
    found = list(_of_struct(loaded, (), DeploymentConfig, _plain(config), skip=_NESTED))
    found += _of_struct(loaded, ("security",), SecurityConfig, _plain(config.security))
    for name, stage in config.stages.items():
        path = ("stages", name)
        found += _of_struct(loaded, path, StageConfig, _plain(stage), skip=("options", "params"))
        found += _of_struct(loaded, path, loaded.adapters[name].Options, stage.options)
        params = loaded.adapters[name].Params
        found += (s for s in _of_struct(loaded, (*path, "params"), params, stage.params) if s.field in stage.params)
    for name, pipeline in config.pipelines.items():
        found += _of_struct(loaded, ("pipelines", name), PipelineConfig, _plain(pipeline))
    for name, gateway in config.gateways.items():
        path = ("gateways", name)
        found += _of_struct(loaded, path, GatewayConfig, _plain(gateway), skip=("options",))
        found += _of_struct(loaded, path, loaded.protocols[name].Options, gateway.options)
    for name, caller in config.callers.items():
        found += _of_struct(loaded, ("callers", name), CallerConfig, _plain(caller))
    return found


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)


def _of_struct(
    loaded: Loaded, at: Path, owner: type[msgspec.Struct], values: dict[str, Any], skip: Iterable[str] = ()
) -> Iterator[Setting]:
    for field in msgspec.structs.fields(owner):
        if field.name in skip:
            continue
        path = (*at, field.encode_name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield Setting(
            path=path,
            value=msgspec.to_builtins(values.get(field.encode_name, default)),
            origin=loaded.origin(show_path(path)),
            default=default if default is msgspec.NODEFAULT else msgspec.to_builtins(default),
            allowed=allowed(field.type),
            owner=owner,
            field=field.name,
        )
