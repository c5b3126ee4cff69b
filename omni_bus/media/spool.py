"""Bytes of unknown length, kept in memory while they are few and in a file without a name once they are many.

Neither leaves anything behind, however its process ends.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import TYPE_CHECKING, Any, Self, TypeVar

from omni_bus.errors import MediaTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from types import TracebackType

ResultT = TypeVar("ResultT")

MEMORY_BYTES = 1024 * 1024
"""Up to this size bytes stay in memory."""

BATCH_BYTES = 512 * 1024
"""So much is collected before a thread writes it to a disk: the hop to a thread costs what this takes to copy."""


async def run_to_end(executor: Executor | None, function: Callable[..., ResultT], *args: Any) -> ResultT:
    """Run a blocking function on a thread and stay until it is done, even if the caller is cancelled meanwhile.

    What it works on (a descriptor, a file) may be given back afterwards: no thread still holds it.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, function, *args)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # seen, so that nothing is logged of it
        raise cancelled
    return future.result()


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write every byte at the descriptor's position."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class BatchWriter:
    """Writes to a file on a disk without making the loop wait for it: in batches, each on a thread.

    Whoever writes waits for the batch before the next one, so that no more than one is held.

    Args:
        fd: open for writing; stays the caller's.
        executor: its threads write; the loop's own by default.
    """

    def __init__(self, fd: int, executor: Executor | None = None) -> None:
        self._fd = fd
        self._executor = executor
        self._batch = bytearray()

    async def write(self, piece: bytes | memoryview) -> None:
        """Take a piece; may return before it is written.

        Raises:
            OSError: the disk does not take it.
        """
        self._batch += piece
        if len(self._batch) >= BATCH_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Return when everything is handed to the kernel."""
        if self._batch:
            batch, self._batch = self._batch, bytearray()
            await run_to_end(self._executor, write_all, self._fd, batch)


class Spool:
    """Bytes that come piece by piece; a context manager that gives the memory or the file back.

    Args:
        max_bytes: more are refused.
        what: what the bytes are, in the refusal; a field's name.
        memory_bytes: beyond this they move to a file.
    """

    def __init__(self, max_bytes: int, *, what: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self.max_bytes = max_bytes
        self._what = what
        self._memory_bytes = memory_bytes
        self._writer: BatchWriter | None = None
        self._fd = os.memfd_create("omni-bus-media", os.MFD_CLOEXEC)
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_in_memory(self) -> bool:
        """Whether no disk is used."""
        return self._writer is None

    def fileno(self) -> int:
        """Return the descriptor, which others may read by position (pread); only after `flush`."""
        return self._fd

    async def write(self, piece: bytes | memoryview) -> None:
        """Take a piece.

        Raises:
            MediaTooLarge: it would be more than `max_bytes`.
            OSError: the disk does not take it.
        """
        if self.num_bytes + len(piece) > self.max_bytes:
            raise too_large(self._what, f"more than {self.max_bytes}", self.max_bytes)
        self.num_bytes += len(piece)
        if self._writer is None and self.num_bytes <= self._memory_bytes:
            write_all(self._fd, piece)
            return
        if self._writer is None:
            self._writer = await run_to_end(None, self._to_disk)
        await self._writer.write(piece)

    async def flush(self) -> None:
        """Return when every byte can be read."""
        if self._writer is not None:
            await self._writer.flush()

    def close(self) -> None:
        """Give the memory or the file back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _to_disk(self) -> BatchWriter:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
        try:
            os.lseek(self._fd, 0, os.SEEK_SET)
            while piece := os.read(self._fd, MEMORY_BYTES):
                write_all(fd, piece)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd
        return BatchWriter(fd)


def too_large(what: str, came: str, max_bytes: int) -> MediaTooLarge:
    """Return the refusal of too many bytes."""
    return MediaTooLarge(f"{what}: {came} bytes came (allowed: at most {max_bytes})", field=what)
