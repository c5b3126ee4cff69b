"""The ids of requests that ended lately: a late frame of theirs must not bring them back."""

from __future__ import annotations

from collections import OrderedDict

from omni_bus.ids import RequestId

MAX_TOMBSTONES = 4096
"""At a thousand requests a second, a frame may be four seconds late; the memory is a few hundred kilobytes."""


class Tombstones:
    """A bounded set; the oldest go first."""

    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._ids: OrderedDict[RequestId, None] = OrderedDict()

    def __contains__(self, request: RequestId) -> bool:
        return request in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def bury(self, request: RequestId) -> None:
        """Remember an ended request."""
        self._ids[request] = None
        self._ids.move_to_end(request)
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)
