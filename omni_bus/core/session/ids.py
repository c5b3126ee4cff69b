"""Names of what a session makes: the same for the same session, unlike those of others."""

from __future__ import annotations


class Ids:
    """Counts from a seed that no other session has."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._num = 0

    def new(self, kind: str) -> str:
        """Return the next name, such as ``item_7f3a01c2_1b``."""
        self._num += 1
        return f"{kind}_{self._seed}_{self._num:x}"
