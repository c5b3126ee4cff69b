"""Videos by diffusers' models over HTTP and WebSocket: tiny Wan (of a text, of a picture) and LTX 2 (with sound)."""

from __future__ import annotations

import importlib
import io
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import av
import numpy as np
import pytest
import torch
from websockets.asyncio.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
sys.path.insert(0, str(Path(__file__).parents[1] / "gateways"))
sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

import tiny_diffusion  # type: ignore[import-not-found] (put on the path above)
from samples import images, png  # type: ignore[import-not-found] (put on the path above)
from samples import videos as clips  # type: ignore[import-not-found] (put on the path above)
from videos import (  # type: ignore[import-not-found] (put on the path above)
    VIDEOS,
    content,
    create,
    endings,
    get,
    until,
)

from actors.testing import running
from adapters.diffusion.drawing import Drawing
from omni_bus.media.mp4 import boxes

if TYPE_CHECKING:
    from actors.testing import Running

pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # Of diffusers, transformers and torch, at work on models of this size.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CALL = {"width": 64, "height": 64, "num_frames": 9, "num_inference_steps": 5, "guidance_scale": 2.0}

TOML = """
[stages.camera]
adapter = "diffusers"
model = "{model}"
warm_up = false
max_num_frames = 33
call = {{ {call} }}
[pipelines.video]
serve_as = "film"
edges = [
  "in.prompt -> camera.prompt",
  {edges}
  "camera.video -> out.video",
  "camera.progress -> out.progress",
]
[gateways.openai]
min_free_bytes = 0
"""

FROM_PICTURE = '"in.images -> camera.images",'
WITH_SOUND = '"camera.audio -> out.audio",'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a tiny model, made when it is first asked for."""
    made: dict[str, str] = {}
    builders = {name: tiny_diffusion.PIPELINES[name].make for name in ("WanPipeline", "WanImageToVideoPipeline")}
    builders["LTX2Pipeline"] = tiny_diffusion.ltx2

    def of(name: str) -> str:
        if name not in made:
            torch.manual_seed(0)
            made[name] = str(tmp_path_factory.mktemp(name))
            tiny_diffusion.lively(builders[name]()).save_pretrained(made[name])
        return made[name]

    return of


def deployment_of(folder: str, edges: str = "", **call: Any) -> str:
    words = ", ".join(f"{name} = {value}" for name, value in (CALL | call).items())
    return TOML.format(model=folder, edges=edges, call=words)


def pixels_of(data: bytes) -> np.ndarray[Any, Any]:
    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def brightness(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """BT.709's luma, which a lossless file keeps up to rounding."""
    return pixels.astype(float) @ (0.2126, 0.7152, 0.0722)


def drawn_alone(folder: str, prompt: str, **call: Any) -> np.ndarray[Any, Any]:
    """Return what diffusers itself makes."""
    diffusers: Any = importlib.import_module("diffusers")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(prompt, generator=torch.Generator().manual_seed(7), output_type="np", **CALL | call)
    return (output.frames[0] * 255).round().astype(np.uint8)


def engine_of(deployment: Running) -> Any:
    return deployment.stages["camera.0"].engine


async def until_idle(deployment: Running, session: aiohttp.ClientSession) -> None:
    """Wait until the stage holds no request; each round is a round trip."""
    while deployment.stages["camera.0"].stats.active or deployment.gateway.client.requests:
        await get(session, "")
    assert engine_of(deployment)._live == {}


# --- what is made -------------------------------------------------------------------------------------------


async def test_text_becomes_the_video_that_diffusers_makes(model: Callable[[str], str]) -> None:
    folder = model("WanPipeline")
    async with running(deployment_of(folder)) as deployment, aiohttp.ClientSession(deployment.url) as session:
        job = await create(session, prompt="a red cube", seed=7, fps=8, quality="lossless")
        seen = [job["progress"]]
        while (job := (await get(session, f"/{job['id']}"))[1])["status"] not in ("completed", "failed"):
            seen.append(job["progress"])
        assert job["status"] == "completed", job
        _, data, _ = await content(session, job["id"])

    assert seen == sorted(seen)
    assert {17, 34, 51, 68, 85} & set(seen), "steps show as they are done"
    assert (job["num_frames"], job["fps"], job["duration_s"]) == (9, 8.0, 1.125)
    made, expected = pixels_of(data), drawn_alone(folder, "a red cube")
    assert made.shape == expected.shape
    assert np.abs(brightness(made) - brightness(expected)).mean() < 2
    assert brightness(expected).std() > 5


