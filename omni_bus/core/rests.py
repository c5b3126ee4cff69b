"""Stages' replicas that are told to sleep or to wake: who was asked, who has answered, and what did not work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from omni_bus.core.effects import Common, DropTimer, Send, SetTimer
from omni_bus.errors import BadInput
from omni_bus.wire.frames import AdminReply, Rest

if TYPE_CHECKING:
    from omni_bus.core.membership import Actor, Membership
    from omni_bus.ids import Peer
    from omni_bus.wire.frames import Rested

REPEAT_S = 5.0
"""An order that is not answered within this is given again: a connection that broke may have lost it."""


class RestArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of ``rest``: these replicas are to sleep at a level, or with 0 to wake."""

    actors: tuple[str, ...]
    level: Annotated[int, msgspec.Meta(ge=0, le=2)]


class _Order(msgspec.Struct):
    asker: Peer
    call: int
    level: int
    waiting: dict[str, Peer]
    """Those that have not answered, by name."""
    failed: dict[str, str]
    """What did not work, by name."""


class Rests:
    """The orders under way; each ends in one `AdminReply` that says whom it failed with."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._orders: dict[int, _Order] = {}
        self._num_orders = 0

    def begin(self, asker: Peer, call: int, args: dict[str, Any], now: float) -> list[Common]:
        """Tell replicas to sleep or wake.

        Raises:
            BadInput: the arguments are malformed.
        """
        try:
            wanted = msgspec.convert(args, RestArgs)
        except msgspec.ValidationError as error:
            raise BadInput(f"operation 'rest': {error}", field="args") from error
        self._num_orders += 1
        order = self._orders[self._num_orders] = _Order(asker, call, wanted.level, {}, {})
        for name in wanted.actors:
            actor = self._membership.named(name)
            if actor is None or actor.role != "stage" or not actor.is_ready:
                order.failed[name] = "it is not ready"
            else:
                order.waiting[name] = actor.peer
        return self.repeat(self._num_orders, now)

    def repeat(self, number: int, now: float) -> list[Common]:
        """Give the order to those who have not answered, for the first time or again."""
        order = self._orders.get(number)
        if order is None:
            return []
        if not order.waiting:
            return self._end(number)
        rests: list[Common] = [Send(peer, Rest(number, order.level)) for peer in order.waiting.values()]
        return [*rests, SetTimer(("rest", str(number)), now + REPEAT_S)]

    def on_rested(self, actor: Actor, rested: Rested) -> list[Common]:
        """Take an answer; the last one ends the order."""
        order = self._orders.get(rested.number)
        if order is None or order.waiting.get(actor.peer.actor) != actor.peer:
            return []
        del order.waiting[actor.peer.actor]
        if rested.error is not None:
            order.failed[actor.peer.actor] = rested.error.message
        return [] if order.waiting else self._end(rested.number)

    def on_leave(self, actor: Actor) -> list[Common]:
        """A replica is gone, or whoever asked."""
        effects: list[Common] = []
        for number, order in list(self._orders.items()):
            if order.asker == actor.peer:
                del self._orders[number]
                effects.append(DropTimer(("rest", str(number))))
            elif order.waiting.get(actor.peer.actor) == actor.peer:
                del order.waiting[actor.peer.actor]
                order.failed[actor.peer.actor] = "its process ended"
                effects += [] if order.waiting else self._end(number)
        return effects

    def _end(self, number: int) -> list[Common]:
        order = self._orders.pop(number)
        return [
            DropTimer(("rest", str(number))),
            Send(order.asker, AdminReply(order.call, {"failed": order.failed})),
        ]
