"""Incarnations of which it is certain that they are no more: their supervisor has seen their processes end.

Whoever is only silent may come back; these can't, whatever of theirs still arrives. A supervisor tells each coordinator
of those that ended lately, since requests of a former one may still wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_bus.ids import Sender

MAX_DEATHS = 256
"""The last ones are kept, by supervisors and by the coordinator. A request that is still bound to an earlier one has
been told of that, or ends when the patience with whoever said no hello is over."""


class Deaths:
    """The last ended processes, and whether all that each had sent has arrived."""

    def __init__(self) -> None:
        self._settled: dict[Sender, bool] = {}

    def __contains__(self, sender: Sender) -> bool:
        return sender in self._settled

    def note(self, sender: Sender, *, is_settled: bool) -> None:
        """Remember one; the oldest is forgotten for it if there are too many."""
        self._settled.pop(sender, None)
        self._settled[sender] = is_settled
        if len(self._settled) > MAX_DEATHS:
            del self._settled[next(iter(self._settled))]

    def has_cut_short(self, sender: Sender) -> bool:
        """Whether a process ended with work undone, or with frames under way."""
        return not self._settled.get(sender, True)
