"""Media in requests to a real gateway: every place that it can be in, every limit, and what the client is told."""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

from samples import (  # type: ignore[import-not-found] (put on the path above)
    HEIGHT,
    RATE_HZ,
    SECONDS,
    WIDTH,
    images,
    png,
    slope,
    sounds,
    videos,
)

from actors.testing import running
from gateways.http import HttpGateway, json_response, read_json
from gateways.media import MediaOptions, MediaReader
from omni_bus.core.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOML = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.look]
protocol = "{module}:Looking"
{gateway}
"""


class Looking(HttpGateway):
    """Tells what it sees: the smallest gateway that takes media."""

    Options = MediaOptions
    _reader: MediaReader

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        return True

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.edge])
        app.router.add_post("/v1/look", self._look, expect_handler=self.expect)
        app.cleanup_ctx.append(self._lifetime)
        return app

    async def _lifetime(self, app: web.Application) -> AsyncIterator[None]:
        assert isinstance(self.options, MediaOptions)
        self._reader = MediaReader(self.options)
        yield
        await self._reader.close()

    async def _look(self, request: web.Request) -> web.Response:
        body = await read_json(request, self.options)
        ((kind, source),) = body.items()
        payload: Any = await getattr(self._reader, kind)(source, field=kind)
        fields = {name: getattr(payload, name) for name in payload.__struct_fields__ if name != "data"}
        first = list(payload.data.view[:3])
        return json_response({**fields, "first": first, "num_bytes": len(payload.data)})


def deployment(gateway: str = "") -> str:
    return TOML.format(module="test_media_gateway", gateway=gateway)


@pytest.fixture(autouse=True)
def _importable(monkeypatch) -> None:
    """A deployment names a gateway by its module; this one has none of its own."""
    monkeypatch.setitem(sys.modules, "test_media_gateway", sys.modules[__name__])


async def look(session: aiohttp.ClientSession, kind: str, source: Any) -> tuple[int, dict[str, Any]]:
    async with session.post("/v1/look", json={kind: source}) as response:
        return response.status, await response.json()


def data_url(data: bytes, label: str = "image/png") -> str:
    return f"data:{label};base64,{base64.b64encode(data).decode()}"


async def test_every_kind_is_seen() -> None:
    async with running(deployment()) as found, aiohttp.ClientSession(found.url) as session:
        status, image = await look(session, "image", data_url(images()["png"]))
        assert status == 200
        assert (image["width"], image["height"], image["channels"]) == (WIDTH, HEIGHT, 3)
        assert image["first"] == slope()[0, 0].tolist()
        status, audio = await look(session, "audio", data_url(sounds()["mp3"], "audio/mpeg"))
        assert (status, audio["rate_hz"], audio["num_bytes"]) == (200, RATE_HZ, round(RATE_HZ * SECONDS * 2))
        status, video = await look(session, "video", data_url(videos()["mp4-h264"], "video/mp4"))
        assert (status, video["num_frames"], video["width"]) == (200, 30, 64)


async def test_spellings_of_one_sound_give_one_result() -> None:
    """What is on the label doesn't matter; raw base64 is taken too."""
    data = sounds()["wav"]
    code = base64.b64encode(data).decode()
    spellings = [
        code,
        code.rstrip("="),
        "\n".join(code[i : i + 76] for i in range(0, len(code), 76)),
        data_url(data, "audio/wav"),
        data_url(data, "audio/x-wav"),
        data_url(data, "audio/vnd.wave;codecs=1"),
        data_url(data, "image/png"),
        data_url(data, ""),
        data_url(data, "AUDIO/WAV").replace("data:", "DATA:").replace("base64", "BASE64"),
        f"  {data_url(data)}  ",
    ]
    async with running(deployment()) as found, aiohttp.ClientSession(found.url) as session:
        seen = [await look(session, "audio", spelling) for spelling in spellings]

    assert [status for status, _ in seen] == [200] * len(spellings)
    assert all(document == seen[0][1] for _, document in seen)


