"""Stages whose engines make their outputs in shared memory: it travels uncopied, and comes back whatever happens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from actors.testing import running
from adapters.synthetic_marks import read_image, read_video
from omni_bus.client import BusClient, Item
from omni_bus.errors import DeadlineExceeded, RequestCancelled
from omni_bus.wire.payloads import Image, Text, Video

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from actors.testing import Running
    from omni_bus.client import Request

LIMIT_S = 40
SIDE = 256
CHUNK_BYTES = 4 * SIDE * SIDE * 3
WINDOW = 2
ARENA_BYTES = 64 << 20
TOML = f"""
heartbeat_s = 0.2
arena_bytes = {ARENA_BYTES}

[stages.video]
adapter = "synthetic-video"
num_frames = 40
width = {SIDE}
height = {SIDE}

[stages.image]
adapter = "synthetic-image"
steps = 6
width = {SIDE}
height = {SIDE}

[pipelines.video]
edges = ["in.prompt -> video.prompt", "video.video -> out.video"]
window_chunks = {WINDOW}

[pipelines.image]
edges = ["in.prompt -> image.prompt", "image.image -> out.image", "image.preview -> out.preview"]
"""

# Reads one chunk of a video, says so, and holds it for ever.
CHILD = """
import asyncio, sys
from omni_bus.client import BusClient
from omni_bus.wire.payloads import Text

