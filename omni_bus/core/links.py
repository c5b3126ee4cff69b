"""What connections that break mean for requests: frames may be lost although both ends live.

Whose connection broke tells the coordinator (`Broken`). It may have broken because the other end died, which has rules
of its own (`omni_bus.core.recovery`); so the coordinator pings that end first, and acts once it knows that it lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Send
from omni_bus.core.recovery import is_retry_safe
from omni_bus.errors import LinkBroken
from omni_bus.wire.frames import Ping

if TYPE_CHECKING:
    from collections.abc import Container

    from omni_bus.core.effects import Common
    from omni_bus.core.membership import Actor
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.ids import Sender
    from omni_bus.wire.frames import Broken, Route

NONCE = 0
"""Of our pings; rounds of health count from 1."""

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


class BrokenLinks:
    """Breaks that wait for a sign of life of their target, and those that had one lately."""

    def __init__(self) -> None:
        self._by_target: dict[Sender, dict[Broken, None]] = {}
        self._settled_at: dict[Broken, float] = {}

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

    def remember(self, broken: Broken, now: float) -> None:
        """Note that what both ends were known to work on has been ended; the last `MAX_SETTLED` are remembered."""
        self._settled_at.pop(broken, None)
        self._settled_at[broken] = now
        if len(self._settled_at) > MAX_SETTLED:
            del self._settled_at[next(iter(self._settled_at))]

    def settled_since(self, since: float) -> list[Broken]:
        """Return the breaks whose requests were ended since then: a request that was adopted later is none of them."""
        return [broken for broken, at in self._settled_at.items() if at >= since]
