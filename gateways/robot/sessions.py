"""Which session of a socket an observation belongs to, and whether it begins: pure."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT = "default"
"""The session of a client that names none."""

MAX_SEEN = 1024
"""Sessions of a socket that are told apart at once; the least recently used one is forgotten first."""


class Turn(NamedTuple):
    """An observation's place."""

    session: str
    is_first: bool
    forget: tuple[str, ...] = ()
    """Sessions that are over by it."""


class Sessions:
    """Those of one socket.

    Args:
        is_multi: several may alternate, each with its own state; else every change of the name begins a session anew.
    """

    def __init__(self, *, is_multi: bool) -> None:
        self._is_multi = is_multi
        self._current: str | None = None
        self._seen: dict[str, None] = {}

    def infer(self, name: str = "") -> Turn:
        """Place an observation that names a session, or none."""
        session = name or self._current or DEFAULT
        is_first = session not in self._seen
        forget: tuple[str, ...] = ()
        if is_first:
            kept = MAX_SEEN - 1 if self._is_multi else 0
            forget = tuple(list(self._seen)[: max(0, len(self._seen) - kept)])
        for over in (*forget, session):
            self._seen.pop(over, None)
        self._seen[session] = None
        self._current = session
        return Turn(session, is_first, forget)

    def restart(self) -> None:
        """Their states are gone: each begins anew, and who names none goes on with the current one."""
        self._seen.clear()

    def reset(self) -> None:
        """Forget all of them, the current one too."""
        self._current = None
        self._seen.clear()
