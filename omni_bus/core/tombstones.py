"""The ids of requests that ended lately: a late frame of theirs must not bring them back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from omni_bus.ids import RequestId

MAX_TOMBSTONES = 4096
"""At a thousand requests a second, a frame may be four seconds late; the memory is a few hundred kilobytes."""

Epitaph = TypeVar("Epitaph")
"""What is remembered of how a request ended."""


class Tombstones(Generic[Epitaph]):
    """A bounded table of ended requests and how each ended; the oldest go first."""

    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._ended: OrderedDict[RequestId, Epitaph | None] = OrderedDict()

    def __contains__(self, request: RequestId) -> bool:
        return request in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def bury(self, request: RequestId, epitaph: Epitaph | None = None) -> None:
        """Remember an ended request."""
        self._ended[request] = epitaph
        self._ended.move_to_end(request)
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def epitaph(self, request: RequestId) -> Epitaph | None:
        """How the request ended; None if that was not said or the request is not here."""
        return self._ended.get(request)