async def main():
    client = await BusClient.connect("victim", sys.argv[1], sys.argv[2], timeout_s=20)
    request = await client.submit("video")
    await request.send("prompt", Text("cat"))
    request.finish("prompt")
    held = [await anext(request), await anext(request)]
    print("holds", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Bus:
    """A deployment and a client in this loop."""

    def __init__(self, deployment: Running, client: BusClient) -> None:
        self.deployment = deployment
        self.client = client

    def arena(self, stage: str) -> Any:
        return self.deployment.stages[f"{stage}.0"]._driver._link.statistics().arena

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what frames between other actors make true; each round is a round trip of our own."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await self.client.admin("health")

    async def ask(self, pipeline: str, timeout_s: float | None = None, **params: Any) -> Request:
        request = await self.client.submit(pipeline, (), {pipeline: params}, timeout_s=timeout_s)
        await request.send("prompt", Text("cat"))
        request.finish("prompt")
        return request


@asynccontextmanager
async def connected(toml: str = TOML) -> AsyncIterator[Bus]:
    async with running(toml) as deployment:
        about = deployment.deployment
        endpoint = about.coordinator_endpoint
        async with await BusClient.connect("client", about.listen("client"), endpoint, timeout_s=20) as client:
            bus = Bus(deployment, client)
            rows: list[dict[str, Any]] = []
            async with asyncio.timeout(LIMIT_S):
                while sum(row["is_ready"] for row in rows if row["role"] == "stage") < len(deployment.stages):
                    rows = await client.admin("health")
            yield bus


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with connected() as bus:
        yield bus


async def frames_of(request: Request) -> list[int]:
    """Return the indices that the frames of a video bear, keeping none of them."""
    steps: list[int] = []
    async for event in request:
        if isinstance(event, Item):
            assert isinstance(event.payload, Video)
            steps += [mark.step for mark in read_video(event.payload)]
    return steps


async def test_video_is_made_where_its_reader_sees_it(bus: Bus) -> None:
    assert await frames_of(await bus.ask("video")) == list(range(40))  # the first chunks agree on the arena
    before = bus.arena("video")

    assert await frames_of(await bus.ask("video")) == list(range(40))

    after = bus.arena("video")
    # Each chunk took one block, the one that it was made in, and was lent; a copy would have taken another.
    assert (after.written - before.written, after.lent - before.lent) == (10, 10)
    await bus.until(lambda: bus.arena("video").used_bytes == 0)


async def test_one_picture_for_two_ports_is_made_once(bus: Bus) -> None:
    async def pictures() -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        async for event in await bus.ask("image"):
            if isinstance(event, Item):
                assert isinstance(event.payload, Image)
                seen.append((event.port, read_image(event.payload).step))
        return sorted(seen)

    expected = [("image", 5), *(("preview", step) for step in range(6))]
    assert await pictures() == expected
    before = bus.arena("image")

    assert await pictures() == expected

    after = bus.arena("image")
    assert (after.written - before.written, after.lent - before.lent) == (6, 7)
    await bus.until(lambda: bus.arena("image").used_bytes == 0)


async def test_cancelled_request_leaves_nothing_in_the_arena(bus: Bus) -> None:
    await frames_of(await bus.ask("video"))
    request = await bus.ask("video", num_frames=100_000)
    held = [await anext(request) for _ in range(3)]
    await bus.until(lambda: bus.deployment.stages["video.0"].stats.suspended == 1)
    assert bus.arena("video").used_bytes > 0

    request.cancel()

    with pytest.raises(RequestCancelled):
        await frames_of(request)
    await bus.until(lambda: bus.deployment.stages["video.0"].stats.active == 0)
    held.clear()
    del request
    await bus.until(lambda: bus.arena("video").used_bytes == 0)


async def test_receiver_that_grants_no_credit_ends_by_its_deadline_alone(bus: Bus) -> None:
    """Its request is suspended with a window of memory, others go on, and the arena is whole in the end."""
    await frames_of(await bus.ask("video"))
    greedy = await bus.ask("video", timeout_s=2.0, num_frames=100_000)

    await bus.until(lambda: bus.deployment.stages["video.0"].stats.suspended == 1)
    steps = bus.deployment.stages["video.0"].engine.num_steps  # type: ignore[attr-defined]
    # A window is on its way, and the engine may have made two more before it was stopped. A block is a power of two.
    assert bus.arena("video").used_bytes <= (WINDOW + 2) * 2 * CHUNK_BYTES
    assert await frames_of(await bus.ask("video")) == list(range(40))
    assert bus.deployment.stages["video.0"].engine.num_steps == steps + 10  # type: ignore[attr-defined]

    async with asyncio.timeout(LIMIT_S):
        while not greedy.is_over:
            await bus.client.admin("health")
    with pytest.raises(DeadlineExceeded, match="time limit"):
        await frames_of(greedy)
    del greedy
    await bus.until(lambda: bus.arena("video").used_bytes == 0)
    assert bus.deployment.stages["video.0"].stats.active == 0


async def test_killed_client_gives_its_memory_back(bus: Bus) -> None:
    about = bus.deployment.deployment
    command = [sys.executable, "-c", CHILD, about.listen("victim"), about.coordinator_endpoint]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 (its output is awaited)
    assert child.stdout is not None
    try:
        assert await asyncio.to_thread(child.stdout.readline) == "holds\n"
        await bus.until(lambda: bus.deployment.stages["video.0"].stats.suspended == 1)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()

    await bus.until(lambda: bus.deployment.stages["video.0"].stats.active == 0)
    await bus.until(lambda: bus.arena("video").used_bytes == 0)
    assert await frames_of(await bus.ask("video")) == list(range(40))


async def test_arena_full_of_kept_chunks_goes_on_in_messages(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(TOML.replace(str(ARENA_BYTES), str(4 << 20))) as bus:
        kept: list[Video] = []
        async for event in await bus.ask("video", num_frames=80):
            if isinstance(event, Item):
                assert isinstance(event.payload, Video)
                kept.append(event.payload)

        assert [mark.step for video in kept for mark in read_video(video)] == list(range(80))
        await bus.until(lambda: bus.arena("video").used_bytes == 2 << 20)  # no reader may hold more than half
        assert bus.arena("video").full > 0
        assert any("no room for 786432 bytes in the arena: client holds" in message for message in caplog.messages)
        kept.clear()
        await bus.until(lambda: bus.arena("video").used_bytes == 0)


async def test_memory_is_given_out_on_the_engines_thread(bus: Bus) -> None:
    stage = bus.deployment.stages["image.0"]
    seen: list[Any] = []

    def make() -> None:
        blob = stage.engine.context.allocate(100_000)
        blob.view[:] = b"x" * 100_000
        seen.append((threading.current_thread().name, len(blob), blob.view.readonly))

    await stage._thread.run(make)

    assert seen == [("image.0", 100_000, False)]
    assert bus.arena("image").used_bytes == 0, "never sent, and given back"


async def test_stage_lends_as_much_device_memory_as_its_deployment_says() -> None:
    async with connected("cuda_bytes = 8192\n" + TOML) as bus:
        link = bus.deployment.stages["video.0"]._driver._link

        assert link._cuda._data_bytes == 8192


async def test_client_sends_what_it_made_in_place(bus: Bus) -> None:
    blob = bus.client.allocate(200_000)
    assert bus.client._driver._link.statistics().arena.slots == 1  # type: ignore[union-attr]
    del blob
    assert bus.client._driver._link.statistics().arena.slots == 0  # type: ignore[union-attr]
    small = bus.client.allocate(10)
    small.view[:] = b"0123456789"
    assert bus.client._driver._link.statistics().arena.slots == 0  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="num_bytes -1 is negative"):
        bus.client.allocate(-1)
