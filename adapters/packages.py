"""What an adapter needs installed, for its `check`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def missing(adapter: str, needed: Mapping[str, Iterable[str]]) -> list[str]:
    """Return what to say of packages that are not there; imports nothing.

    Args:
        adapter: its name.
        needed: import names, by the command that installs them.
    """
    absent = {how: [name for name in names if importlib.util.find_spec(name) is None] for how, names in needed.items()}
    return [f"adapter: {adapter} needs {', '.join(names)} ({how})" for how, names in absent.items() if names]
