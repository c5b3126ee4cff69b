"""Slots of keys and values: which are free, and which beginnings of prompts they still hold.

A slot keeps what was computed in it after its request has ended, until another takes it. A prompt that begins as one
that some slot holds goes on from there: in that slot if it is free, else in a copy. Only whole pieces of prompts are
shared, those that a prompt is read in, so that it has the same bits with and without a hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class Taken(NamedTuple):
    """A slot for a request."""

    slot: int
    num_shared: int
    """Tokens of the prompt that are computed already."""
    source: int
    """The slot where their keys and values are."""


@dataclass(slots=True)
class _Held:
    """What of a prompt a slot holds."""

    ids: Sequence[int]
    key: Hashable
    num_tokens: int
    """Whole pieces."""


class Slots:
    """Slots of one pool.

    Args:
        num_slots: that there are.
        piece: tokens of a prompt that are read in one step.
    """

    def __init__(self, num_slots: int, piece: int) -> None:
        self._piece = piece
        self._free = list(range(num_slots - 1, -1, -1))
        """The one that was freed last comes last."""
        self._held: dict[int, _Held] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self, ids: Sequence[int], key: Hashable | None) -> Taken:
        """Take a free slot.

        Args:
            ids: the prompt.
            key: what else keys and values depend on; prompts of different ones share nothing, nor do those of None.
        """
        source, num_shared = -1, 0
        for slot, held in self._held.items() if key is not None else ():
            num = self._num_shared(held, ids) if held.key == key else 0
            if num > num_shared or (num and num == num_shared and slot in self._free):
                source, num_shared = slot, num
        slot = source if source in self._free else self._next_free()
        self._free.remove(slot)
        self._held.pop(slot, None)
        if key is not None:
            self._held[slot] = _Held(ids, key, num_shared)
        return Taken(slot, num_shared, source if num_shared else slot)

    def _num_shared(self, held: _Held, ids: Sequence[int]) -> int:
        num = 0
        # The last token is always computed: the answer begins after it.
        while (end := num + self._piece) <= min(held.num_tokens, len(ids) - 1) and held.ids[num:end] == ids[num:end]:
            num = end
        return num

    def _next_free(self) -> int:
        """Return the free slot whose loss costs least: the last used of those that hold nothing, else the oldest."""
        held = self._held
        empty = (slot for slot in reversed(self._free) if slot not in held or not held[slot].num_tokens)
        return next(empty, self._free[0])

    def hold(self, slot: int, num_tokens: int) -> None:
        """Note that keys and values of the first so many tokens of a slot's prompt are in it."""
        held = self._held.get(slot)
        if held is not None:
            held.num_tokens = min(num_tokens, len(held.ids)) // self._piece * self._piece

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def forget(self, slot: int) -> None:
        """Share nothing of what a slot holds."""
        self._held.pop(slot, None)
