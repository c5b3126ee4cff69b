"""Whatever a file holds, the process that asked goes on; what is damaged is refused, what takes too much is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

from samples import (  # type: ignore[import-not-found] (put on the path above)
    HEIGHT,
    RATE_HZ,
    WIDTH,
    encoded,
    images,
    png,
    png_chunk,
    slope,
    sounds,
    tone,
    videos,
)

from omni_bus.errors import BadInput, MediaTooLarge, Unavailable
from omni_bus.media.decode import AudioRequest, ImageRequest, VideoRequest
from omni_bus.media.spool import Spool
from omni_bus.runtime import media_pool
from omni_bus.runtime.media_pool import MediaPool
from omni_bus.wire.payloads import Audio, Image, Payload, Video

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE = ImageRequest("image", max_pixels=100_000_000)
AUDIO = AudioRequest("audio", max_seconds=60, max_bytes=50_000_000)
VIDEO = VideoRequest("video", max_seconds=60, max_pixels=1_000_000, max_decoded_frames=1000, max_bytes=50_000_000)

pytestmark = pytest.mark.timeout(120)


@contextmanager
def pool(**options: Any) -> Iterator[MediaPool]:
    found = MediaPool(**({"num_processes": 1, "timeout_s": 60.0} | options))
    try:
        yield found
    finally:
        found.close()


def pid_of(pool: MediaPool) -> int:
    (worker,) = pool._all
    return worker.process.pid


def state_of(pid: int) -> str:
    """How the kernel calls a process' state (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


async def until_asked(pool: MediaPool) -> None:
    """Wait until the only process has a file."""
    while not next(iter(pool._all))._readable:
        await asyncio.to_thread(int)


async def test_samples_come_back_as_they_went_in() -> None:
    with pool() as decoders:
        image = await decoders.decode(images()["png"], IMAGE)
        audio = await decoders.decode(sounds()["flac"], AUDIO)
        video = await decoders.decode(videos()["webm-vp9"], VIDEO)

        assert isinstance(image, Image)
        assert isinstance(audio, Audio)
        assert isinstance(video, Video)
        assert (np.frombuffer(image.data.view, np.uint8).reshape(HEIGHT, WIDTH, 3) == slope()).all()
        assert (np.frombuffer(audio.data.view, "<i2") == tone()).all()
        assert video.num_frames == 30
        assert len(decoders._all) == 1, "one process did all"


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
async def test_spooled_file_is_decoded_where_it_lies(memory_bytes: int) -> None:
    with pool() as decoders, Spool(1_000_000, what="audio", memory_bytes=memory_bytes) as spool:
        for start in range(0, len(sounds()["wav"]), 1000):
            await spool.write(sounds()["wav"][start : start + 1000])
        await spool.flush()
        for _ in range(2):
            audio = await decoders.decode(spool, AUDIO)
            assert isinstance(audio, Audio)
            assert audio.num_frames == RATE_HZ


async def test_samples_outlive_the_pool() -> None:
    with pool() as decoders:
        image = await decoders.decode(images()["bmp"], IMAGE)
    assert isinstance(image, Image)
    assert bytes(image.data.view) == slope().tobytes()


async def test_processes_are_as_many_as_allowed() -> None:
    with pool(num_processes=2) as decoders:
        await asyncio.gather(*(decoders.decode(sounds()["mp3"], AUDIO) for _ in range(12)))

        assert len(decoders._all) <= 2


async def test_refusals_are_the_callers_own() -> None:
    with pool() as decoders:
        with pytest.raises(BadInput, match="an empty file came") as caught:
            await decoders.decode(b"", IMAGE)
        assert caught.value.field == "image"
        with pytest.raises(MediaTooLarge, match="pixels came"):
            await decoders.decode(png(30_000, 30_000, num_rows=10), IMAGE)
        assert await decoders.decode(images()["png"], IMAGE)
        assert len(decoders._all) == 1


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt"])
async def test_compressed_text_of_a_png_is_not_unfolded(kind: bytes) -> None:
    """FFmpeg would take 600 MB for this one, with which the process is not trusted."""
    flags = b"k\0\0" if kind != b"iTXt" else b"k\0\1\0\0\0"
    bomb = png(4, 4, png_chunk(kind, flags + zlib.compress(bytes(300 << 20), 9)))
    with pool(memory_bytes=256 << 20) as decoders:
        assert await decoders.decode(bomb, IMAGE)