async def test_picture_becomes_a_video(model: Callable[[str], str]) -> None:
    toml = deployment_of(model("WanImageToVideoPipeline"), FROM_PICTURE)
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        made = []
        for picture in (images()["png"], png(64, 64)):
            form = aiohttp.FormData({"prompt": "it moves", "seed": "7", "size": "64x48", "quality": "lossless"})
            form.add_field("input_reference", picture, filename="a.png")
            async with session.post(f"{VIDEOS}/sync", data=form) as response:
                assert response.status == 200, await response.text()
                made.append(pixels_of(await response.read()))
        job = await until(session, (await create(session))["id"])

    assert [each.shape for each in made] == [(9, 48, 64, 3)] * 2
    assert not np.array_equal(made[0], made[1]), "the picture is seen"
    assert job["error"] == {"code": 400, "message": "images: none came (allowed: at least 1)"}


async def test_sound_of_the_same_model_is_in_the_file(model: Callable[[str], str]) -> None:
    call = {"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
    toml = deployment_of(model("LTX2Pipeline"), WITH_SOUND, **call)
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        job = await until(session, (await create(session, seed=7))["id"])
        assert job["status"] == "completed", job
        _, data, _ = await content(session, job["id"])
        job = await until(session, (await create(session, seed=7, generate_sound=False))["id"])
        _, silent, _ = await content(session, job["id"])

    with av.open(io.BytesIO(data), "r") as container:
        assert {stream.type for stream in container.streams} == {"video", "audio"}
        assert sum(1 for _ in container.decode(video=0)) == 5
    with av.open(io.BytesIO(data), "r") as container:
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        assert (heard.shape[0], container.streams.audio[0].rate) == (2, 16_000)
        assert heard.std() > 0.01
    with av.open(io.BytesIO(silent), "r") as container:
        assert [stream.type for stream in container.streams] == ["video"]


# --- while it is made ---------------------------------------------------------------------------------------


async def start(socket: ClientConnection, **fields: Any) -> None:
    await socket.send(json.dumps({"type": "session.start", "prompt": "a red cube", **fields}))


async def chunk_of(socket: ClientConnection) -> bytes:
    """The next fragment, whatever is said before it."""
    while not isinstance(received := await socket.recv(), bytes):
        assert json.loads(received)["type"] != "error", received
    return received


async def test_first_frames_are_seen_before_the_last_are_decoded(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder goes on to its second group of frames only once the client has the first."""
    is_seen = threading.Event()
    publish = Drawing._publish
    num_waited = []

    def gated(drawing: Drawing, pixels: Any) -> None:
        if drawing._num_published:
            num_waited.append(drawing._num_published)
            assert is_seen.wait(60), "the first frames never left"
        publish(drawing, pixels)

    monkeypatch.setattr(Drawing, "_publish", gated)
    async with (
        running(deployment_of(model("WanPipeline"))) as deployment,
        connect(f"ws://127.0.0.1:{deployment.port}/v1/realtime/video") as socket,
    ):
        await start(socket, seed=7, num_frames=13)
        first = await chunk_of(socket)
        assert [kind for kind, _, _ in boxes(first)][:2] == [b"ftyp", b"moov"]
        assert len(pixels_of(first)) == 1
        is_seen.set()
        rest = b"".join([await chunk_of(socket) for _ in range(3)])
        assert len(pixels_of(first + rest)) == 13
    assert num_waited == [1, 5, 9]


async def test_deleted_job_ends_between_two_steps(model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    drawings: list[Drawing] = []
    advance = Drawing.advance

    def watched(drawing: Drawing) -> bool:
        if drawing not in drawings:
            drawings.append(drawing)
        return advance(drawing)

    monkeypatch.setattr(Drawing, "advance", watched)
    async with (
        running(deployment_of(model("WanPipeline"))) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        doomed = (await create(session, num_inference_steps=200))["id"]
        while (await get(session, f"/{doomed}"))[1]["progress"] == 0:
            pass
        async with session.delete(f"{VIDEOS}/{doomed}") as response:
            assert response.status == 200
        await until_idle(deployment, session)
        num_steps = drawings[0].num_steps_done
        assert 0 < num_steps < 200
        job = await until(session, (await create(session))["id"])
        assert job["status"] == "completed"
        assert drawings[0].num_steps_done == num_steps
        async with session.delete(f"{VIDEOS}/{job['id']}") as response:
            assert response.status == 200
        assert endings(deployment) == []


# --- what the model can't do --------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"size": "1x1"}, "size", "width 16, 32, … up to 16384"),
    ({"size": "72x64"}, "size", "width 16, 32, … up to 16384"),
    ({"size": "64x60"}, "size", "height 16, 32, … up to 16384"),
    ({"size": "100000x100000"}, "size", "from 1 to 16384"),
    ({"width": 72, "height": 64}, "width", "16, 32, … up to 16384"),
    ({"num_frames": 8}, "num_frames", "1, 5, … up to 33"),
    ({"num_frames": 37}, "num_frames", "1, 5, … up to 33"),
    ({"num_frames": 10_000}, "num_frames", "1, 5, … up to 33"),
    ({"seconds": "2"}, "seconds", "num_frames 1, 5, … up to 33"),
    ({"num_inference_steps": 0}, "num_inference_steps", "1 to 200"),
    ({"num_inference_steps": -1}, "num_inference_steps", "1 to 200"),
    ({"guidance_scale": "NaN"}, "guidance_scale", "0 to 20"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt", "1"),
    ({"num_outputs_per_prompt": 10_000}, "num_outputs_per_prompt", "1"),
    ({"generate_sound": True}, "generate_sound", "makes no sound"),
    ({"image_reference": {"image_url": "data:,"}}, "image_reference.image_url", "none"),
]

BAD_OF_STAGE: list[tuple[dict[str, Any], str]] = [
    ({"lora": {"name": "unheard", "scale": 1.0}}, "lora"),
    ({"extra_params": {"unheard": 1}}, "extra_params"),
    ({"strength": 0.5}, "strength"),
    ({"prompt": "x" * 10_000}, "prompt"),
]
"""What only the model's own process knows."""


async def test_what_the_model_cannot_do_is_refused_at_once(model: Callable[[str], str]) -> None:
    async with (
        running(deployment_of(model("WanPipeline"))) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        for fields, param, allowed in BAD:
            for path in (VIDEOS, f"{VIDEOS}/sync"):
                async with session.post(path, json={"prompt": "a cat"} | fields) as response:
                    document = await response.json()
                    assert (response.status, document["error"]["param"]) == (400, param), (fields, document)
                    assert allowed in document["error"]["message"], (fields, document)
            async with connect(f"ws://127.0.0.1:{deployment.port}/v1/realtime/video") as socket:
                await start(socket, **fields)
                said = json.loads(await socket.recv())
                assert (said["type"], said["message"].partition(":")[0]) == ("error", param), (fields, said)
        assert (await get(session, ""))[1]["data"] == []
        assert deployment.stages["camera.0"].stats.done == 0, "no stage saw any of it"

        for fields, param in BAD_OF_STAGE:
            async with session.post(f"{VIDEOS}/sync", json={"prompt": "a cat"} | fields) as response:
                document = await response.json()
                assert (response.status, document["error"]["param"]) == (400, param), (fields, document)
            async with session.post(VIDEOS, json={"prompt": "a cat"} | fields) as response:
                job = await response.json()
            if response.status == 200:
                job = await until(session, job["id"])
                assert (job["status"], job["error"]["code"]) == ("failed", 400), (fields, job)
        await until_idle(deployment, session)


async def test_seconds_are_as_many_frames_as_the_model_makes(model: Callable[[str], str]) -> None:
    async with (
        running(deployment_of(model("WanPipeline"))) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        job = await create(session, seconds="2", fps=4)
        assert (job["seconds"], job["num_frames"]) == ("2", 9)
        job = await until(session, job["id"])
        assert (job["status"], job["num_frames"], job["fps"]) == ("completed", 9, 4.0)


BAD_PICTURES = {
    "nothing": b"",
    "no picture": b"hello, this is text",
    "cut off": images()["png"][:60],
    "bomb": png(60_000, 60_000, num_rows=1),
    "video where none is taken": clips()["mp4-h264"],
}


async def test_bad_picture_is_refused_by_its_field(model: Callable[[str], str]) -> None:
    toml = deployment_of(model("WanImageToVideoPipeline"), FROM_PICTURE)
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for name, data in BAD_PICTURES.items():
            form = aiohttp.FormData({"prompt": "x"})
            form.add_field("input_reference", data, filename="a.png")
            async with session.post(VIDEOS, data=form) as response:
                document = await response.json()
                assert response.status in (400, 413), (name, document)
                assert document["error"]["param"] == "input_reference", (name, document)
        for name in ("gif-animated", "jpeg-420", "webp-rgba"):
            form = aiohttp.FormData({"prompt": "x", "num_inference_steps": "1", "num_frames": "1"})
            form.add_field("input_reference", images()[name], filename="a")
            async with session.post(f"{VIDEOS}/sync", data=form) as response:
                assert response.status == 200 or (await response.json())["error"]["param"] == "input_reference", name
        await until_idle(deployment, session)
