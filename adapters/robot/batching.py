"""Which observations go to the policy together, and when: pure, time is passed in.

An observation waits for others only while some are expected: a robot's next one is due a period after its last, so far
as its period is known. While the policy is free it waits at most `max_wait_s`, never past the moment at which the
policy must begin to meet the deadline, and not once the batch is full. (Robots that a batch has just answered are back
within a moment; one that waited for that batch would otherwise go alone, and all would wait for it, again and again.)
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

SMOOTHING = 0.3
"""Weight of the newest measure in a running mean."""

MARGIN_S = 0.001
"""What getting an answer from the policy to the robot takes, about; kept free before a deadline."""


class Waiting(msgspec.Struct, Generic[T], eq=False):
    """An observation that waits."""

    item: T
    robot: Hashable
    """Whose: no two of one robot are in a batch."""
    shape: Hashable
    """Observations of one shape can be stacked; others go in another batch, so that an odd one harms nobody."""
    arrived_at: float
    deadline: float | None = None


class Rhythm:
    """When a robot's next observation is due."""

    def __init__(self) -> None:
        self._last_at: float | None = None
        self._period_s: float | None = None

    def arrive(self, now: float) -> None:
        """One came."""
        if self._last_at is not None:
            gap = now - self._last_at
            self._period_s = gap if self._period_s is None else self._period_s + SMOOTHING * (gap - self._period_s)
        self._last_at = now

    @property
    def due_at(self) -> float | None:
        """The next one's moment; None while there is no telling."""
        if self._last_at is None or self._period_s is None:
            return None
        return self._last_at + self._period_s


class Durations:
    """How long the policy takes for a batch of each size, so far as it was seen."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        """A batch took so long."""
        mean = self._means.get(size)
        self._means[size] = seconds if mean is None else mean + SMOOTHING * (seconds - mean)

    def expected_s(self, size: int) -> float:
        """Return what a batch of this size will take: the nearest larger size's mean, else the largest one's."""
        if not self._means:
            return 0.0
        larger = [known for known in self._means if known >= size]
        return self._means[min(larger) if larger else max(self._means)]


class Batcher(Generic[T]):
    """The observations that wait, and the rhythm of those who send them.

    Args:
        max_batch_size: observations of one call to the policy.
        max_wait_s: what an observation waits for others at most while the policy is free.
    """

    def __init__(self, max_batch_size: int, max_wait_s: float) -> None:
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s
        self._waiting: list[Waiting[T]] = []
        self._rhythms: dict[Hashable, Rhythm] = {}
        self._free_since = 0.0
        self.durations = Durations()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting[T]) -> None:
        """An observation came."""
        self._waiting.append(waiting)
        self._rhythms.setdefault(waiting.robot, Rhythm()).arrive(waiting.arrived_at)

    def free(self, now: float) -> None:
        """The policy has done with a batch."""
        self._free_since = now

    def drop(self, waiting: Waiting[T]) -> None:
        """Nobody waits for its answer any more; unknown ones are ignored."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)

    def leave(self, robot: Hashable) -> None:
        """A robot is gone."""
        self._rhythms.pop(robot, None)
        self._waiting = [waiting for waiting in self._waiting if waiting.robot != robot]

    def due_at(self, now: float) -> float | None:
        """Return when the next batch shall begin if nothing else comes; None if nothing waits."""
        batch = self._next()
        if not batch:
            return None
        if len(batch) >= self._max_batch_size:
            return now
        latest = max(self._free_since, min(waiting.arrived_at for waiting in batch)) + self._max_wait_s
        for waiting in batch:
            if waiting.deadline is not None:
                start_by = waiting.deadline - self.durations.expected_s(len(batch) + 1) - MARGIN_S
                latest = min(latest, start_by)
        here = {waiting.robot for waiting in self._waiting}
        awaited = [
            due
            for robot, rhythm in self._rhythms.items()
            if robot not in here and (due := rhythm.due_at) is not None and now - self._max_wait_s < due <= latest
        ]
        if not awaited:
            return now
        # Whoever is late by more than the wait is not waited for: the batch goes when the last such patience ends.
        return max(now, min(latest, max(awaited) + self._max_wait_s))

    def take(self) -> Sequence[Waiting[T]]:
        """Return the next batch, which waits no more: the nearest deadlines first, then who came first."""
        batch = self._next()
        self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
        return batch

    def _next(self) -> list[Waiting[T]]:
        if not self._waiting:
            return []
        ordered = sorted(self._waiting, key=_urgency)
        head = ordered[0]
        batch: list[Waiting[T]] = []
        robots: set[Hashable] = set()
        for waiting in ordered:
            if waiting.shape == head.shape and waiting.robot not in robots and len(batch) < self._max_batch_size:
                batch.append(waiting)
                robots.add(waiting.robot)
        return batch


def _urgency(waiting: Waiting[T]) -> tuple[float, float]:
    return (float("inf") if waiting.deadline is None else waiting.deadline, waiting.arrived_at)
