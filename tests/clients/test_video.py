"""The shipped deployment of videos: what its model films is what the prompts said, through HTTP and the live socket."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import av
import numpy as np
import pytest
import pytest_asyncio
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "models"))

from film_grid import PROMPTS
from moving_emoji import FRAMES, Painter, judge  # type: ignore[import-not-found] (put on the path above)
from text_engine import with_one_thread  # type: ignore[import-not-found] (beside this file)

from actors.testing import Running, running
from omni_bus.client import connect_video
from omni_bus.client.video import VideoChunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIG = (ROOT / "configs" / "video.toml").read_text(encoding="utf-8")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Running]:
    await with_one_thread()
    async with running(CONFIG.replace("port = 8000", "port = 0\nmin_free_bytes = 0")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter(str(ROOT / "scripts" / "models" / "sprites.npz"))


def clip_of(data: bytes) -> torch.Tensor:
    """Return a file's pixels, (3, frames, height, width) in 0..1."""
    with av.open(io.BytesIO(data), "r") as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return torch.from_numpy(frames).permute(3, 0, 1, 2) / 255


async def make(session: aiohttp.ClientSession, prompt: str) -> dict[str, Any]:
    """Return a job that is over."""
    async with session.post("/v1/videos", json={"prompt": prompt, "seed": 1}) as response:
        job = await response.json()
    while job["status"] not in ("completed", "failed"):
        async with session.get(f"/v1/videos/{job['id']}") as response:
            job = await response.json()
    return job


async def test_videos_show_what_their_prompts_said(deployment: Running, painter: Painter) -> None:
    async with aiohttp.ClientSession(deployment.url) as session:
        jobs = await asyncio.gather(*(make(session, prompt) for prompt in PROMPTS))
        assert {(job["status"], job["num_frames"], job["fps"]) for job in jobs} == {("completed", FRAMES, 12.0)}
        seen = []
        for job in jobs:
            async with session.get(f"/v1/videos/{job['id']}/content") as response:
                clip = clip_of(await response.read())
            assert clip.shape == (3, FRAMES, 64, 64)
            found = judge(painter, clip)
            seen.append(found and found.prompt)

    assert tuple(seen) == PROMPTS


async def test_video_is_watched_while_it_is_made(deployment: Running, painter: Painter) -> None:
    async with connect_video(deployment.url, PROMPTS[0], {"seed": 1}) as video:
        chunks = [event async for event in video if isinstance(event, VideoChunk)]

    assert [chunk.metadata.num_frames for chunk in chunks] == [1, 4, 4, 4, 4, 4, 4]
    found = judge(painter, clip_of(b"".join(chunk.data for chunk in chunks)))
    assert found
    assert found.prompt == PROMPTS[0]


async def test_readmes_command_makes_a_video(deployment: Running, painter: Painter, tmp_path: Path) -> None:
    (command,) = re.findall(r"^\$ (curl [^\n]*/v1/videos/sync .*?)$", README, re.MULTILINE)
    command = command.replace("http://127.0.0.1:8000", deployment.url)
    curl = await asyncio.create_subprocess_exec("bash", "-c", command, cwd=tmp_path)
    assert await curl.wait() == 0

    found = judge(painter, clip_of((tmp_path / "rocket.mp4").read_bytes()))
    assert found
    assert found.prompt in command
