"""A stage's side of sleep: which order its engine carries out when, and what the coordinator is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Common, SetLevel
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.member import Member
    from omni_bus.errors import OmniBusError
    from omni_bus.wire.frames import Rest


class Resting:
    """Orders in, effects out: an engine sleeps once it holds no request, and wakes at once.

    Args:
        member: who answers, and tells in each hello at which level the engine sleeps.
        is_empty: whether the stage and its engine hold no request.
    """

    def __init__(self, member: Member, is_empty: Callable[[], bool]) -> None:
        self._member = member
        self._is_empty = is_empty
        self._waiting: dict[int, Rest] = {}
        """Orders to the same level that the engine has not got, by number."""
        self._current: dict[int, Rest] = {}
        """Those that it is carrying out."""

    @property
    def is_idle(self) -> bool:
        """No order waits or is carried out."""
        return not self._waiting and not self._current

    def on_rest(self, order: Rest) -> list[Common | SetLevel]:
        """Take an order; one that comes again while it is carried out is answered once.

        It takes the place of those that wait: whoever gave them has thought better of it, or is gone.
        """
        if order == self._current.get(order.number) and not self._waiting:
            return []
        if any(waiting.level != order.level for waiting in self._waiting.values()):
            self._waiting.clear()
        self._waiting[order.number] = order
        return self.go_on()

    def go_on(self) -> list[Common | SetLevel]:
        """Carry out what waits; to be called whenever the last request may have left."""
        effects = self._next()
        orders = (*self._current.values(), *self._waiting.values())
        self._member.next_level = max((order.level for order in orders), default=0)
        return effects

    def _next(self) -> list[Common | SetLevel]:
        if self._current or not self._waiting:
            return []
        wanted, level = next(iter(self._waiting.values())).level, self._member.level
        if wanted == level:
            return self._answer(self._take(), None)
        if wanted and level:
            allowed = f"{level}, at which it sleeps, until it is woken"
            message = f"level: {wanted} came (allowed: {allowed})"
            return self._answer(self._take(), BadInput(message, field="level"))
        if wanted and not self._is_empty():
            return []
        self._current = self._take()
        return [SetLevel(wanted)]

    def on_level(self, error: OmniBusError | None, *, is_broken: bool = False) -> list[Common | SetLevel]:
        """The engine has done what the last `SetLevel` says, or could not.

        Args:
            error: why it could not; it is as before, unless `is_broken`.
            is_broken: it may be half unloaded. So it counts as asleep: to be woken loads it again.
        """
        current, self._current = self._current, {}
        level = next(iter(current.values())).level
        if error is None or (is_broken and level):
            self._member.level = level
        return [*self._answer(current, error), *self.go_on()]

    def _take(self) -> dict[int, Rest]:
        taken, self._waiting = self._waiting, {}
        return taken

    def _answer(self, orders: dict[int, Rest], error: OmniBusError | None) -> list[Common | SetLevel]:
        return [effect for number in orders for effect in self._member.rested(number, error)]
