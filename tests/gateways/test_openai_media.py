"""Pictures, sound and video in chat: every way that a message can bring them, and what never reaches a stage."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1] / "media"))
sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE, CHAT, chat, post  # type: ignore[import-not-found] (put on the path above)
from samples import HEIGHT, RATE_HZ, SECONDS, WIDTH, images, png, sounds, videos  # type: ignore[import-not-found]

from actors.testing import Running, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


def data_url(data: bytes, label: str = "image/png") -> str:
    return f"data:{label};base64,{base64.b64encode(data).decode()}"


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what"}, *parts]}]


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def seen(deployment: Running, *parts: Any) -> str:
    """Return the whole prompt as the stage had it."""
    answer = await chat(deployment, messages=asked(*parts), return_prompt_text=True)
    assert answer["choices"][0]["message"]["content"] == "what:0 what:1 what:2 what:3"
    return answer["prompt_text"]


async def test_every_kind_reaches_the_stage(able: Running) -> None:
    sound = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sounds()["wav"]).decode(), "format": "wav"},
    }
    linked = {"type": "audio_url", "audio_url": {"url": data_url(sounds()["mp3"], "audio/mpeg")}}
    film = {"type": "video_url", "video_url": {"url": data_url(videos()["mp4-h264"], "video/mp4")}}

    text = await seen(able, picture(data_url(images()["png"])), sound, linked, film)

    what, image, first, second, video = text.split()
    assert what == "what"
    assert image.startswith(f"<image:{WIDTH}x{HEIGHT}:")
    assert first == second == f"<audio:{round(RATE_HZ * SECONDS)}@{RATE_HZ}>"
    assert video.startswith("<video:30x64x")


async def test_pictures_keep_their_order(able: Running) -> None:
    small, large = png(2, 2), png(5, 3)
    text = await seen(able, picture(data_url(small)), picture(data_url(large)), picture(data_url(small)))

    assert [word.split(":")[1] for word in text.split()[1:]] == ["2x2", "5x3", "2x2"]


async def test_every_choice_sees_the_picture(able: Running) -> None:
    answer = await chat(able, messages=asked(picture(data_url(png(2, 2)))), n=2)

    assert len(answer["choices"]) == 2
    assert answer["usage"]["prompt_tokens"] == 2


async def test_uploaded_file_is_read_by_its_own_caller() -> None:
    guarded = ABLE + 'api_keys = ["mine", "other"]\n'
    async with running(guarded) as deployment:
        form = aiohttp.FormData({"purpose": "user_data"})
        form.add_field("file", png(5, 3), filename="odd name.bin")
        mine, other = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer other"}
        async with (
            aiohttp.ClientSession(deployment.url) as session,
            session.post("/v1/files", data=form, headers=mine) as response,
        ):
            file_id = (await response.json())["id"]
        body = {
            "messages": asked({"type": "file", "file": {"file_id": file_id}}),
            "return_prompt_text": True,
        }
        status, answer = await post(deployment, CHAT, body, **mine)
        assert status == 200
        assert "<image:5x3:" in answer["prompt_text"]
        status, document = await post(deployment, CHAT, body, **other)
        assert (status, document["error"]["param"]) == (400, "messages[0].content[1].file.file_id")


async def test_addresses_are_fetched_where_that_is_allowed() -> None:
    app = web.Application()
    app.router.add_get("/a.png", _picture)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with running(ABLE + 'media_fetch = true\nmedia_networks = ["127.0.0.0/8"]\n') as deployment:
            assert "<image:5x3:" in await seen(deployment, picture(f"{url}/a.png"))
            status, document = await post(deployment, CHAT, {"messages": asked(picture(f"{url}/b.png"))})
            assert (status, document["error"]["code"]) == (422, 422)
        async with running(ABLE) as deployment:
            status, document = await post(deployment, CHAT, {"messages": asked(picture(f"{url}/a.png"))})
            assert status == 400
    finally:
        await runner.cleanup()


async def _picture(request: web.Request) -> web.Response:
    return web.Response(body=png(5, 3), content_type="image/png")


async def test_local_files_are_read_below_their_root_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png(5, 3))
    (tmp_path / "out.png").write_bytes(png(5, 3))
    async with running(ABLE + f'media_root = "{tmp_path / "in"}"\n') as deployment:
        assert "<image:5x3:" in await seen(deployment, picture(f"file://{tmp_path}/in/a.png"))
        for url in (f"file://{tmp_path}/out.png", f"file://{tmp_path}/in/../out.png", "file:///etc/passwd"):
            status, document = await post(deployment, CHAT, {"messages": asked(picture(url))})
            assert status == 400
            assert str(tmp_path) not in document["error"]["message"]


BOMB = png(60_000, 60_000, num_rows=1)


@pytest.mark.parametrize(
    ("part", "status", "place"),
    [
        (picture(data_url(BOMB)), 413, "image_url.url"),
        (picture(data_url(images()["png"][:-40])), 400, "image_url.url"),
        (picture(data_url(images()["jpeg"][:60])), 400, "image_url.url"),
        (picture(data_url(sounds()["wav"])), 400, "image_url.url"),
        (picture(data_url(b"<svg/>", "image/svg+xml")), 400, "image_url.url"),
        (picture(data_url(b"")), 400, "image_url.url"),
        (picture("data:image/png;base64,@@@"), 400, "image_url.url"),
        (picture("ftp://x/y"), 400, "image_url.url"),
        (picture("http://127.0.0.1/x"), 400, "image_url.url"),
        (picture("file:///etc/passwd"), 400, "image_url.url"),
        ({"type": "audio_url", "audio_url": {"url": data_url(images()["png"])}}, 400, "audio_url.url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, 400, "input_audio.data"),
        ({"type": "video_url", "video_url": {"url": data_url(sounds()["wav"])}}, 400, "video_url.url"),
    ],
)
async def test_media_that_can_not_be_read_never_reach_a_stage(
    able: Running, part: Any, status: int, place: str
) -> None:
    found, document = await post(able, CHAT, {"messages": asked(part)})

    assert (found, document["error"]["code"]) == (status, status), document
    assert document["error"]["param"] == f"messages[0].content[1].{place}"
    stats = able.stages["llm.0"].stats
    assert (stats.done, stats.failed, stats.active) == (0, 0, 0)


async def test_all_media_of_a_request_have_a_limit_together() -> None:
    async with running(ABLE + "max_decoded_bytes = 80000\n") as deployment:
        one = picture(data_url(png(100, 100)))
        assert "<image:" in await seen(deployment, one)
        status, document = await post(deployment, CHAT, {"messages": asked(one, one, one)})

    assert (status, document["error"]["param"]) == (413, "messages[0].content[3].image_url.url")


async def test_model_without_eyes_refuses_pictures(able: Running) -> None:
    body = {"model": "plain", "messages": asked(picture(data_url(png(2, 2))))}
    status, document = await post(able, CHAT, body)

    assert (status, document["error"]["param"]) == (400, "messages[0].content[1].type")


async def test_pictures_count_among_the_tokens_of_a_conversation(able: Running) -> None:
    _, bare = await post(able, "/tokenize", {"messages": asked()})
    status, answer = await post(able, "/tokenize", {"messages": asked(picture(data_url(png(2, 2))))})

    assert status == 200
    assert answer["count"] > bare["count"]
