"""What a killed process leaves of shared memory, on both sides of it: nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.link import Link
from omni_bus.ids import Peer, Sender
from omni_bus.wire.frames import Chunk, Ping
from omni_bus.wire.payloads import Blob, Media

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

LIMIT_S = 60
NUM_KILLS = 24
LARGE = 300_000
LIMITS = ArenaLimits(16 << 20, 64 << 10)

# Sends a chunk for each `Ping`, filled with its nonce, every other one made in place; answers each chunk with a `Pong`
# of its first byte and keeps the last three.
CHILD = """
import asyncio, collections, sys
from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.link import Link
from omni_bus.ids import Peer
from omni_bus.wire.frames import Chunk, Ping, Pong
from omni_bus.wire.payloads import Blob, Media

async def main():
    hub = Peer(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    kept = collections.deque(maxlen=3)
    def deliver(sender, frame):
        if type(frame) is Ping:
            data = bytes([frame.nonce % 256]) * int(sys.argv[6])
            blob = link.allocate(len(data)) if frame.nonce % 2 else Blob(data)
            if frame.nonce % 2:
                blob.view[:] = data
            payload = Media("x/y", blob)
            link.send(hub, Chunk("r", 0, frame.nonce, payload))
        elif type(frame) is Chunk:
            kept.append(frame.payload.data.view)
            link.send(hub, Pong(kept[-1][-1]))
    link = Link(sys.argv[1], sys.argv[5], deliver, print, ArenaLimits(16 << 20, 64 << 10))
    print(link.me.incarnation, link.me.endpoint, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Hub:
    """The surviving end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chunks: list[Chunk] = []
        self.num_pongs = 0
        self.children: list[subprocess.Popen[str]] = []
        self._arrived = asyncio.Event()
        self.link = Link("hub.0", f"ipc://{folder}/hub", self._deliver, print, LIMITS)

    def _deliver(self, _: Sender, frame: Any) -> None:
        if isinstance(frame, Chunk):
            self.chunks.append(frame)
        else:
            self.num_pongs += 1
        self._arrived.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def start(self, name: str) -> tuple[subprocess.Popen[str], Peer]:
        me = self.link.me
        args = [name, me.actor, str(me.incarnation), me.endpoint, f"ipc://{self.folder}/{name}", str(LARGE)]
        child = subprocess.Popen(  # noqa: ASYNC220 (the loop has nothing else to do)
            [sys.executable, "-c", CHILD, *args], stdout=subprocess.PIPE, text=True
        )
        self.children.append(child)
        assert child.stdout is not None
        incarnation, endpoint = (await asyncio.to_thread(child.stdout.readline)).split()
        return child, Peer(name, int(incarnation), endpoint)

    async def exchange(self, peer: Peer, num_chunks: int) -> None:
        """Send and receive so many large chunks, four at a time."""
        for seq in range(0, num_chunks, 4):
            chunks, pongs = len(self.chunks), self.num_pongs
            for i in range(seq, seq + 4):
                self.link.send(peer, Ping(i))
                self.link.send(peer, Chunk("r", 0, i, Media("x/y", Blob(bytes([i]) * LARGE))))
            await self.until(lambda: len(self.chunks) >= chunks + 4 and self.num_pongs >= pongs + 4)  # noqa: B023


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    hub = Hub(tmp_path)
    yield hub
    for child in hub.children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    await hub.link.close(0)
    hub.chunks.clear()
    gc.collect()  # the link's parts know each other, and it its peers' memory


def mappings() -> Iterator[str]:
    """Yield what this process has mapped or open of children's arenas."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "memfd:omni-bus child" in line:
            yield line
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own
        if "memfd:omni-bus child" in name:
            yield name


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_view_outlives_its_killed_owner(hub: Hub) -> None:
    child, peer = await hub.start("child.0")
    await hub.exchange(peer, 12)
    assert hub.link.statistics().borrowed.views >= 4

    child.kill()
    child.wait()
    hub.link.forget(peer)

    assert [bytes(chunk.payload.data.view) for chunk in hub.chunks] == [bytes([i]) * LARGE for i in range(12)]  # type: ignore[union-attr]
    hub.chunks.clear()
    await asyncio.sleep(0)
    assert list(mappings()) == []


async def test_killed_reader_leaves_no_lease(hub: Hub) -> None:
    child, peer = await hub.start("child.0")
    await hub.exchange(peer, 12)
    arena = hub.link.statistics().arena
    assert arena is not None
    assert arena.slots >= 3

    child.kill()
    child.wait()
    hub.link.forget(peer)

    arena = hub.link.statistics().arena
    assert arena is not None
    assert (arena.slots, arena.used_bytes) == (0, 0)
    assert arena.taken_back >= 3


async def test_processes_killed_in_a_row_leave_nothing(hub: Hub) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    survivor, steady = await hub.start("child.steady")
    resident_bytes_early = 0
    for i in range(NUM_KILLS):
        child, peer = await hub.start(f"child.{i}")
        await hub.exchange(peer, 8)
        await hub.exchange(steady, 4)
        # In the middle of traffic both ways.
        for nonce in range(8):
            hub.link.send(peer, Ping(nonce))
            hub.link.send(peer, Chunk("r", 0, nonce, Media("x/y", Blob(b"z" * LARGE))))
        child.kill()
        child.wait()
        hub.link.forget(peer)
        hub.chunks.clear()
        if i == 3:
            resident_bytes_early = resident_bytes()

    await hub.exchange(steady, 8)
    assert [chunk.payload.data.view[0] for chunk in hub.chunks[-8:]] == list(range(8))  # type: ignore[union-attr]
    survivor.kill()
    survivor.wait()
    hub.link.forget(steady)
    hub.chunks.clear()
    await asyncio.sleep(0)

    arena = hub.link.statistics().arena
    assert arena is not None
    assert (arena.slots, arena.used_bytes, arena.full) == (0, 0, 0)
    assert arena.lent > NUM_KILLS * 4
    assert list(mappings()) == []
    assert set(os.listdir("/dev/shm")) <= shm_before
    assert resident_bytes() < resident_bytes_early + LIMITS.max_bytes
    # What had come from the dead and was not read yet may not be readable any more; all else was.
    assert not any(b"steady" in peer for peer in hub.link.statistics().inbox.bad_by_peer)
