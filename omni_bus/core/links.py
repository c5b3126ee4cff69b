"""What connections that break mean for requests: frames may be lost although both ends live.

Whose connection broke tells the coordinator (`Broken`). It may have broken because the other end died, which has rules
of its own (`omni_bus.core.recovery`); so the coordinator pings that end first, and acts once it knows that it lives.

Whoever told of a break repeats it to the next coordinator until it is answered. The answer says that nobody has to be
told any more: it would be too early while what others were told of it may be lost with this coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from omni_bus.core.effects import Send
from omni_bus.core.recovery import is_retry_safe
from omni_bus.errors import LinkBroken
from omni_bus.wire.frames import Ping

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from omni_bus.core.effects import Common
    from omni_bus.core.membership import Actor
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.ids import Peer, Sender
    from omni_bus.wire.frames import Broken, Route

NONCE = 0
"""Of pings for a sign of life. Those for a confirmation count down from -1, rounds of health up from 1."""

MAX_TARGETS = 1024
"""Actors of whom a sign of life is waited for: above that, strangers are taken for gone."""

MAX_SETTLED = 1024
"""Breaks that are remembered for requests which are yet to be adopted."""


def error_for_broken(broken: Broken, route: Route, pending: Container[str], pipeline: Pipeline) -> LinkBroken | None:
    """Return the error that a request ends with when a connection broke; None if it does not concern the request.

    It does where the two ends share an edge and a stage among them is still at work: it may wait for frames that are
    lost. An edge carries chunks one way and credit the other.
    """
    ends = {broken.source.sender, broken.target.sender}
    for number, edge in enumerate(route.edges):
        at_work = edge.source if edge.source in pending else edge.target if edge.target in pending else ""
        if at_work and {route.source(number).sender, route.target(number).sender} == ends:
            return LinkBroken(
                f"the connection from {broken.source.actor} to {broken.target.actor} is broken, and stage '{at_work}' "
                "was at work on the request",
                stage=at_work,
                is_retry_safe=is_retry_safe(route, pipeline),
            )
    return None


class _Settled(msgspec.Struct):
    """A break whose requests, as far as they were known, have been ended."""

    at: float
    unconfirmed: dict[Sender, tuple[Peer, int]] = {}
    """Who was told something because of it and may not have it yet, with the nonce of the ping that went after it."""
    is_answered: bool = False


class BrokenLinks:
    """Breaks that wait for a sign of life of their target, and those that had one lately."""

    def __init__(self) -> None:
        self._by_target: dict[Sender, dict[Broken, None]] = {}
        self._settled: dict[Broken, _Settled] = {}
        self._num_confirmations = 0
        self._is_patient = False

    def suspect(self, broken: Broken, target: Actor) -> list[Common]:
        """Take a break whose target is, or was, a live actor; ask it."""
        self._by_target.setdefault(target.sender, {})[broken] = None
        return [Send(target.peer, Ping(NONCE))]

    def keep(self, broken: Broken) -> bool:
        """Take a break whose target has not said hello yet, and may: the coordinator is new. False: there are too many.

        Whoever sends it names the target, so that nothing else bounds them.
        """
        if broken.target.sender not in self._by_target and len(self._by_target) >= MAX_TARGETS:
            return False
        self._by_target.setdefault(broken.target.sender, {})[broken] = None
        return True

    def settle(self, target: Sender) -> list[Broken]:
        """Return and forget what waited for this actor, which lives, or is gone."""
        return list(self._by_target.pop(target, ()))

    def settle_others(self, name: str, present: Sender | None) -> list[Broken]:
        """Return and forget what waited for actors of that name, of whom only the present one lives."""
        gone = [target for target in self._by_target if target.actor == name and target != present]
        return [broken for target in gone for broken in self.settle(target)]

    # --- what became of them --------------------------------------------------------------------------------

    def remember(self, broken: Broken, now: float) -> None:
        """Note that what both ends were known to work on has been ended; the last `MAX_SETTLED` are remembered."""
        self._settled.pop(broken, None)
        self._settled[broken] = _Settled(now)
        if len(self._settled) > MAX_SETTLED:
            del self._settled[next(iter(self._settled))]

    def settled_since(self, since: float) -> list[Broken]:
        """Return the breaks whose requests were ended since then: a request that was adopted later is none of them."""
        return [broken for broken, settled in self._settled.items() if settled.at >= since]

    def is_settled(self, broken: Broken) -> bool:
        """Whether this very break is one of those: who repeats it has not had the answer."""
        return broken in self._settled

    def is_answered(self, broken: Broken) -> bool:
        """Whether all who were told because of it have confirmed that."""
        return self._settled[broken].is_answered

    def be_patient(self) -> None:
        """Answer nothing until `lose_patience`: requests that a break concerns may still have to be adopted."""
        self._is_patient = True

    def lose_patience(self) -> list[Broken]:
        """Return the breaks that can be answered now."""
        self._is_patient = False
        return self._answered(self._settled)

    def tell(self, broken: Broken, peers: Iterable[Peer]) -> list[Common]:
        """Have peers confirm that they have what was sent to them because of a break; call it after sending that."""
        settled = self._settled.get(broken)
        if settled is None:
            return []
        effects: list[Common] = []
        for peer in dict.fromkeys(peers):
            self._num_confirmations += 1
            settled.unconfirmed[peer.sender] = (peer, -self._num_confirmations)
            effects.append(Send(peer, Ping(-self._num_confirmations)))
        return effects

    def tell_again(self, peer: Peer) -> list[Common]:
        """Repeat what a peer has not confirmed, since it says hello: its connection may have broken."""
        effects: list[Common] = []
        for broken, settled in self._settled.items():
            if peer.sender in settled.unconfirmed:
                effects += [Send(peer, broken)] if broken.target == peer else []
                effects += self.tell(broken, (peer,))
        return effects

    def on_pong(self, sender: Sender, nonce: int) -> list[Broken]:
        """Take a confirmation; return the breaks that can be answered now."""
        found = [broken for broken, one in self._settled.items() if one.unconfirmed.get(sender, ("", 0))[1] == nonce]
        return self._confirmed(found, sender)

    def forget(self, sender: Sender) -> list[Broken]:
        """Expect nothing more of who is gone; return the breaks that can be answered now."""
        found = [broken for broken, settled in self._settled.items() if sender in settled.unconfirmed]
        return self._confirmed(found, sender)

    def _confirmed(self, found: list[Broken], sender: Sender) -> list[Broken]:
        for broken in found:
            del self._settled[broken].unconfirmed[sender]
        return self._answered(found)

    def _answered(self, candidates: Iterable[Broken]) -> list[Broken]:
        """Return those of whom nobody has to confirm anything, once."""
        answered: list[Broken] = []
        for broken in candidates:
            settled = self._settled[broken]
            if not self._is_patient and not settled.unconfirmed and not settled.is_answered:
                settled.is_answered = True
                answered.append(broken)
        return answered
