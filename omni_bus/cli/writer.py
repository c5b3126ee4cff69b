"""Text to a stream that may not be read: whoever writes never waits.

A full pipe, or a terminal that was stopped with Ctrl-S, takes nothing for as long as its reader likes. A supervisor
that waited for it would restart nothing meanwhile.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from omni_bus.cli.silence import silence

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

MAX_WAITING_BYTES = 1 << 20
"""Some ten thousand lines; the newest are dropped above that, since the first ones say how trouble began."""

CLOSE_S = 1.0
"""A reader that is there takes the last lines within this; one that is not is left behind."""


class Writer:
    """Writes to a stream's descriptor on a thread of its own, in order.

    What is written while too much waits is dropped and counted; the count stands where it was dropped. After the reader
    has left (``omni-bus up | head``) nothing is written any more. A stream without a descriptor is written to at once.

    Args:
        out: the stream; nobody else writes to it from now on.
        dropped: returns the line that tells of so many dropped pieces.
    """

    def __init__(self, out: TextIO, dropped: Callable[[int], str]) -> None:
        self._out = out
        self._dropped = dropped
        self._waiting: list[bytes] = []
        self._num_waiting_bytes = 0
        self._num_dropped = 0
        self._is_read = True
        self._is_closed = False
        self._changed = threading.Condition()
        self.encoding = out.encoding or "utf-8"
        try:
            self._fd = out.fileno()
        except OSError:  # a stream in memory
            self._fd = -1
        else:
            out.flush()
            # As a daemon: a write that nobody reads must not keep the process from its end.
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()

    def write(self, text: str) -> int:
        """Write, soon; return the number of characters, as streams do."""
        if self._fd < 0:
            return self._out.write(text)
        data = text.encode(self.encoding, errors="replace")
        with self._changed:
            if not self._is_read or self._is_closed:
                return len(text)
            if self._num_waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self._num_dropped += 1
                return len(text)
            if self._num_dropped:
                self._add(f"{self._dropped(self._num_dropped)}\n".encode())
                self._num_dropped = 0
            self._add(data)
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: what waits is written as soon as it can be."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._out.isatty()

    def fileno(self) -> int:
        """Return the stream's own descriptor.

        Raises:
            OSError: it has none.
        """
        return self._out.fileno()

    def close(self) -> None:
        """Write the rest if somebody reads it within `CLOSE_S`. May be called again."""
        if self._fd < 0:
            return
        with self._changed:
            if self._num_dropped and not self._is_closed:
                self._add(f"{self._dropped(self._num_dropped)}\n".encode())
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_waiting_bytes += len(data)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closed:
                        return
                    self._changed.wait()
                data = b"".join(self._waiting)
                self._waiting.clear()
            try:
                rest = memoryview(data)
                while rest:
                    # Not through the stream: its lock would be held, and the interpreter wants it at the end.
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:  # the reader has left, or the terminal is gone
                with self._changed:
                    self._is_read = False
                    self._waiting.clear()
                silence(self._out)
                return
            with self._changed:
                self._num_waiting_bytes -= len(data)
