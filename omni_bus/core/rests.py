"""Stages' replicas that are told to sleep or to wake: who was asked, who has answered, and what did not work."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from omni_bus.core.effects import Common, DropTimer, Report, Send, SetTimer
from omni_bus.errors import BadInput
from omni_bus.wire.frames import AdminReply, Rest

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.membership import Actor, Membership
    from omni_bus.ids import Peer
    from omni_bus.wire.frames import Rested

REPEAT_S = 5.0
"""An order that is not answered within this is given again: a connection that broke may have lost it."""

MAX_REPEAT_S = 80.0
"""A replica that could not wake tries again after `REPEAT_S`, then after ever twice as long, up to this."""


class RestArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of ``rest``: these replicas are to sleep at a level, or with 0 to wake.

    One that makes no progress for `timeout_s` has failed; it stays, or becomes again, what it is arranged to be.
    """

    actors: tuple[str, ...]
    level: Annotated[int, msgspec.Meta(ge=0, le=2)]
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = inf


class _Order(msgspec.Struct):
    asker: Peer | None
    """None: nobody asked, the deployment is arranged so."""
    call: int
    level: int
    waiting: dict[str, Peer]
    """Those that have not answered, by name."""
    failed: dict[str, str]
    """What did not work, by name."""
    timeout_s: float = inf
    """Without progress."""
    moved_at: dict[str, float] = {}
    """When those that it waits for made progress."""
    num_failures: int = 0
    """Times that what nobody asked for did not work."""


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
        self._left: dict[str, Actor] = {}
        """The last of each name that left with an order unanswered."""

    def begin(self, asker: Peer, call: int, args: dict[str, Any], now: float) -> list[Common]:
        """Tell replicas to sleep or wake.

        Raises:
            BadInput: the arguments are malformed.
        """
        try:
            wanted = msgspec.convert(args, RestArgs)
        except msgspec.ValidationError as error:
            raise BadInput(f"operation 'rest': {error}", field="args") from error
        order = _Order(asker, call, wanted.level, {}, {}, wanted.timeout_s)
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

    def on_progress(self, actor: Actor, now: float) -> None:
        """A replica is further on its way than it was."""
        for order in self._orders.values():
            if order.waiting.get(actor.peer.actor) == actor.peer:
                order.moved_at[actor.peer.actor] = now

    def on_timer(self, number: int, now: float) -> list[Common]:
        """Give up those who make no progress; give the order again to the others who have not answered."""
        order = self._orders.get(number)
        if order is None:
            return []
        for name in [name for name in order.waiting if order.moved_at[name] + order.timeout_s <= now]:
            actor = self._membership.named(name)
            assert actor is not None
            order.failed[name] = f"no progress for {order.timeout_s:g} s in phase '{actor.phase}' (start_timeout_s)"
            del order.waiting[name]
            if not order.level:
                self.compare(name)  # should it wake after all, nobody would know that it had
        return self._tell(number, now)

    def on_rested(self, actor: Actor, rested: Rested, now: float) -> list[Common]:
        """Take an answer; the last one ends the order. One that could not wake as it should is told again, later.

        It may answer a former coordinator, whose orders had the same numbers: then nobody here has asked for the level.
        """
        order, name = self._orders.get(rested.number), actor.peer.actor
        if order is not None and order.waiting.get(name) != actor.peer:
            order = None
        if order is not None and rested.error is None and rested.level != order.level:
            return []  # the answer to ours is still to come
        if actor.told in {0, rested.number}:
            if not actor.told:
                self.compare(name)
            actor.told, actor.level = 0, rested.level
        if order is None:
            return []
        if rested.error is not None:
            if order.asker is None and not order.level:
                actor.told = rested.number
                return self._put_off(rested.number, name, rested.error.message, now)
            order.failed[name] = rested.error.message
        del order.waiting[name]
        return [] if order.waiting else self._end(rested.number)

    def _put_off(self, number: int, name: str, why: str, now: float) -> list[Common]:
        """Try again later; a reason is told once, until there is another."""
        order = self._orders[number]
        pause_s = min(REPEAT_S * 2**order.num_failures, MAX_REPEAT_S)
        order.num_failures += 1
        is_told = order.failed.get(name) == why
        order.failed[name] = why
        told: list[Common] = [] if is_told else [Report("replica does not wake", {"name": name, "error": why})]
        return [*told, SetTimer(("rest", str(number)), now + pause_s)]

    def on_join(self, actor: Actor) -> None:
        """An actor is new here, or was taken for gone: then an order may be on its way to it still."""
        former = self._left.pop(actor.peer.actor, None)
        if former is not None and former.peer == actor.peer:
            actor.level, actor.told = former.level, former.told

    def on_leave(self, actor: Actor) -> list[Common]:
        """A replica is gone, or whoever asked."""
        effects: list[Common] = []
        name = actor.peer.actor
        self._due.pop(name, None)
        if actor.told:
            self._left[name] = actor
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
            order.moved_at[name] = now
        return [*effects, *self._tell(self._num_orders, now)]

    def _tell(self, number: int, now: float) -> list[Common]:
        """Give the order to those who have not answered, for the first time or again."""
        order = self._orders[number]
        if not order.waiting:
            return self._end(number)
        rests: list[Common] = [Send(peer, Rest(number, order.level)) for peer in order.waiting.values()]
        gives_up_at = min(order.moved_at[name] for name in order.waiting) + order.timeout_s
        return [*rests, SetTimer(("rest", str(number)), min(now + REPEAT_S, gives_up_at))]

    def _end(self, number: int) -> list[Common]:
        order = self._orders.pop(number)
        reply = AdminReply(order.call, {"failed": order.failed})
        return [DropTimer(("rest", str(number))), *([Send(order.asker, reply)] if order.asker is not None else [])]
