#!/usr/bin/env python3
"""Let a headless Chromium play what a deployment makes: a file as it is, a stream by MediaSource while it comes.

Exits with 1 if either is not played to its end, or the stream not before its last fragment was made.

Run: ``PYTHONPATH=. python scripts/browser_video.py`` (needs Chromium: ``apt-get install chromium``)
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from actors.testing import running

LIMIT_S = 40
"""For a browser to start and to play two seconds, on a loaded machine."""

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""

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
            told.set_result(json.loads(await request.text()))
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
        async with asyncio.timeout(LIMIT_S):
            return await told
    finally:
        browser.kill()
        await browser.wait()
        await runner.cleanup()


TOML = """
[stages.camera]
adapter = "synthetic-video"
num_frames = 48
frames_per_chunk = 3
step_time_s = 0.05
width = 320
height = 240
[pipelines.video]
edges = ["in.prompt -> camera.prompt", "camera.video -> out.video", "camera.audio -> out.audio"]
[gateways.openai]
cors_origins = ["*"]
allowed_origins = ["*"]
min_free_bytes = 0
"""


async def run() -> int:
    """Play both; return the exit code."""
    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.post("/v1/videos", json={"prompt": "a cat", "size": "322x242"}) as response:
            video_id = (await response.json())["id"]
        while True:
            async with session.get(f"/v1/videos/{video_id}") as response:
                if (await response.json())["status"] == "completed":
                    break
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            file = await played({"file": f"{deployment.url}/v1/videos/{video_id}/content"}, Path(folder, "a"))
            print("file", file, flush=True)
            address = f"ws://127.0.0.1:{deployment.port}/v1/realtime/video"
            stream = await played({"stream": address}, Path(folder, "b"))
            print("stream", stream, flush=True)
    are_whole = all(told.get("ended") and abs(told["seconds"] - 2) < 0.2 for told in (file, stream))
    return 0 if are_whole and stream["early"] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
