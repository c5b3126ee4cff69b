"""The client of live videos, with the real gateway."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gateways"))

from videos import SLOW, deployment_of, marks_of  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running
from omni_bus.client import ConnectFailed, EventRefused, connect_video
from omni_bus.client.video import (
    VIDEO_EVENTS,
    InteractionQueued,
    UnknownVideoEvent,
    VideoChunk,
    VideoDone,
    VideoError,
    VideoPong,
)


async def test_video_is_watched_to_its_end() -> None:
    config = {"num_frames": 9}
    async with running(deployment_of()) as deployment, connect_video(deployment.url, "a cat", config) as video:
        events = [event async for event in video]
    chunks = [event for event in events if isinstance(event, VideoChunk)]
    assert [chunk.metadata.num_frames for chunk in chunks] == [3, 3, 3]
    assert [len(chunk.data) for chunk in chunks] == [chunk.metadata.byte_length for chunk in chunks]
    assert [mark.step for mark in marks_of(b"".join(chunk.data for chunk in chunks))] == list(range(9))
    assert isinstance(events[-1], VideoDone)
    assert (events[-1].chunks, events[-1].stopped) == (3, False)


async def test_video_is_changed_and_stopped() -> None:
    async with running(deployment_of(SLOW)) as deployment, connect_video(deployment.url, "a cat") as video:
        await video.ping()
        await video.until(VideoPong)
        await video.interact("rain", event_id="e", transition_chunks=1)
        assert (await video.until(InteractionQueued)).event_id == "e"
        while "e" not in (await video.until(VideoChunk)).metadata.active_event_ids:
            pass
        await video.interact("rain", event_id="e")
        with pytest.raises(EventRefused) as refused:
            await video.until(InteractionQueued)
        assert (refused.value.code, refused.value.event_id) == ("event_id_conflict", "e")
        await video.send("dance")
        assert "dance" in (await video.until(VideoError)).message
        await video.stop()
        assert (await video.until(VideoDone)).stopped


async def test_what_is_refused_is_raised() -> None:
    async with running(deployment_of()) as deployment:
        with pytest.raises(EventRefused, match="size") as refused:
            async with connect_video(deployment.url, "a cat", {"size": "1x1"}):
                pass
        assert refused.value.param == "size"
    with pytest.raises(ConnectFailed):
        async with connect_video("http://127.0.0.1:1", "a cat"):
            pass


@pytest.mark.parametrize("data", ["", "[]", '{"type": "x"}', '{"type": "session.done", "chunks": "many"}'])
def test_event_that_is_not_known_raises_nothing(data: str) -> None:
    assert isinstance(VIDEO_EVENTS.decode(data), UnknownVideoEvent)
