"""Links that actors still hold to somebody who died while there was no coordinator to tell them.

A link is a socket, and memory that the other end was lent. Each hello names those that its actor holds. Whoever is at
the end of one and is no member has as long as anybody to say hello, unless it is known to be no more. Then all hear of
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import DropTimer, Send, SetTimer
from omni_bus.core.request import State
from omni_bus.wire.frames import Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.core.deaths import Deaths
    from omni_bus.core.effects import Common
    from omni_bus.core.membership import Membership
    from omni_bus.core.request import Request
    from omni_bus.ids import Peer, RequestId, Sender

MAX_TIES = 4096
"""Actors that are waited for at once; a hello may name any number, and what is not taken now is in the next one."""

_DUE = ("ties", "")


class Ties:
    """Those to whom others hold links and who have not said hello.

    Args:
        membership: who is here.
        deaths: which processes are known to have ended.
        requests: those that live; an adopted one that waits for somebody is ended first, since its own error knows more
            than a client can conclude from a `Lost`.
        patience_s: how long one may take to say hello.
        on_told: called with each of whom all were told.
    """

    def __init__(
        self,
        membership: Membership,
        deaths: Deaths,
        requests: dict[RequestId, Request],
        patience_s: float,
        on_told: Callable[[Sender], None],
    ) -> None:
        self._membership = membership
        self._deaths = deaths
        self._requests = requests
        self._patience_s = patience_s
        self._on_told = on_told
        self._until: dict[Peer, float] = {}

    def take(self, peers: Iterable[Peer], now: float, *, until: float | None = None) -> list[Common]:
        """Note whoever is no member among peers that are linked to, and tell of those that are gone.

        Args:
            peers: whom somebody holds a link to.
            now: monotonic seconds.
            until: how long to wait for a hello of theirs; None is the usual patience.
        """
        due_at = now + self._patience_s if until is None else until
        for peer in peers:
            if self._membership.get(peer.sender) is None and (peer in self._until or len(self._until) < MAX_TIES):
                self._until[peer] = min(due_at, self._until.get(peer, due_at))
        return self.tell(now)

    def tell(self, now: float) -> list[Common]:
        """Tell all of those that are gone by now; call it whenever somebody may be, and when the timer is due."""
        if not self._until:
            return []
        effects: list[Common] = []
        for peer, until in list(self._until.items()):
            if self._membership.get(peer.sender) is not None:
                del self._until[peer]
            elif until <= now or self.is_gone(peer):
                if self._is_awaited(peer):
                    # The patience with that request began later; its end comes back here.
                    self._until[peer] = now + self._patience_s
                    continue
                del self._until[peer]
                self._on_told(peer.sender)
                effects += [Send(other.peer, Lost(peer, "it has not been heard of")) for other in self._membership]
        return [*effects, SetTimer(_DUE, min(self._until.values())) if self._until else DropTimer(_DUE)]

    def is_gone(self, peer: Peer) -> bool:
        """Whether an actor is known to be no more."""
        present = self._membership.named(peer.actor)
        return peer.sender in self._deaths or (present is not None and present.sender != peer.sender)

    def _is_awaited(self, peer: Peer) -> bool:
        return any(
            entry.is_adopted and entry.state is State.RUNNING and peer in (entry.client, *entry.pending.values())
            for entry in self._requests.values()
        )
