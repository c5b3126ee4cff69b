"""Videos by the official client."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import av
import openai
import pytest
from openai.types import Video

sys.path.insert(0, str(Path(__file__).parents[1] / "gateways"))
sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

from samples import images  # type: ignore[import-not-found] (put on the path above)
from videos import deployment_of  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running

# Its authors retire their own service; the protocol lives on in other servers.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


def client_of(deployment: Running, key: str = "one") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key=key, max_retries=0)


async def test_video_is_made_and_downloaded(tmp_path: Path) -> None:
    async with running(deployment_of()) as deployment, client_of(deployment) as client:
        made = await client.videos.create_and_poll(
            prompt="a cat",
            model="camera",
            seconds="4",
            size="720x1280",
            input_reference=("a.png", images()["png"], "image/png"),
            extra_body={"fps": 2},
            poll_interval_ms=50,
        )
        assert isinstance(made, Video)
        assert (made.status, made.progress, made.seconds, made.size) == ("completed", 100, "4", "720x1280")
        assert made.error is None
        assert await client.videos.retrieve(made.id) == made

        found = await client.videos.download_content(made.id)
        found.write_to_file(tmp_path / "a.mp4")
        with av.open(io.BytesIO((tmp_path / "a.mp4").read_bytes()), "r") as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height, stream.average_rate) == (720, 1280, 2)
            assert sum(1 for _ in container.decode(video=0)) == 8

        deleted = await client.videos.delete(made.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "video.deleted")
        for gone in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
            with pytest.raises(openai.NotFoundError):
                await gone(made.id)


async def test_videos_are_listed() -> None:
    async with running(deployment_of()) as deployment, client_of(deployment) as client:
        made = [(await client.videos.create(prompt=str(i))).id for i in range(5)]
        assert [video.id async for video in client.videos.list(limit=2)] == made[::-1]
        assert [video.id async for video in client.videos.list(limit=2, order="asc", after=made[2])] == made[3:]


async def test_failure_and_refusals_are_the_clients_own_errors() -> None:
    async with running(deployment_of("fail_at_step = 1")) as deployment, client_of(deployment) as client:
        made = await client.videos.create_and_poll(prompt="x", poll_interval_ms=50)
        assert made.status == "failed"
        assert made.error is not None
        with pytest.raises(openai.UnprocessableEntityError):
            await client.videos.download_content(made.id)
        with pytest.raises(openai.BadRequestError, match="model"):
            await client.videos.create(prompt="x", model="sora-2")
        with pytest.raises(openai.BadRequestError, match="variant"):
            await client.videos.download_content(made.id, variant="thumbnail")
