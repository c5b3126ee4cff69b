"""Whoever is no member and was sent something: the way to it is closed again, unless it becomes one.

A stranger's frames name the address that is answered, so nothing but these limits bounds how many ways it opens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Forget, SetTimer

if TYPE_CHECKING:
    from omni_bus.core.effects import Common
    from omni_bus.core.membership import Membership
    from omni_bus.ids import Peer

MAX_STRANGERS = 1024
"""Ways that are open at once; then the oldest is closed early."""

_DUE = ("strangers", "")


class Strangers:
    """Those who were sent something, in the order of the last time.

    Args:
        membership: who is one no more.
        patience_s: how long a way stays open for the answer.
    """

    def __init__(self, membership: Membership, patience_s: float) -> None:
        self._membership = membership
        self._patience_s = patience_s
        self._until: dict[Peer, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def met(self, peer: Peer, now: float) -> list[Common]:
        """Note that something is sent to a peer which is no member; call it with each such frame."""
        effects: list[Common] = [] if self._until else [SetTimer(_DUE, now + self._patience_s)]
        self._until.pop(peer, None)
        self._until[peer] = now + self._patience_s
        if len(self._until) > MAX_STRANGERS:
            effects += self._close(next(iter(self._until)))
        return effects

    def on_timer(self, now: float) -> list[Common]:
        """Close the ways whose time is over."""
        effects: list[Common] = []
        for peer in [peer for peer, until in self._until.items() if until <= now]:
            effects += self._close(peer)
        if self._until:
            effects.append(SetTimer(_DUE, next(iter(self._until.values()))))
        return effects

    def _close(self, peer: Peer) -> list[Common]:
        """A member's own way stays; it is closed when the member leaves."""
        del self._until[peer]
        member = self._membership.get(peer.sender)
        return [] if member is not None and member.peer == peer else [Forget(peer)]
