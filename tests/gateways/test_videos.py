"""``/v1/videos``: jobs from their beginning to their end, whoever asks, whatever stops."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import av
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

from samples import images, png  # type: ignore[import-not-found] (put on the path above)
from videos import (  # type: ignore[import-not-found] (put on the path above)
    SLOW,
    VIDEOS,
    content,
    create,
    deployment_of,
    endings,
    folder_of,
    get,
    marks_of,
    until,
)

from actors.testing import Running, running
from adapters.synthetic_marks import PictureMark
from gateways.videos import jobs
from omni_bus.media.store import Quota, Store


def active(deployment: Running) -> int:
    return deployment.stages["camera.0"].stats.active


async def test_job_makes_the_video_that_was_asked_for() -> None:
    async with (
        running(deployment_of(stage="step_time_s = 0.02")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        job = await create(session, num_frames=9, fps=12, size="96x80", model="film", user="me")
        assert job["id"].startswith("video_gen_")
        assert (job["object"], job["status"], job["progress"]) == ("video", "queued", 0)
        assert (job["model"], job["size"], job["num_frames"], job["fps"]) == ("film", "96x80", 9, 12)
        seen = [job["progress"]]
        while (job := (await get(session, f"/{job['id']}"))[1])["status"] not in ("completed", "failed"):
            seen.append(job["progress"])
        assert job["status"] == "completed", job
        assert seen == sorted(seen)
        assert {21, 42, 64} & set(seen), "steps show as they are done"
        assert (job["progress"], job["num_frames"], job["fps"], job["duration_s"]) == (100, 9, 12.0, 0.75)
        assert job["expires_at"] == pytest.approx(job["completed_at"] + 86400, abs=1)
        assert job["stage_durations"]["camera"] > 0

        status, data, headers = await content(session, job["id"])
        assert (status, headers["Content-Type"]) == (200, "video/mp4")
        assert job["file_name"] in headers["Content-Disposition"]
        assert marks_of(data) == [PictureMark("a_cat", i, 9) for i in range(9)]
        with av.open(io.BytesIO(data), "r") as container:
            assert [stream.type for stream in container.streams] == ["video", "audio"]
        status, part, headers = await content(session, job["id"], Range="bytes=10-19")
        assert (status, part) == (206, data[10:20])
        assert headers["Content-Range"] == f"bytes 10-19/{len(data)}"
        status, _, _ = await content(session, job["id"], Range="bytes=999999999-")
        assert status == 416


async def test_sound_is_left_out_where_it_is_not_wanted() -> None:
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for fields in ({"generate_sound": False}, {"model": "silent"}):
            job = await until(session, (await create(session, **fields))["id"])
            _, data, _ = await content(session, job["id"])
            with av.open(io.BytesIO(data), "r") as container:
                assert [stream.type for stream in container.streams] == ["video"]


async def test_jobs_are_listed_page_by_page() -> None:
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        assert (await get(session, ""))[1] == {
            "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
        }  # fmt: skip
        made = [(await create(session))["id"] for _ in range(5)]
        for order, expected in (("asc", made), ("desc", made[::-1])):
            found: list[str] = []
            after = ""
            while True:
                _, page = await get(session, f"?order={order}&limit=2{after}")
                found += [job["id"] for job in page["data"]]
                assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
            assert found == expected
        assert [job["id"] for job in (await get(session, ""))[1]["data"]] == made[::-1]
        assert (await get(session, "?limit=0"))[1]["data"] == []
        assert (await get(session, "?after=video_gen_none"))[1]["data"] == []
        for query in ("limit=-1", "limit=101", "limit=x", "order=up"):
            status, document = await get(session, f"?{query}")
            assert (status, document["error"]["param"]) == (400, query.partition("=")[0])


async def test_jobs_of_another_key_are_not_there() -> None:
    toml = deployment_of(gateway='api_keys = ["one", "two"]')
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with (
        running(toml) as deployment,
        aiohttp.ClientSession(deployment.url, headers=mine) as session,
        aiohttp.ClientSession(deployment.url, headers=other) as stranger,
    ):
        video_id = (await until(session, (await create(session))["id"]))["id"]
        ids = (video_id, "video_gen_" + "0" * 32, "..%2f..%2fetc%2fpasswd", "x", "a" * 3000)
        for name in ids:
            for method, path in (("GET", name), ("DELETE", name), ("GET", f"{name}/content")):
                async with stranger.request(method, f"{VIDEOS}/{path}") as response:
                    assert response.status in (404, 405)
        assert (await get(stranger, ""))[1]["data"] == []
        assert (await content(session, video_id))[0] == 200


async def test_deleted_job_frees_its_slot_and_its_file() -> None:
    async with running(deployment_of(stage=SLOW)) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for _ in range(2):
            video_id = (await create(session))["id"]
            await until(session, video_id, "in_progress")
            status, data, _ = await content(session, video_id)
            assert (status, msgspec.json.decode(data)["error"]["param"]) == (404, "video_id")
            async with session.delete(f"{VIDEOS}/{video_id}") as response:
                assert await response.json() == {"id": video_id, "object": "video.deleted", "deleted": True}
            while active(deployment):
                await get(session, "")
            assert (await get(session, f"/{video_id}"))[0] == 404
            assert endings(deployment) == []
        assert deployment.gateway.client.requests == {}


async def test_job_that_waits_for_its_turn_is_deleted_too() -> None:
    toml = deployment_of(stage=SLOW, gateway="videos_at_once = 1")
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        running_id, waiting_id = [(await create(session))["id"] for _ in range(2)]
        await until(session, running_id, "in_progress")
        assert (await get(session, f"/{waiting_id}"))[1]["status"] == "queued"
        for video_id in (waiting_id, running_id):
            async with session.delete(f"{VIDEOS}/{video_id}") as response:
                assert response.status == 200
        assert endings(deployment) == []


async def test_failed_job_says_why() -> None:
    async with (
        running(deployment_of(stage="fail_at_step = 2")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        job = await until(session, (await create(session))["id"])
        assert (job["status"], job["error"]["code"]) == ("failed", 500)
        assert job["completed_at"]
        assert job["file_name"] is None
        status, data, _ = await content(session, job["id"])
        assert (status, msgspec.json.decode(data)["error"]["code"]) == (422, 422)
        async with session.delete(f"{VIDEOS}/{job['id']}") as response:
            assert response.status == 200
        assert endings(deployment) == []


async def test_number_of_jobs_is_bounded() -> None:
    gateway = 'api_keys = ["one", "two"]\nmax_caller_videos = 2\nmax_videos = 3'
    async with running(deployment_of(stage=SLOW, gateway=gateway)) as deployment:
        for key, statuses in (("one", [200, 200, 429]), ("two", [200, 503])):
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(deployment.url, headers=headers) as session:
                for status in statuses:
                    async with session.post(VIDEOS, json={"prompt": "x"}) as response:
                        assert response.status == status, await response.text()


async def test_references_of_waiting_jobs_are_bounded() -> None:
    gateway = "max_waiting_bytes = 10000\nvideos_at_once = 1"
    async with (
        running(deployment_of(stage=SLOW, gateway=gateway)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        assert await _upload(session, png(48, 48)) == 200  # 6912 bytes decoded
        assert await _upload(session, png(48, 48)) == 503


async def test_jobs_go_on_while_the_gateway_drains() -> None:
    async with running(deployment_of(stage="step_time_s = 0.02")) as deployment:
        async with aiohttp.ClientSession(deployment.url) as session:
            video_id = (await create(session))["id"]
        assert await deployment.gateway.drain(30.0)
        (record,) = folder_of(deployment).glob("video_gen-*.json")
        job = msgspec.json.decode(record.read_bytes())["metadata"]["job"]
        assert (job["id"], job["status"]) == (video_id, "completed")


async def test_job_that_the_stop_cut_off_says_so_after_the_restart(tmp_path: Path) -> None:
    toml = deployment_of(stage=SLOW, gateway=f'videos_dir = "{tmp_path}/videos"')
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        video_id = (await create(session))["id"]
        await until(session, video_id, "in_progress")
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        job = await until(session, video_id)
        assert (job["status"], job["error"]["code"]) == ("failed", 503)


@pytest.mark.parametrize("has_file", [True, False])
async def test_job_of_a_gateway_that_died_is_over(tmp_path: Path, *, has_file: bool) -> None:
    """By what it left on the disk: its file came before its last record, or it did not come."""
    toml = deployment_of(gateway=f'videos_dir = "{tmp_path}/videos"')
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        made = await until(session, (await create(session))["id"])
        _, data, _ = await content(session, made["id"])
    kept = Store(tmp_path / "videos", Quota(max_owner_bytes=9**9, max_owner_files=9, max_total_bytes=9**9))
    (entry,) = await kept.entries("video_gen", "")
    before = entry.metadata["job"] | {"status": "in_progress", "progress": 50, "completed_at": None, "expires_at": None}
    await kept.amend(entry, {"job": before})
    if not has_file:
        assert await kept.delete(before["content"], "video_file", "")
    kept.close()

    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        job = (await get(session, ""))[1]["data"][0]
        assert job == (await get(session, f"/{made['id']}"))[1]
        if has_file:
            assert (job["status"], job["num_frames"]) == ("completed", 12)
            assert (await content(session, made["id"]))[1] == data
        else:
            assert (job["status"], job["error"]) == ("failed", {"code": 503, "message": jobs.LOST})
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        assert (await get(session, ""))[1]["data"][0] == job, "it was written down"


async def test_other_processes_of_a_gateway_see_and_delete_its_jobs(tmp_path: Path) -> None:
    toml = deployment_of(stage=SLOW, gateway=f'videos_dir = "{tmp_path}/videos"')
    async with (
        running(toml) as one,
        running(toml) as two,
        aiohttp.ClientSession(one.url) as session,
        aiohttp.ClientSession(two.url) as other,
    ):
        video_id = (await create(session))["id"]
        await until(other, video_id, "in_progress")
        async with other.delete(f"{VIDEOS}/{video_id}") as response:
            assert response.status == 200
        assert (await get(session, f"/{video_id}"))[0] == 404
        while active(one):  # it hears of it with its next report
            await get(session, "")
        while {path.name for path in (tmp_path / "videos").iterdir()} != {".lock"}:  # then lets go of the file
            await get(session, "")


async def test_file_expires_before_its_job() -> None:
    async with (
        running(deployment_of(gateway="video_keep_s = 0.5")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        job = await until(session, (await create(session))["id"])
        assert job["expires_at"] <= time.time() + 1
        while (found := await content(session, job["id"]))[0] == 200:
            pass
        assert found[0] == 404
        while (await get(session, f"/{job['id']}"))[0] == 200:
            pass
        assert (await get(session, ""))[1]["data"] == []


async def test_sync_answers_with_the_file() -> None:
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.post(f"{VIDEOS}/sync", json={"prompt": "a dog"}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("video/mp4")
            assert response.headers["X-Model"] == "camera"
            assert response.headers["X-Request-Id"].startswith("video_sync-")
            assert float(response.headers["X-Inference-Time-S"]) > 0
            assert msgspec.json.decode(response.headers["X-Stage-Durations"])["camera"] > 0
            assert marks_of(await response.read()) == [PictureMark("a_dog", i, 12) for i in range(12)]
        assert not folder_of(deployment).exists() or endings(deployment) == []


async def test_sync_ends_with_its_time_and_with_its_client() -> None:
    gateway = "video_sync_timeout_s = 0.3"
    async with (
        running(deployment_of(stage=SLOW, gateway=gateway)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        async with session.post(f"{VIDEOS}/sync", json={"prompt": "x"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (504, 504)
        while active(deployment):
            await get(session, "")
    async with running(deployment_of(stage=SLOW)) as deployment, aiohttp.ClientSession(deployment.url) as session:
        asking = asyncio.create_task(session.post(f"{VIDEOS}/sync", json={"prompt": "x"}))
        while not active(deployment):
            await get(session, "")
        asking.cancel()
        while active(deployment):
            await get(session, "")
        assert deployment.gateway.client.requests == {}


# --- references


async def _upload(session: aiohttp.ClientSession, data: bytes, name: str = "input_reference", **fields: str) -> int:
    form = aiohttp.FormData({"prompt": "x", **fields})
    form.add_field(name, data, filename="a.png")
    async with session.post(VIDEOS, data=form) as response:
        await response.read()
        return response.status


async def test_form_says_the_same_as_json() -> None:
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        form = aiohttp.FormData({"prompt": "12", "seconds": "2", "fps": "6", "generate_sound": "false"})
        form.add_field("extra_params", '{"video_codec_options": {"preset": "ultrafast", "crf": 30}}')
        form.add_field("input_reference", images()["png"], filename="a.png", content_type="text/html")
        async with session.post(VIDEOS, data=form) as response:
            job = await response.json()
            assert response.status == 200, job
        assert (job["prompt"], job["seconds"], job["num_frames"]) == ("12", "2", 12)
        job = await until(session, job["id"])
        assert (job["status"], job["duration_s"]) == ("completed", 2.0)


async def test_references_reach_the_stage() -> None:
    picture = images()["png"]
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for fields in (
            {"image_reference": {"image_url": url}},
            {"image_reference": [{"image_url": url}, url]},
            {"input_reference": {"image_url": url}},
        ):
            assert (await until(session, (await create(session, **fields))["id"]))["status"] == "completed"
        form = aiohttp.FormData({"prompt": "x", "input_reference[image_url]": url}, default_to_multipart=True)
        async with session.post(VIDEOS, data=form) as response:
            assert response.status == 200, await response.text()
        form = aiohttp.FormData({"purpose": "vision"}, default_to_multipart=True)
        form.add_field("file", picture, filename="a.png")
        async with session.post("/v1/files", data=form) as response:
            file_id = (await response.json())["id"]
        await create(session, input_reference={"file_id": file_id})


BAD_FILES: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "no picture": (b"hello, this is text", 400),
    "cut off": (png(200, 200)[:90], 400),
    "bomb": (png(60_000, 60_000, num_rows=1), 413),
    "sound where none is taken": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), 400),
    "video where none is taken": (b"\0\0\0\x18ftypmp42" + bytes(100), 400),
}


@pytest.mark.parametrize("name", BAD_FILES)
async def test_file_that_is_no_reference_is_refused(name: str) -> None:
    data, status = BAD_FILES[name]
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for path in (VIDEOS, f"{VIDEOS}/sync"):
            form = aiohttp.FormData({"prompt": "x"})
            form.add_field("input_reference", data, filename="a.png")
            async with session.post(path, data=form) as response:
                document = await response.json()
                assert response.status == status, document
                assert document["error"]["param"] == "input_reference"
        assert deployment.stages["camera.0"].stats.done == 0
        assert (await get(session, ""))[1]["data"] == []


async def test_references_that_exclude_each_other_are_refused() -> None:
    picture = images()["png"]
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        assert await _upload(session, picture, image_reference='{"image_url": "data:,"}') == 400
        assert await _upload(session, picture, "input_references", image_reference='{"image_url": "data:,"}') == 400
        assert await _upload(session, picture, "picture") == 400
        assert await _upload(session, picture, "input_references") == 200


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "  "}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"prompt": "x" * 100_001}, "prompt"),
    ({"model": "other"}, "model"),
    ({"model": ""}, "model"),
    ({"size": "1x1"}, "size"),
    ({"size": "0x64"}, "size"),
    ({"size": "100000x100000"}, "size"),
    ({"size": "16384x16384"}, "size"),
    ({"size": "64*64"}, "size"),
    ({"size": "auto"}, "size"),
    ({"width": 64}, "height"),
    ({"width": 0, "height": 64}, "width"),
    ({"width": 64.5, "height": 64}, "width"),
    ({"seconds": "0"}, "seconds"),
    ({"seconds": "5.5"}, "seconds"),
    ({"seconds": "-1"}, "seconds"),
    ({"seconds": "9999"}, "seconds"),
    ({"seconds": True}, "seconds"),
    ({"num_frames": 0}, "num_frames"),
    ({"num_frames": 1_000_000}, "num_frames"),
    ({"num_frames": "ten"}, "num_frames"),
    ({"fps": 0}, "fps"),
    ({"fps": "NaN"}, "fps"),
    ({"fps": 12.5}, "fps"),  # this stage's are whole
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"num_inference_steps": -1}, "num_inference_steps"),
    ({"num_inference_steps": 201}, "num_inference_steps"),
    ({"guidance_scale": "NaN"}, "guidance_scale"),
    ({"guidance_scale": -1}, "guidance_scale"),
    ({"guidance_scale": 5}, "guidance_scale"),  # no stage takes it
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**64)}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt"),
    ({"num_outputs_per_prompt": 10_000}, "num_outputs_per_prompt"),
    ({"quality": "best"}, "quality"),
    ({"generate_sound": "yes"}, "generate_sound"),
    ({"model": "silent", "generate_sound": True}, "generate_sound"),
    ({"lora": "style"}, "lora"),
    ({"lora": {"name": "style"}}, "lora"),
    ({"extra_params": "x"}, "extra_params"),
    ({"extra_params": {"task": "t2v"}}, "extra_params"),
    ({"extra_params": {"video_codec_options": {"crf": 52}}}, "extra_params.video_codec_options.crf"),
    ({"extra_params": {"video_codec_options": {"tune": "x"}}}, "extra_params.video_codec_options.tune"),
    ({"image_reference": {}}, "image_reference"),
    ({"image_reference": []}, "image_reference"),
    ({"image_reference": {"image_url": "ftp://x/y.png"}}, "image_reference.image_url"),
    ({"image_reference": {"image_url": "data:image/png;base64,AAAA"}}, "image_reference.image_url"),
    ({"image_reference": {"image_url": "x", "more": 1}}, "image_reference"),
    ({"image_reference": {"file_id": "file-" + "0" * 32}}, "image_reference.file_id"),
    ({"video_reference": {"video_url": "data:video/mp4;base64,AAAA"}}, "video_reference.video_url"),
    ({"audio_reference": {"audio_url": "data:audio/wav;base64,AAAA"}}, "audio_reference.audio_url"),
    ({"model": "silent", "image_reference": {"image_url": "data:,"}}, "image_reference.image_url"),
    ({"aspect_ratio": "16:9"}, "aspect_ratio"),
    ({"nonsense": 1}, "nonsense"),
]


async def test_bad_input_is_refused_by_its_field() -> None:
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for fields, param in BAD:
            for path in (VIDEOS, f"{VIDEOS}/sync"):
                async with session.post(path, json={"prompt": "a cat"} | fields) as response:
                    document = await response.json(content_type=None)
                    assert 400 <= response.status < 500, (fields, document)
                    assert document["error"]["param"] == param, (fields, document)
                    assert "allowed" in document["error"]["message"], (fields, document)
        assert (await get(session, ""))[1]["data"] == []
        assert endings(deployment) == []
        assert deployment.stages["camera.0"].stats.done == 0, "no stage saw any of it"


async def test_form_with_bad_input_is_refused_by_its_field() -> None:
    async with running(deployment_of()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for fields, param in BAD:
            if any(value is None for value in fields.values()):
                continue
            texts = {
                name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
                for name, value in fields.items()
            }
            if fields == {"prompt": 1} or param == "seconds" or not all(texts.values()):
                continue  # a form's texts are texts
            form = aiohttp.FormData({"prompt": "a cat"} | texts, default_to_multipart=True)
            async with session.post(VIDEOS, data=form) as response:
                document = await response.json(content_type=None)
                assert 400 <= response.status < 500, (fields, document)
                assert document["error"]["param"] == param, (fields, document)
        for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400)):
            headers = {"Content-Type": "application/json"}
            async with session.post(VIDEOS, data=body, headers=headers) as response:
                assert response.status == status
        async with session.post(VIDEOS, data=b"x", headers={"Content-Type": "text/plain"}) as response:
            assert response.status == 415
