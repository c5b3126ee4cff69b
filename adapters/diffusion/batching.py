"""Which waiting pieces of work run next: pure, without torch.

A request is a chain of units: one that only it can do (encode its prompt, decode its picture), or a model's call, which
joins the calls of others that have the same key, at whatever denoising step each of them is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import msgspec

from omni_bus.ids import RequestId


class Waiting(msgspec.Struct, frozen=True):
    """A request's next unit.

    `key` is None for one that runs alone; units of equal keys may run as one. `num_passed_over` counts the units of
    others that ran since this one waits.
    """

    request: RequestId
    key: Hashable | None
    priority: int = 0
    num_passed_over: int = 0


def choose(waiting: Sequence[Waiting], *, max_batch: int, max_passed_over: int) -> list[RequestId]:
    """Return the requests whose units run next, together; at least one if any waits.

    Who was passed over too often goes first, whatever its priority; then comes the highest priority. Among equals a
    unit that runs alone goes before a batch, since it lets a newcomer join one and a finished picture leave; then the
    largest batch. A batch takes along others of its key, the more urgent first: they cost little.

    Args:
        waiting: in order of arrival, each request once.
        max_batch: requests of one batch.
        max_passed_over: units of others after which a request goes first. Whoever waits runs after at most this many
            and one for each request that waits with it.
    """
    if not waiting:
        return []
    sizes = Counter(unit.key for unit in waiting)

    def urgency(unit: Waiting) -> tuple[int, int, bool, int, int]:
        overdue = unit.num_passed_over if unit.num_passed_over >= max_passed_over else 0
        size = 1 if unit.key is None else min(sizes[unit.key], max_batch)
        return (overdue, unit.priority, unit.key is None, size, unit.num_passed_over)

    first = max(waiting, key=urgency)  # of equals the earliest
    if first.key is None:
        return [first.request]
    peers = [unit for unit in waiting if unit.key == first.key and unit is not first]
    peers.sort(key=lambda unit: (-(unit.num_passed_over >= max_passed_over), -unit.priority, -unit.num_passed_over))
    return [first.request, *(unit.request for unit in peers[: max_batch - 1])]
