"""Stages' replicas that are told to sleep or to wake: who was asked, who has answered, and what did not work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from omni_bus.core.effects import Common, DropTimer, Send, SetTimer
from omni_bus.errors import BadInput
from omni_bus.wire.frames import AdminReply, Rest

if TYPE_CHECKING:
    from collections.abc import Callable

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
    asker: Peer | None
    """None: nobody asked, the deployment is arranged so."""
    call: int
    level: int
    waiting: dict[str, Peer]
    """Those that have not answered, by name."""
    failed: dict[str, str]
    """What did not work, by name."""


class Rests:
    """The orders under way; each that somebody asked for ends in one `AdminReply` that says whom it failed with.

    Replicas that come, or that a former coordinator had told otherwise, are told what the deployment is arranged to be.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._orders: dict[int, _Order] = {}
        self._num_orders = 0
        self._due: dict[str, None] = {}
        """Replicas to compare with the arrangement."""

    def begin(self, asker: Peer, call: int, args: dict[str, Any], now: float) -> list[Common]:
        """Tell replicas to sleep or wake.

        Raises:
            BadInput: the arguments are malformed.
        """
        try:
            wanted = msgspec.convert(args, RestArgs)
        except msgspec.ValidationError as error:
            raise BadInput(f"operation 'rest': {error}", field="args") from error
        order = _Order(asker, call, wanted.level, {}, {})
        for name in wanted.actors:
            actor = self._membership.named(name)
            if actor is not None and actor.role == "stage" and actor.is_ready:
                order.waiting[name] = actor.peer
            elif wanted.level:  # a process that loads comes up awake
                order.failed[name] = "it is not ready"
        return self._give(order, now)

    def compare(self, name: str) -> None:
        """Have `settle` compare a replica with the arrangement."""
        self._due[name] = None

    def settle(self, level: Callable[[str], int], outstanding: Callable[[str], int], now: float) -> list[Common]:
        """Tell those that are not as they are arranged to be; cheap where there are none.

        Args:
            level: at which a replica is to sleep, by its name.
            outstanding: requests that it takes part in; while there are any it is not told to sleep, since what is
                bound to it may not have reached it.
            now: monotonic seconds.
        """
        effects: list[Common] = []
        for name in list(self._due):
            actor, wanted = self._membership.named(name), level(name)
            if actor is not None and actor.is_ready and wanted and outstanding(name):
                continue
            del self._due[name]
            if actor is not None and actor.is_ready and actor.role == "stage" and (wanted or actor.level):
                effects += self._give(_Order(None, 0, wanted, {name: actor.peer}, {}), now)
        return effects

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
        """Take an answer; the last one ends the order. One that could not wake as it should is told again, later."""
        if actor.told == rested.number:
            actor.told, actor.level = 0, rested.level
        order, name = self._orders.get(rested.number), actor.peer.actor
        if order is None or order.waiting.get(name) != actor.peer:
            return []
        if rested.error is not None:
            if order.asker is None and not order.level:
                actor.told = rested.number
                return []
            order.failed[name] = rested.error.message
        del order.waiting[name]
        return [] if order.waiting else self._end(rested.number)

    def on_leave(self, actor: Actor) -> list[Common]:
        """A replica is gone, or whoever asked."""
        effects: list[Common] = []
        name = actor.peer.actor
        self._due.pop(name, None)
        for number, order in list(self._orders.items()):
            if order.asker == actor.peer:
                del self._orders[number]
                effects.append(DropTimer(("rest", str(number))))
            elif order.waiting.get(name) == actor.peer:
                del order.waiting[name]
                if order.level:
                    order.failed[name] = "its process ended"
                effects += [] if order.waiting else self._end(number)
        return effects

    def _give(self, order: _Order, now: float) -> list[Common]:
        """Begin with an order; what nobody asked for ends where a replica is told anew."""
        effects: list[Common] = []
        for number, former in list(self._orders.items()):
            if former.asker is None and former.waiting.keys() & order.waiting.keys():
                effects += self._end(number)
        self._num_orders += 1
        self._orders[self._num_orders] = order
        for name in order.waiting:
            actor = self._membership.named(name)
            assert actor is not None
            actor.told = self._num_orders
            actor.level = order.level or actor.level
        return [*effects, *self.repeat(self._num_orders, now)]

    def _end(self, number: int) -> list[Common]:
        order = self._orders.pop(number)
        reply = AdminReply(order.call, {"failed": order.failed})
        return [DropTimer(("rest", str(number))), *([Send(order.asker, reply)] if order.asker is not None else [])]
