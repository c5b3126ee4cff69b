"""What the emoji models can draw: 56 Noto Color Emoji and 9 colours of 8 shapes, as sprites, and the words for them.

    python scripts/models/emoji_sprites.py SPRITES.npz

writes the objects, in the order of `OBJECTS`, as 64 x 64 RGBA pixels (uint8, colours not premultiplied). Needs
Pillow and Debian's fonts-noto-color-emoji (OFL-1.1).
"""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SPRITE = 64
"""Sides of a sprite in pixels."""

GLYPHS = {
    "cat": "🐱", "dog": "🐶", "fox": "🦊", "panda": "🐼", "frog": "🐸", "pig": "🐷", "bear": "🐻", "penguin": "🐧",
    "fish": "🐟", "octopus": "🐙", "turtle": "🐢", "butterfly": "🦋", "bee": "🐝", "ladybug": "🐞", "tree": "🌳",
    "pine": "🌲", "cactus": "🌵", "sunflower": "🌻", "rose": "🌹", "mushroom": "🍄", "apple": "🍎", "banana": "🍌",
    "lemon": "🍋", "grapes": "🍇", "strawberry": "🍓", "watermelon": "🍉", "cherry": "🍒", "carrot": "🥕",
    "pizza": "🍕", "burger": "🍔", "cake": "🎂", "donut": "🍩", "sun": "🌞", "moon": "🌝", "cloud": "☁",
    "rainbow": "🌈", "fire": "🔥", "snowman": "⛄", "house": "🏠", "car": "🚗", "bus": "🚌", "rocket": "🚀",
    "boat": "⛵", "guitar": "🎸", "ball": "⚽", "key": "🔑", "robot": "🤖", "ghost": "👻", "alien": "👽",
    "clock": "⏰", "book": "📕", "umbrella": "☂", "crown": "👑", "gift": "🎁", "balloon": "🎈", "bulb": "💡",
}  # fmt: skip
COLOURS = {
    "red": (220, 38, 38), "orange": (249, 115, 22), "yellow": (250, 204, 21), "green": (22, 163, 74),
    "blue": (37, 99, 235), "purple": (147, 51, 234), "pink": (244, 114, 182), "brown": (120, 66, 18),
    "black": (20, 20, 20),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "ring", "cross")
OBJECTS = (*GLYPHS, *(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES))
BACKGROUNDS = {
    "white": (255, 255, 255), "gray": (160, 160, 160), "sky": (150, 205, 245), "night": (24, 28, 60),
    "grass": (140, 200, 110), "sand": (238, 214, 160), "lilac": (214, 190, 240),
}  # fmt: skip

_GLYPH_PX = 109
"""The only size that this bitmap font has."""
_CANVAS = 256


def glyph(character: str) -> Image.Image:
    """Draw an emoji as large as the font has it, cut to what is drawn."""
    command = ["fc-match", "-f", "%{file}", "Noto Color Emoji"]
    font = ImageFont.truetype(subprocess.run(command, capture_output=True, text=True, check=True).stdout, _GLYPH_PX)
    picture = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(picture).text((12, 12), character, font=font, embedded_color=True)
    return picture.crop(picture.getbbox())


def shape(kind: str, colour: tuple[int, int, int]) -> Image.Image:
    """Draw one of `SHAPES`."""
    n, half = _CANVAS, _CANVAS // 2
    picture = Image.new("RGBA", (n, n), (0, 0, 0, 0))
    draw, fill = ImageDraw.Draw(picture), (*colour, 255)
    match kind:
        case "circle":
            draw.ellipse((6, 6, n - 6, n - 6), fill=fill)
        case "square":
            draw.rectangle((20, 20, n - 20, n - 20), fill=fill)
        case "triangle":
            draw.polygon([(half, 14), (n - 8, n - 24), (8, n - 24)], fill=fill)
        case "diamond":
            draw.polygon([(half, 4), (n - 40, half), (half, n - 4), (40, half)], fill=fill)
        case "ring":
            draw.ellipse((8, 8, n - 8, n - 8), outline=fill, width=46)
        case "cross":
            draw.rectangle((half - 36, 10, half + 36, n - 10), fill=fill)
            draw.rectangle((10, half - 36, n - 10, half + 36), fill=fill)
        case "star":
            radius = (124, 50)
            turns = [(i * math.pi / 5, radius[i % 2]) for i in range(10)]
            draw.polygon([(half + r * math.sin(a), half + 8 - r * math.cos(a)) for a, r in turns], fill=fill)
        case "heart":
            t = np.linspace(0, 2 * np.pi, 120)
            x = 16 * np.sin(t) ** 3
            y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
            points = zip(half + 7 * x, half - 10 - 7 * y, strict=True)
            draw.polygon([(float(a), float(b)) for a, b in points], fill=fill)
        case _:
            raise ValueError(f"shape: '{kind}' came (allowed: {', '.join(SHAPES)})")
    return picture


def sprite(name: str) -> np.ndarray:
    """Return an object of `OBJECTS` in the middle of `SPRITE` x `SPRITE` RGBA pixels, uint8."""
    if name in GLYPHS:
        source = glyph(GLYPHS[name])
    else:
        colour, kind = name.split()
        source = shape(kind, COLOURS[colour])
    ratio = SPRITE / max(source.size)
    width, height = (max(1, round(side * ratio)) for side in source.size)
    pixels = np.asarray(source.resize((width, height), Image.Resampling.LANCZOS))
    canvas = np.zeros((SPRITE, SPRITE, 4), np.uint8)
    top, left = (SPRITE - height) // 2, (SPRITE - width) // 2
    canvas[top : top + height, left : left + width] = pixels
    return canvas


def main() -> None:
    """Write the sprites."""
    np.savez_compressed(sys.argv[1], sprites=np.stack([sprite(name) for name in OBJECTS]))


if __name__ == "__main__":
    main()