async def test_file_that_takes_too_much_memory_is_refused() -> None:
    large = encoded(slope(4000, 3000), "mjpeg", "yuvj420p")
    with pool(memory_bytes=16 << 20) as decoders:
        with pytest.raises(MediaTooLarge, match="it takes more memory than one file may"):
            await decoders.decode(large, IMAGE)
        assert await decoders.decode(images()["png"], IMAGE)


async def test_file_that_takes_too_long_is_ended() -> None:
    """A process that the kernel holds stands for a decoder that doesn't come back."""
    with pool(timeout_s=0.5) as decoders:
        await decoders.decode(images()["png"], IMAGE)
        held = pid_of(decoders)
        os.kill(held, signal.SIGSTOP)
        with pytest.raises(MediaTooLarge, match=r"takes longer to decode than 0\.5 s"):
            await decoders.decode(images()["png"], IMAGE)
        decoders._timeout_s = 60
        assert await decoders.decode(images()["png"], IMAGE)
        assert pid_of(decoders) != held


async def test_file_that_ends_its_process_is_refused_and_the_next_one_is_not() -> None:
    with pool() as decoders:
        await decoders.decode(images()["png"], IMAGE)
        lost = pid_of(decoders)
        os.kill(lost, signal.SIGSTOP)
        task = asyncio.create_task(decoders.decode(images()["png"], IMAGE))
        await until_asked(decoders)
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(BadInput, match="the file is damaged"):
            await task
        assert await decoders.decode(images()["png"], IMAGE)


async def test_caller_that_leaves_ends_the_work() -> None:
    with pool() as decoders:
        await decoders.decode(images()["png"], IMAGE)
        process = next(iter(decoders._all)).process
        os.kill(process.pid, signal.SIGSTOP)
        task = asyncio.create_task(decoders.decode(images()["png"], IMAGE))
        await until_asked(decoders)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
        assert await decoders.decode(images()["png"], IMAGE)


async def test_closed_pool_ends_what_waits_and_what_runs() -> None:
    with pool() as decoders:
        await decoders.decode(images()["png"], IMAGE)
        os.kill(pid_of(decoders), signal.SIGSTOP)
        tasks = [asyncio.create_task(decoders.decode(images()["png"], IMAGE)) for _ in range(2)]
        await until_asked(decoders)
        decoders.close()
        for task in tasks:
            with pytest.raises(Unavailable, match="stopping"):
                await task


async def test_process_that_cannot_start_is_said_once_and_tried_again(monkeypatch, caplog, tmp_path: Path) -> None:
    (tmp_path / "av.py").write_text("raise ImportError('no av here')")
    with pool() as decoders:
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
            with pytest.raises(Unavailable, match="no process for decoding media could be started"):
                await decoders.decode(images()["png"], IMAGE)
        assert "needs PyAV" in caplog.text
        assert await decoders.decode(images()["png"], IMAGE)


GATEWAY = """
import asyncio, sys
from omni_bus.media.decode import ImageRequest
from omni_bus.runtime.media_pool import MediaPool

async def main():
    pool = MediaPool(num_processes=1)
    await pool.decode(open(sys.argv[1], "rb").read(), ImageRequest("image", 10**6))
    print(next(iter(pool._all)).process.pid, flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_process_ends_with_the_one_that_it_works_for(is_stuck, tmp_path: Path) -> None:
    """However hard that was killed, and even if a decoder doesn't come back."""
    (tmp_path / "a.png").write_bytes(images()["png"])
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", GATEWAY, str(tmp_path / "a.png")), stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    worker = int(await gateway.stdout.readline())
    watched = os.pidfd_open(worker)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(watched, gone.set)
    try:
        if is_stuck:
            os.kill(worker, signal.SIGSTOP)
        gateway.kill()
        await gateway.wait()
        await gone.wait()
    finally:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)


