"""Events that were said and may have to be said again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from omni_bus.core.session.codec import encoded

if TYPE_CHECKING:
    from omni_bus.core.session.server_events import AnyServerEvent


class Entry(Struct, frozen=True):
    """One event, as it was said."""

    seq: int
    at: float
    event: AnyServerEvent
    data: bytes


class JournalGap(Exception):
    """What is asked for is not kept any more."""


class JournalConflict(Exception):
    """More than was ever said is claimed to have come."""


class Journal:
    """Numbers events from 1 on, and keeps them until they are acknowledged, too old or too many.

    Too many is final: nothing is kept or numbered from then on, and `has_overflowed` says so.
    """

    def __init__(self, max_bytes: int, ttl_s: float, *, is_kept: bool) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._is_kept = is_kept
        self._entries: deque[Entry] = deque()
        self.head = 0
        """The last number that was given."""
        self.num_bytes = 0
        self.has_overflowed = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, event: AnyServerEvent, now: float) -> Entry:
        """Number an event and keep it."""
        if self.has_overflowed:
            return Entry(0, now, event, encoded(event))
        self.head += 1
        event = replace(event, server_event_seq=self.head)
        entry = Entry(self.head, now, event, encoded(event))
        if self._is_kept:
            self._entries.append(entry)
            self.num_bytes += len(entry.data)
            self._drop(before=now - self._ttl_s)
            if self.num_bytes > self._max_bytes:
                self.has_overflowed = True
                self._entries.clear()
                self.num_bytes = 0
        return entry

    def ack(self, seq: int) -> None:
        """Forget what arrived; an old number changes nothing.

        Raises:
            JournalConflict: no such number was given.
        """
        if not 0 <= seq <= self.head:
            raise JournalConflict
        while self._entries and self._entries[0].seq <= seq:
            self.num_bytes -= len(self._entries.popleft().data)

    def since(self, seq: int, now: float) -> list[Entry]:
        """Return what was said after an event, without a gap.

        Raises:
            JournalGap: some of it is not kept any more.
            JournalConflict: the event was never said.
        """
        self._drop(before=now - self._ttl_s)
        if seq > self.head:
            raise JournalConflict
        if self.has_overflowed or seq < self.head - len(self._entries):
            raise JournalGap
        return [entry for entry in self._entries if entry.seq > seq]

    def _drop(self, *, before: float) -> None:
        while self._entries and self._entries[0].at < before:
            self.num_bytes -= len(self._entries.popleft().data)
