"""What becomes of a socket's connections, as ZeroMQ's I/O thread sees it (zmq_socket_monitor(3))."""

from __future__ import annotations

import itertools
from struct import Struct
from typing import TYPE_CHECKING

import zmq

from omni_bus.bus.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_EVENTS = 10_000
"""Events that wait for the loop; far above what comes while it is busy, since ZeroMQ's I/O thread waits for room."""

MECHANISM_MISMATCH = 0x11000002
"""``ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH``: one end has keys, the other has none."""

_EVENT = Struct("=Hi")
_numbers = itertools.count(1)


class Monitor:
    """Calls `on_event` on the loop with each event's number, value and endpoint (that of a listener is its own).

    Args:
        socket: not yet bound or connected, so that nothing is missed; closed by its owner after the monitor.
        events: ``zmq.EVENT_…`` joined with ``|``.
        on_event: may close the monitor.
    """

    def __init__(self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int, int, bytes], None]) -> None:
        address = f"inproc://monitor-{next(_numbers)}"
        self._socket = socket
        self._on_event = on_event
        socket.monitor(address, events)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, MAX_EVENTS)
        self._events.connect(address)
        self._reader = Reader(self._events, self._take)
        self._is_open = True

    def close(self) -> None:
        """Tell nothing any more. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._reader.close()
        # In this order: an event for which nobody listens would make the I/O thread wait.
        self._socket.disable_monitor()
        self._events.close(0)

    def _take(self, parts: list[bytes]) -> None:
        number, value = _EVENT.unpack(parts[0])
        self._on_event(number, value, parts[1])
