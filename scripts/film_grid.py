#!/usr/bin/env python
"""Ask a running ``omni-bus up --config configs/video.toml`` for videos and put frames of each into one file.

    python scripts/film_grid.py scripts/results/video.jpg

Each of the prompts is asked for at once; the deployment batches their steps.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import time
from typing import Any

import aiohttp
import av
from PIL import Image, ImageDraw

PROMPTS = (
    "a rocket moving up on a night background",
    "a red star growing",
    "a fish moving left on a sky background",
    "a pizza shrinking on a lilac background",
    "a green circle moving down on a sand background",
    "a cat on a grass background",
)
EVERY = 4
"""Of so many frames one is shown."""
SCALE = 2
CAPTION = 18


async def film(session: aiohttp.ClientSession, prompt: str) -> list[Any]:
    """Return the frames of a video."""
    async with session.post("/v1/videos/sync", json={"prompt": prompt, "seed": 1}) as response:
        if response.status != 200:
            raise SystemExit(f"{prompt}: {await response.text()}")
        data = await response.read()
    with av.open(io.BytesIO(data), "r") as container:
        return [frame.to_image() for frame in container.decode(video=0)]


async def film_all(url: str) -> list[list[Any]]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=600)) as session:
        return await asyncio.gather(*(film(session, prompt) for prompt in PROMPTS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Show frames of videos.")
    parser.add_argument("file", help="where to put them")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway")
    options = parser.parse_args()
    began_at = time.perf_counter()
    films = asyncio.run(film_all(options.url))
    seconds = time.perf_counter() - began_at
    width, height = (SCALE * side for side in films[0][0].size)
    shown = [frames[::EVERY] for frames in films]
    grid = Image.new("RGB", (len(shown[0]) * width, len(shown) * (height + CAPTION)), "white")
    pen = ImageDraw.Draw(grid)
    for i, (prompt, frames) in enumerate(zip(PROMPTS, shown, strict=True)):
        top = i * (height + CAPTION)
        pen.text((4, top + 3), prompt, fill="black")
        for k, frame in enumerate(frames):
            grid.paste(frame.resize((width, height), Image.Resampling.NEAREST), (k * width, top + CAPTION))
    grid.save(options.file)
    print(f"{len(films)} videos of {len(films[0])} frames in {seconds:.1f} s: {options.file}")


if __name__ == "__main__":
    main()
