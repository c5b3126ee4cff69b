"""Reads a socket on the loop without waiting for it: for the sockets that are not an actor's inbox."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import zmq

from omni_bus.bus.sockets import descriptor_of

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BATCH = 64
"""Messages per turn of the loop."""


class Reader:
    """Hands each whole message of a socket to `take`, on the running loop; `take` may send on the same socket.

    Args:
        socket: stays its owner's, who closes it after the reader.
        take: called with the parts of each message; must not block.

    Raises:
        RuntimeError: no running loop.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._take = take
        self._is_open = True
        self._descriptor = descriptor_of(socket)
        self._loop.add_reader(self._descriptor, self.read)
        # The descriptor tells of changes only: what came before the loop watched it must be looked for.
        self._loop.call_soon(self.read)

    def read(self) -> None:
        """Take what is there, and come back for more than a batch: only a receive that would block resets the edge."""
        for _ in range(MAX_BATCH):
            if not self._is_open:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
        self._loop.call_soon(self.read)

    def close(self) -> None:
        """Take nothing any more. May be called again, and from `take`."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._descriptor)
