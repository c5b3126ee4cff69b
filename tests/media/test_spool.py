"""Bytes go to memory, then to a disk, and come back whole."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.errors import MediaTooLarge
from omni_bus.media import spool as spools
from omni_bus.media.spool import BatchWriter, Spool, run_to_end


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(0, 200))
def test_what_is_written_is_read_wherever_it_lies(pieces: list[bytes], memory_bytes: int) -> None:
    async def write() -> tuple[bytes, bool]:
        with Spool(10_000, what="file", memory_bytes=memory_bytes) as spool:
            for piece in pieces:
                await spool.write(piece)
            await spool.flush()
            return os.pread(spool.fileno(), 10_000, 0), spool.is_in_memory

    whole = b"".join(pieces)
    assert asyncio.run(write()) == (whole, len(whole) <= memory_bytes)


async def test_more_than_allowed_is_refused_before_it_is_kept() -> None:
    with Spool(100, what="file") as spool:
        await spool.write(b"x" * 100)
        with pytest.raises(MediaTooLarge, match=r"file: more than 100 bytes came \(allowed: at most 100\)") as caught:
            await spool.write(b"x")
        assert caught.value.field == "file"
        assert spool.num_bytes == 100


async def test_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with Spool(1000, what="file", memory_bytes=10) as spool:
        await spool.write(b"x" * 1000)
        await spool.flush()
        assert os.listdir(tmp_path) == [], "it has no name even while it is used"
        assert not spool.is_in_memory
    assert len(os.listdir("/proc/self/fd")) == before


async def test_first_bytes_can_be_looked_at() -> None:
    with Spool(100, what="file") as spool:
        await spool.write(b"0123456789")
        assert os.pread(spool.fileno(), 4, 0) == b"0123"
        assert os.pread(spool.fileno(), 400, 0) == b"0123456789"


async def test_cancelled_writer_leaves_only_when_its_thread_is_done(monkeypatch) -> None:
    """Otherwise the thread would write to whatever has the descriptor's number next."""
    entered, leave, seen = threading.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()
    in_thread = asyncio.Event()

    def write_slowly(fd: int, data: bytes) -> None:
        entered.set()
        loop.call_soon_threadsafe(in_thread.set)
        leave.wait()
        seen.append(os.fstat(fd).st_size)

    monkeypatch.setattr(spools, "write_all", write_slowly)
    with tempfile.TemporaryFile() as file:
        writer = BatchWriter(file.fileno())
        task = asyncio.create_task(writer.write(b"x" * spools.BATCH_BYTES))
        await in_thread.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert seen == [0]


async def test_failure_on_the_thread_is_the_callers() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        await run_to_end(None, fail)
