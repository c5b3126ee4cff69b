"""Which replica a request is bound to: the one with the least outstanding work.

That is known exactly, since the coordinator sees each beginning and each end.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.core.membership import Actor
    from omni_bus.ids import Peer, Sender


class Bindings:
    """Outstanding requests by replica."""

    def __init__(self) -> None:
        self._outstanding: Counter[Sender] = Counter()

    def outstanding(self, replica: Sender) -> int:
        """Requests that are bound to this replica and have not ended there."""
        return self._outstanding[replica]

    @property
    def total(self) -> int:
        """Bound and not ended, over all replicas."""
        return self._outstanding.total()

    def bind(self, replicas: Sequence[Actor]) -> Peer:
        """Choose among replicas (at least one) and count the request; ties go to the lowest number."""
        chosen = min(replicas, key=lambda actor: (self._outstanding[actor.sender], actor.replica))
        self._outstanding[chosen.sender] += 1
        return chosen.peer

    def rebind(self, replica: Sender) -> None:
        """Count a request that was bound by a former coordinator."""
        self._outstanding[replica] += 1

    def release(self, replica: Sender) -> None:
        """The request ended at this replica."""
        self._outstanding[replica] -= 1
        if self._outstanding[replica] <= 0:
            del self._outstanding[replica]
