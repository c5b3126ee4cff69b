"""What a client sent of a request that has put nothing out yet, so that all of it can be sent to another replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_bus.wire.payloads import Payload

MAX_KEPT_BYTES = 1 << 20
"""For each request until its first output: a long conversation, a picture or half a minute of speech.

A request with more is not sent again: a thousand of them would cost more memory than a rare retry is worth.
"""


class KeptInput:
    """Payloads and ends of ports, in the order in which they were sent."""

    __slots__ = ("_num_bytes", "_sent")

    def __init__(self) -> None:
        self._sent: list[tuple[str, Payload | None]] = []
        self._num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Payload | None]]:
        """Ports and payloads; None is the end of a port."""
        return iter(self._sent)

    @property
    def is_too_large(self) -> bool:
        """More is held than may be."""
        return self._num_bytes > MAX_KEPT_BYTES

    def add(self, port: str, payload: Payload, num_bytes: int) -> None:
        """Keep a payload."""
        self._sent.append((port, payload))
        self._num_bytes += num_bytes

    def finish(self, port: str) -> None:
        """Keep the end of a port."""
        self._sent.append((port, None))
