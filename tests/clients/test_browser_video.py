"""A real browser plays what the server makes: the file as it is, the stream through MediaSource while it comes."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

sys.path.insert(0, str(Path(__file__).parents[1] / "gateways"))

from videos import create, deployment_of, until  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")]

PAGE = """<!doctype html><video id="video" muted playsinline></video><script>
const video = document.getElementById("video");
const tell = (what) => fetch("/told", {method: "POST", body: JSON.stringify(what)});
video.onerror = () => tell({error: video.error.message});
video.onended = () => tell({
  ended: true, seconds: video.currentTime, width: video.videoWidth, height: video.videoHeight,
  frames: video.getVideoPlaybackQuality().totalVideoFrames, early,
});
let early = null;
const {file, stream} = Object.fromEntries(new URLSearchParams(location.search));
if (file) {
  video.src = file;
  video.play().catch((error) => tell({error: String(error)}));
} else {
  const source = new MediaSource();
  video.src = URL.createObjectURL(source);
  source.onsourceopen = () => {
    const buffer = source.addSourceBuffer('video/mp4; codecs="avc1.42c01e"');
    const queue = [];
    let isDone = false;
    const next = () => {
      if (buffer.updating) return;
      if (queue.length) buffer.appendBuffer(queue.shift());
      else if (isDone && source.readyState === "open") source.endOfStream();
    };
    buffer.onupdateend = () => {
      if (video.paused && !video.ended) video.play().catch((error) => tell({error: String(error)}));
      next();
    };
    const socket = new WebSocket(stream);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => socket.send(JSON.stringify({type: "session.start", prompt: "a cat", size: "320x240"}));
    video.ontimeupdate = () => { if (early === null && video.currentTime > 0) early = !isDone; };
    socket.onmessage = (event) => {
      if (event.data instanceof ArrayBuffer) queue.push(event.data);
      else {
        const said = JSON.parse(event.data);
        if (said.type === "error") tell({error: said.message});
        if (said.type === "session.done") isDone = true;
      }
      next();
    };
  };
}
</script>"""


async def played(query: dict[str, str], folder: Path) -> dict[str, Any]:
    """Open the page in a browser and return what it tells at the end."""
    told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    async def hear(request: web.Request) -> web.Response:
        if not told.done():
            told.set_result(await request.json(content_type=None))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_post("/told", hear)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    url = URL(f"http://{host}:{port}/").with_query(query)
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--autoplay-policy=no-user-gesture-required", f"--user-data-dir={folder}", str(url)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return await told
    finally:
        browser.terminate()
        await browser.wait()
        await runner.cleanup()


STAGE = "step_time_s = 0.05\nnum_frames = 48"
OPEN = 'cors_origins = ["*"]\nallowed_origins = ["*"]'


async def test_browser_plays_the_file(tmp_path: Path) -> None:
    async with running(deployment_of(STAGE, OPEN)) as deployment, aiohttp.ClientSession(deployment.url) as session:
        job = await until(session, (await create(session, size="322x242"))["id"])
        told = await played({"file": f"{deployment.url}/v1/videos/{job['id']}/content"}, tmp_path)
    assert told.get("ended"), told
    assert told["seconds"] == pytest.approx(2.0, abs=0.2)
    assert (told["width"], told["height"]) == (322, 242)
    assert told["frames"] > 24  # a loaded machine drops some


async def test_browser_plays_the_stream_while_it_comes(tmp_path: Path) -> None:
    async with running(deployment_of(STAGE, OPEN)) as deployment:
        told = await played({"stream": f"ws://127.0.0.1:{deployment.port}/v1/realtime/video"}, tmp_path)
    assert told.get("ended"), told
    assert told["early"], "it began before the last fragment was made"
    assert told["seconds"] == pytest.approx(2.0, abs=0.2)
    assert (told["width"], told["height"]) == (320, 240)
