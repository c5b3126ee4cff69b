#!/usr/bin/env python
"""Draw pictures through a running ``omni-bus up --config configs/images.toml`` and put them into one file.

    python scripts/draw_grid.py scripts/results/images.jpg

Each of the prompts is asked for at once; the deployment batches their steps.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import time
from typing import Any

import aiohttp
from PIL import Image, ImageDraw

PROMPTS = (
    "a cat",
    "a red star",
    "a robot and a pink square on a sky background",
    "a rocket on a night background",
    "a fox and a banana on a grass background",
    "a purple heart and a penguin",
    "a pizza and a donut on a lilac background",
    "a yellow cross on a gray background",
    "a snowman and a pine on a night background",
    "a green ring and a key on a sand background",
    "a butterfly and a sunflower",
    "a house and a rainbow on a sky background",
)
COLUMNS = 4
CAPTION = 20


async def draw(session: aiohttp.ClientSession, prompt: str) -> Any:
    body = {"prompt": prompt, "seed": 1}
    async with session.post("/v1/images/generations", json=body) as response:
        document = await response.json()
    if response.status != 200:
        raise SystemExit(f"{prompt}: {document['error']['message']}")
    return Image.open(io.BytesIO(base64.b64decode(document["data"][0]["b64_json"])))


async def draw_all(url: str) -> list[Any]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=600)) as session:
        return await asyncio.gather(*(draw(session, prompt) for prompt in PROMPTS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a grid of pictures.")
    parser.add_argument("file", help="where to put it")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway")
    options = parser.parse_args()
    began_at = time.perf_counter()
    pictures = asyncio.run(draw_all(options.url))
    seconds = time.perf_counter() - began_at
    width, height = pictures[0].size
    rows = -(-len(pictures) // COLUMNS)
    grid = Image.new("RGB", (COLUMNS * width, rows * (height + CAPTION)), "white")
    pen = ImageDraw.Draw(grid)
    for i, (prompt, picture) in enumerate(zip(PROMPTS, pictures, strict=True)):
        left, top = i % COLUMNS * width, i // COLUMNS * (height + CAPTION)
        grid.paste(picture, (left, top))
        pen.text((left + 4, top + height + 4), prompt, fill="black")
    grid.save(options.file)
    print(f"{len(pictures)} pictures of {width} × {height} in {seconds:.1f} s: {options.file}")


if __name__ == "__main__":
    main()
