"""Server-sent events, from the bytes as they come to the data of each event."""

from __future__ import annotations

from omni_bus.errors import BadInput

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A piece of sound in base64 has a few MB at most; more without an end is no event stream."""


class EventParser:
    """Takes bytes in pieces of any size and returns the ``data`` of the events that they complete.

    Follows the event stream format of the HTML standard as far as servers of models use it: lines end with LF, CRLF or
    CR, several ``data`` lines of one event are joined with LF, and comments and other fields say nothing here.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes.

        Raises:
            BadInput: an event that has more than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = _lines(self._rest + piece)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadInput(f"an event of the answer has more than {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events


def _lines(data: bytes) -> list[bytes]:
    """Split at line ends; the last one is what has no end yet."""
    if b"\r" not in data:
        return data.split(b"\n")
    # A CR at the very end may be the first half of a CRLF, so it stays with the rest.
    held = b"\r" if data.endswith(b"\r") else b""
    body = data.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    *lines, rest = body.split(b"\n")
    return [*lines, rest + held]