async def test_process_is_replaced_after_so_many_files(monkeypatch) -> None:
    monkeypatch.setattr(media_pool, "MAX_FILES", 2)
    with pool() as decoders:
        pids = []
        for _ in range(5):
            await decoders.decode(images()["png"], IMAGE)
            pids += [worker.process.pid for worker in decoders._all]

    assert len(set(pids)) == 3, "of five files the first, the third and the fifth have a new one"


async def test_process_has_neither_keys_nor_a_core_dump(monkeypatch) -> None:
    monkeypatch.setenv("OMNI_BUS_API_KEYS", "secret")
    with pool(memory_bytes=512 << 20) as decoders:
        await decoders.decode(images()["png"], IMAGE)
        about = Path(f"/proc/{pid_of(decoders)}")

        assert b"secret" not in (about / "environ").read_bytes()
        limits = (about / "limits").read_text().splitlines()
        assert next(line for line in limits if line.startswith("Max core file size")).split()[4:6] == ["0", "0"]
        assert next(line for line in limits if line.startswith("Max address space")).split()[3] != "unlimited"
        assert "NoNewPrivs:\t1" in (about / "status").read_text()
        descriptors = sorted(os.readlink(path) for path in (about / "fd").iterdir())
        assert sum("socket:" in name for name in descriptors) == 1


async def test_nothing_is_left_open() -> None:
    with pool() as decoders:
        await decoders.decode(images()["png"], IMAGE)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await decoders.decode(images()["png"], IMAGE)
            with pytest.raises(BadInput):
                await decoders.decode(b"nothing", IMAGE)
        assert len(os.listdir("/proc/self/fd")) == before


FILES = {name: (data, IMAGE) for name, data in images().items()}
FILES |= {name: (data, AUDIO) for name, data in sounds().items()}
FILES |= {name: (data, VIDEO) for name, data in videos().items()}


def damage(data: bytes, draw: Any) -> bytes:
    """Change, cut, repeat or leave out pieces: headers more often than samples."""
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, min(len(damaged), draw(st.sampled_from([64, 512, 1 << 20]))) - 1)) if damaged else 0
        match draw(st.sampled_from(["change", "fill", "cut", "drop", "repeat"])):
            case "change" if damaged:
                damaged[at] = draw(st.integers(0, 255))
            case "fill":
                damaged[at : at + 4] = draw(st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"]))
            case "cut":
                del damaged[max(at, 1) :]
            case "drop":
                del damaged[at : at + draw(st.integers(1, 64))]
            case "repeat":
                damaged[at:at] = damaged[at : at + draw(st.integers(1, 256))]
            case _:
                pass
    return bytes(damaged)


@pytest.mark.parametrize("kind", ["images", "sounds", "videos"])
@settings(max_examples=300)
@given(data=st.data())
def test_damaged_file_is_decoded_or_refused(kind: str, data: st.DataObject) -> None:
    """Never anything else; an error that nobody thought of would be logged as such and fail this test."""
    table = {"images": images, "sounds": sounds, "videos": videos}[kind]()
    name = data.draw(st.sampled_from(sorted(table)))
    damaged = damage(table[name], data.draw)
    try:
        payload = _shared.run(damaged, FILES[name][1])
    except BadInput as error:
        assert error.message.startswith(f"{FILES[name][1].field}: ")
        assert error.field
    else:
        assert isinstance(payload, Image | Audio | Video)


class _Shared:
    """One loop and one pool for all examples: a process start for each would take minutes."""

    def __init__(self) -> None:
        self.runner: asyncio.Runner | None = None
        self.pool: MediaPool | None = None

    def run(self, data: bytes, request: Any) -> Payload:
        assert self.runner is not None
        return self.runner.run(self._decode(data, request))

    async def _decode(self, data: bytes, request: Any) -> Payload:
        if self.pool is None:
            self.pool = MediaPool(num_processes=1, timeout_s=30.0, memory_bytes=1 << 30)
        return await self.pool.decode(data, request)


_shared = _Shared()


@pytest.fixture(autouse=True)
def _one_pool(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    if "damaged_file" not in request.node.name:
        yield
        return
    _shared.runner, _shared.pool = asyncio.Runner(), None
    yield
    if _shared.pool is not None:
        _shared.pool.close()
    _shared.runner.close()
    assert [vars(record).get("fields") for record in caplog.get_records("call") if record.levelname != "DEBUG"] == []
