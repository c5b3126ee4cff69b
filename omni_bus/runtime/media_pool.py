"""Decoding of strangers' media, in processes that may be lost.

A decoder in C that meets a damaged file can't be interrupted in a thread, and takes its process along if it fails. So
each file is decoded in a process of its own kind (`omni_bus.runtime.media_worker`) which is killed when it takes too
long, when nobody waits for it any more, or when it takes too much memory; the gateway only maps what comes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.errors import BadInput, MediaTooLarge, Unavailable, from_info
from omni_bus.media.spool import MEMORY_BYTES, Spool, run_to_end, write_all
from omni_bus.runtime.media_worker import MESSAGE_BYTES, READY, Answer
from omni_bus.wire.payloads import Audio, Blob, Image, Video, check

if TYPE_CHECKING:
    from omni_bus.media.decode import Request

logger = logging.getLogger(__name__)

START_S = 60.0
"""A process that has not begun after so long is given up; on a busy machine imports take seconds."""

MAX_FILES = 500
"""A process ends after so many files, so that what decoders leak does not add up."""

_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""All that a process gets of the gateway's environment, which may hold keys."""

_PAYLOADS: dict[str, type[Image | Audio | Video]] = {"image": Image, "audio": Audio, "video": Video}


class _Lost(Exception):
    """The process ended."""


class _Worker:
    """One process, and the socket to it."""

    def __init__(self, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "omni_bus.runtime.media_worker"),
                    *(str(theirs.fileno()), str(os.getpid()), str(memory_bytes)),
                ],
                stdin=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(False)
        self._channel = ours
        self._readable: asyncio.Future[None] | None = None
        self.num_files = 0

    async def begin(self) -> None:
        """Wait until it takes files.

        Raises:
            _Lost: it ended.
        """
        message, _ = await self._receive()
        if message != READY:
            raise _Lost

    async def ask(self, request: Request, fd: int) -> tuple[Answer, int | None]:
        """Send a file and return what became of it, with the samples' descriptor, which is the caller's to close.

        Raises:
            _Lost: it ended.
        """
        self.num_files += 1
        try:
            socket.send_fds(self._channel, [msgspec.json.encode(request)], [fd])
        except OSError as error:
            raise _Lost from error
        message, fds = await self._receive()
        return msgspec.json.decode(message, type=Answer), fds[0] if fds else None

    async def _receive(self) -> tuple[bytes, list[int]]:
        loop = asyncio.get_running_loop()
        self._readable = readable = loop.create_future()
        loop.add_reader(self._channel, _resolve, readable)
        try:
            await readable
        finally:
            self._readable = None
            if self._channel.fileno() >= 0:
                loop.remove_reader(self._channel)
        try:
            message, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except OSError as error:
            raise _Lost from error
        if not message:
            raise _Lost
        return message, fds

    def kill(self) -> None:
        """End it now; who waits for an answer is told. `process` is still to be waited for."""
        if self._readable is not None:
            self._readable.get_loop().remove_reader(self._channel)
            if not self._readable.done():
                self._readable.set_exception(_Lost())
        self._channel.close()
        self.process.kill()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class MediaPool:
    """A few processes for decoding, started when they are first needed.

    Each caller waits for its own result, so the queue is no longer than the callers. Lives on one loop.

    Args:
        num_processes: at most so many at a time.
        timeout_s: limit of one file.
        memory_bytes: what one file may take in its process.
    """

    def __init__(self, num_processes: int = 2, timeout_s: float = 30.0, memory_bytes: int = 2 << 30) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._turns = asyncio.Semaphore(num_processes)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._is_closed = False

    async def decode(self, source: bytes | Spool, request: Request) -> Image | Audio | Video:
        """Return what a file holds.

        Args:
            source: the file; a spool must be flushed.
            request: what is wanted, and the limits.

        Raises:
            BadInput: another kind of file, damaged or cut off.
            MediaTooLarge: beyond a limit, of time and memory too.
            Unavailable: no process could be started.
        """
        async with self._turns:
            if isinstance(source, Spool):
                return await self._decode(source.fileno(), request)
            fd = os.memfd_create("omni-bus-media", os.MFD_CLOEXEC)
            try:
                if len(source) <= MEMORY_BYTES:
                    write_all(fd, source)
                else:
                    await run_to_end(None, write_all, fd, source)
                return await self._decode(fd, request)
            finally:
                os.close(fd)

    async def _decode(self, fd: int, request: Request) -> Image | Audio | Video:
        field = request.field
        worker = self._idle.pop() if self._idle else await self._start()
        samples: int | None = None
        is_well = False
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, samples = await worker.ask(request, fd)
            is_well = True
            return await _payload(answer, samples)
        except TimeoutError:
            raise MediaTooLarge(
                f"{field}: it takes longer to decode than {self._timeout_s:g} s (allowed: less)", field=field
            ) from None
        except _Lost:
            is_well = False
            if self._is_closed:
                raise Unavailable("the server is stopping") from None
            logger.warning("a process that decodes media was lost", extra={"fields": {"field": field}})
            raise BadInput(f"{field}: the file is damaged: it can't be decoded", field=field) from None
        finally:
            if samples is not None:
                os.close(samples)
            if is_well and worker.num_files < MAX_FILES and not self._is_closed:
                self._idle.append(worker)
            else:
                self._end(worker)

    async def _start(self) -> _Worker:
        if self._is_closed:
            raise Unavailable("the server is stopping")
        try:
            worker = _Worker(self._memory_bytes)
        except OSError as error:
            raise Unavailable("no process for decoding media could be started") from error
        self._all.add(worker)
        try:
            async with asyncio.timeout(START_S):
                await worker.begin()
        except (TimeoutError, _Lost):
            self._end(worker)
            if not self._is_closed:
                logger.error("a process that decodes media does not start; it needs PyAV (extra media)")  # noqa: TRY400 (its own output says why)
            raise Unavailable("no process for decoding media could be started") from None
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker) -> None:
        """Kill a process; a thread waits for it, since a large one takes its time to go."""
        if worker in self._all:
            worker.kill()
            self._all.discard(worker)
            with contextlib.suppress(RuntimeError):  # the loop's threads are gone: it is closing
                asyncio.get_running_loop().run_in_executor(None, worker.process.wait)

    def close(self) -> None:
        """End every process; who still waits is told that the server is stopping."""
        self._is_closed = True
        self._idle.clear()
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.process.wait()
        self._all.clear()


async def _payload(answer: Answer, samples: int | None) -> Image | Audio | Video:
    """Map what came out, after checking that it is what it says.

    Raises:
        OmniBusError: the file's own.
    """
    if answer.unforeseen:
        logger.warning("a file broke a decoder in a new way", extra={"fields": {"traceback": answer.unforeseen}})
    if answer.error is not None:
        raise from_info(answer.error)
    if samples is None or answer.kind not in _PAYLOADS or os.fstat(samples).st_size != answer.num_bytes:
        raise _Lost
    if not fcntl.fcntl(samples, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise _Lost
    # Private: before Linux 6.7 a shared mapping of a file that is sealed against writing was refused.
    mapped: Any = (
        mmap.mmap(samples, answer.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) if answer.num_bytes else b""
    )
    try:
        payload = msgspec.convert(answer.header, dict[str, Any])
        made = _PAYLOADS[answer.kind](**payload, data=Blob(memoryview(mapped)))
        check(made)
    except (TypeError, ValueError) as error:
        raise _Lost from error
    return made