async def test_media_of_an_address_and_of_a_folder_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(images()["png"])

    async def picture(request: web.Request) -> web.Response:
        return web.Response(body=images()["png"], content_type="text/html")

    site = web.Application()
    site.router.add_get("/x", picture)
    runner = web.AppRunner(site)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/x"
    gateway = f'media_fetch = true\nmedia_networks = ["127.0.0.0/8"]\nmedia_root = "{tmp_path}"'
    try:
        async with running(deployment(gateway)) as found, aiohttp.ClientSession(found.url) as session:
            for source in (url, url.replace("http", "HTTP", 1), f"file://{tmp_path}/a.png"):
                status, document = await look(session, "image", source)
                assert (status, document.get("width")) == (200, WIDTH), document
        async with running(deployment("media_fetch = true")) as found, aiohttp.ClientSession(found.url) as session:
            status, document = await look(session, "image", url)
            assert status == 400
            assert "allowed: public addresses" in document["error"]["message"]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("kind", "source", "status", "words"),
    [
        ("image", "", 400, "an empty file came"),
        ("image", "not base64!", 400, "another character came"),
        ("image", data_url(b""), 400, "an empty file came"),
        ("image", data_url(b"hello world"), 400, "of an unknown kind came (allowed: png, jpeg"),
        ("image", data_url(images()["png"][:100]), 400, "damaged: it is cut off"),
        ("image", data_url(sounds()["wav"]), 400, "a wav file came (allowed: png"),
        ("audio", data_url(images()["png"]), 400, "a png file came (allowed: wav"),
        ("audio", data_url(videos()["mp4-h264"]), 400, "a mp4 file without audio"),
        (
            "image",
            data_url(png(30_000, 30_000, num_rows=10)),
            413,
            "30000 × 30000 pixels came (allowed: 89478485 in all)",
        ),
        ("image", "http://example.com/x.png", 400, "this server fetches none"),
        ("image", "file:///etc/passwd", 400, "this server reads none"),
        ("image", "ftp://example.com/x", 400, "another scheme came"),
        ("image", "gopher://127.0.0.1/x", 400, "another scheme came"),
        ("audio", "data:audio/wav;base64", 400, "without a comma"),
    ],
)
async def test_what_is_not_right_is_refused_by_name(kind: str, source: str, status: int, words: str) -> None:
    async with running(deployment()) as found, aiohttp.ClientSession(found.url) as session:
        seen, document = await look(session, kind, source)

        assert seen == status
        assert words in document["error"]["message"]
        assert document["error"]["param"] == kind


@pytest.mark.parametrize(
    ("gateway", "kind", "source", "words"),
    [
        ("max_image_bytes = 100", "image", data_url(images()["png"]), "167 bytes came (allowed: at most 100)"),
        ("max_image_pixels = 1000", "image", data_url(images()["png"]), "48 × 32 pixels came (allowed: 1000 in all)"),
        ("max_audio_seconds = 0.5", "audio", data_url(sounds()["flac"]), "1.0 s came (allowed: at most 0.5 s)"),
        ("max_decoded_bytes = 1000", "audio", data_url(sounds()["flac"]), "more than 1000 bytes of samples came"),
        ("max_video_seconds = 2", "video", data_url(videos()["webm-vp8"]), "3.0 s came (allowed: at most 2 s)"),
        ("max_video_frames = 3", "video", data_url(videos()["webm-vp8"]), "more than 3 frames came"),
        ("max_video_pixels = 3000", "video", data_url(videos()["webm-vp8"]), "64 × 48 pixels came"),
    ],
)
async def test_each_limit_is_a_key(gateway: str, kind: str, source: str, words: str) -> None:
    async with running(deployment(gateway)) as found, aiohttp.ClientSession(found.url) as session:
        status, document = await look(session, kind, source)

        assert status == 413
        assert words in document["error"]["message"]
        assert document["error"]["type"] == "RequestTooLargeError"


async def test_unreachable_address_is_the_addresss_fault() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    gateway = 'media_fetch = true\nmedia_networks = ["127.0.0.0/8"]'
    async with server, running(deployment(gateway)) as found, aiohttp.ClientSession(found.url) as session:
        status, document = await look(session, "image", f"http://127.0.0.1:{port}/x")

        assert status == 422
        assert document["error"]["type"] == "UnprocessableEntityError"
        assert "127.0.0.1" not in document["error"]["message"]


def test_network_that_is_none_is_a_mistake_in_the_options() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"media_networks: .*allowed: networks in CIDR"):
        msgspec.convert({"media_networks": ["everything"]}, MediaOptions)


async def test_many_pictures_and_sounds_at_once_are_all_seen() -> None:
    async with running(deployment("decode_processes = 2")) as found, aiohttp.ClientSession(found.url) as session:
        sources = [("image", data_url(images()[name])) for name in images()] * 3
        sources += [("audio", data_url(sounds()[name])) for name in sounds()]
        seen = await asyncio.gather(*(look(session, kind, source) for kind, source in sources))

    assert [status for status, _ in seen] == [200] * len(sources)


def test_samples_of_a_large_picture_fit_a_stage() -> None:
    """The default limit of pixels is a stage's default limit of input bytes."""
    options = MediaOptions()

    assert 3 * options.max_image_pixels <= 256 * 1024 * 1024 < 3 * (options.max_image_pixels + 1)
