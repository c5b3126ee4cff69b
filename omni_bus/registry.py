"""From a name or ``module:Class`` to the class: the built-in tables first, then entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from omni_bus.errors import BadInput, unknown_name

ADAPTER_GROUP = "omni_bus.adapters"
GATEWAY_GROUP = "omni_bus.gateways"


def load_class(what: str, name: str, table: dict[str, str], group: str) -> type[Any]:
    """Return the class that `name` stands for.

    Args:
        what: the word for error messages, ``adapter`` or ``gateway``.
        name: a key of `table`, the name of an entry point of `group`, or ``module:Class``.
        table: names and ``module:Class`` strings.
        group: the entry point group of third parties.

    Raises:
        UnknownName: no such name; lists the known ones.
        BadInput: the module or class can't be imported; says why.
    """
    target = name if ":" in name else table.get(name, "")
    if not target:
        found = {point.name: point.value for point in entry_points(group=group)}
        if name not in found:
            raise unknown_name(what, name, [*table, *found], field=what)
        target = found[name]
    module_name, _, class_name = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a third party's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{what} '{name}' can't be loaded from {target}: {reason}", field=what) from error
