"""A deployment that makes videos, and what tests of its routes share.

Import as ``from videos import …`` in a test that puts this folder on the path.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np

from adapters.synthetic_marks import PictureMark, read_video
from omni_bus.wire.payloads import Blob, Video

if TYPE_CHECKING:
    import aiohttp

    from actors.testing import Running

VIDEOS = "/v1/videos"

EDGES = """edges = [
  "in.prompt -> camera.prompt",
  "in.images -> camera.images",
  "in.interactions -> camera.interactions",
  "camera.video -> out.video",
  "camera.audio -> out.audio",
  "camera.progress -> out.progress",
  "camera.interactions -> out.interactions",
]"""

TOML = """
[stages.camera]
adapter = "synthetic-video"
frames_per_chunk = 3
num_inference_steps = 4
width = 64
height = 64
{stage}
[pipelines.video]
serve_as = "camera"
aliases = ["film"]
{edges}
[pipelines.silent]
edges = ["in.prompt -> camera.prompt", "camera.video -> out.video"]
[gateways.openai]
min_free_bytes = 0
{gateway}
"""


SLOW = "num_frames = 100000\nstep_time_s = 0.01"
"""A video that no test waits for."""


def deployment_of(stage: str = "", gateway: str = "") -> str:
    stage = stage if "num_frames" in stage else f"num_frames = 12\n{stage}"
    return TOML.format(stage=stage, gateway=gateway, edges=EDGES)


def marks_of(data: bytes) -> list[PictureMark]:
    """What the frames of a file or a stream say."""
    with av.open(io.BytesIO(data), "r") as container:
        pictures = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    num_frames, height, width, _ = pictures.shape
    return read_video(Video(0, num_frames, height, width, 1, 24, Blob(pictures.tobytes())))


async def create(session: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    async with session.post(VIDEOS, json={"prompt": "a cat", **fields}) as response:
        document = await response.json()
        assert response.status == 200, document
        return document


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    async with session.get(f"{VIDEOS}{path}") as response:
        return response.status, await response.json()


async def until(session: aiohttp.ClientSession, video_id: str, *statuses: str) -> dict[str, Any]:
    """Ask for a job until it is so far; each round is a round trip."""
    while True:
        status, job = await get(session, f"/{video_id}")
        assert status == 200, job
        if job["status"] in (statuses or ("completed", "failed")):
            return job


async def content(session: aiohttp.ClientSession, video_id: str, **headers: str) -> tuple[int, bytes, Any]:
    async with session.get(f"{VIDEOS}/{video_id}/content", headers=headers) as response:
        return response.status, await response.read(), response.headers


def folder_of(deployment: Running) -> Path:
    return Path(deployment.deployment.state_dir) / "gateways" / "openai" / "videos"


def endings(deployment: Running) -> list[str]:
    """Of what the folder of videos holds."""
    found = (path.name for path in folder_of(deployment).iterdir() if path.name != ".lock")
    return sorted(name.partition(".")[2] for name in found)


def message_of(document: bytes) -> dict[str, Any]:
    return json.loads(document)["error"]
