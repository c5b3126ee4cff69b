"""Clips of one moving emoji, drawn on a device, and a judge that says what a clip shows.

A clip is `FRAMES` frames of `SIZE` x `SIZE` pixels at `FPS` frames a second; its prompt names the object, what it does
and the background: "a cat moving right on a sky background", "a red star growing", "a robot" (still, on white).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from emoji_sprites import BACKGROUNDS, OBJECTS
from torch.nn import functional

SIZE = 64
FRAMES = 25
FPS = 12

MOTIONS = ("", "moving right", "moving left", "moving up", "moving down", "growing", "shrinking")
HELD_OUT = frozenset({"blue star", "purple heart", "red triangle", "green ring", "pink square", "orange cross"})
"""Pairs of colour and shape that training never shows, though it shows each colour and each shape."""

_NEAR, _FAR = 19.0, 45.0
"""Where an object's middle is when it has come in and before it goes, in pixels."""
_SMALL, _LARGE = 16.0, 46.0
"""An object's size before it grows and after, in pixels."""


@dataclass(frozen=True)
class Clip:
    """What one clip shows; x and y place the object's middle where its motion doesn't say it, size is its side."""

    name: str
    motion: str = ""
    background: str = "white"
    x: float = 32.0
    y: float = 32.0
    size: float = 34.0

    @property
    def prompt(self) -> str:
        """The words for it."""
        words = f"a {self.name} {self.motion}".rstrip()
        return words if self.background == "white" else f"{words} on a {self.background} background"

    def path(self) -> np.ndarray:
        """Return the middle's x and y and the side of each frame, (FRAMES, 3)."""
        t = np.linspace(0, 1, FRAMES)
        x, y, size = (np.full(FRAMES, value) for value in (self.x, self.y, self.size))
        way = _NEAR + (_FAR - _NEAR) * t
        match self.motion:
            case "moving right":
                x = way
            case "moving left":
                x = way[::-1]
            case "moving down":
                y = way
            case "moving up":
                y = way[::-1]
            case "growing":
                size = _SMALL + (_LARGE - _SMALL) * t
            case "shrinking":
                size = _LARGE - (_LARGE - _SMALL) * t
        return np.stack([x, y, size], 1).astype(np.float32)


def random_clip(random: np.random.Generator, names: tuple[str, ...] | list[str]) -> Clip:
    """Return any clip with an object of these."""
    background = "white" if random.random() < 0.3 else list(BACKGROUNDS)[random.integers(len(BACKGROUNDS))]
    return Clip(
        name=names[random.integers(len(names))],
        motion=MOTIONS[random.integers(len(MOTIONS))],
        background=background,
        x=32 + random.uniform(-3, 3),
        y=32 + random.uniform(-3, 3),
        size=34 + random.uniform(-1.5, 1.5),
    )


class Painter:
    """Draws clips on a device."""

    def __init__(self, sprites: str, device: str = "cpu") -> None:
        with np.load(sprites) as file:
            pixels = file["sprites"].astype(np.float32) / 255
        whole = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        colour, alpha = whole[:, :3], whole[:, 3:]
        self.device = device
        # Premultiplied, so that neither the filter nor the sampling bleeds the colour of what is invisible.
        self._sprites = torch.cat([colour * alpha, alpha], 1).to(device)
        self._half = functional.avg_pool2d(self._sprites, 2)
        self.backgrounds = torch.tensor(list(BACKGROUNDS.values()), device=device) / 255
        """Their colours, (backgrounds, 3) in 0..1."""

    def draw(self, names: list[int], backgrounds: list[int], paths: torch.Tensor) -> torch.Tensor:
        """Return (clips, 3, frames, SIZE, SIZE) in 0..1; `paths` is (clips, frames, 3)."""
        clips, frames = paths.shape[:2]
        paths = paths.to(self.device)
        x, y, size = (paths[..., i].reshape(-1) for i in range(3))
        theta = torch.zeros(clips * frames, 2, 3, device=self.device)
        theta[:, 0, 0] = theta[:, 1, 1] = SIZE / size
        theta[:, 0, 2] = (1 - 2 * x / SIZE) * SIZE / size
        theta[:, 1, 2] = (1 - 2 * y / SIZE) * SIZE / size
        grid = functional.affine_grid(theta, [clips * frames, 4, SIZE, SIZE], align_corners=False)
        index = torch.tensor(names, device=self.device).repeat_interleave(frames)
        large = functional.grid_sample(self._sprites[index], grid, align_corners=False)
        small = functional.grid_sample(self._half[index], grid, align_corners=False)
        # Between the two, as a mipmap: sprites have 64 pixels, objects 16 to 46.
        share = ((size / 64 - 0.25) / 0.75).clamp(0, 1).view(-1, 1, 1, 1)
        drawn = small + (large - small) * share
        back = self.backgrounds[torch.tensor(backgrounds, device=self.device)].repeat_interleave(frames, 0)[
            ..., None, None
        ]
        picture = drawn[:, :3] + back * (1 - drawn[:, 3:])
        return picture.clamp(0, 1).view(clips, frames, 3, SIZE, SIZE).transpose(1, 2)

    def paint(self, clips: list[Clip]) -> torch.Tensor:
        """Draw these clips."""
        backs = list(BACKGROUNDS)
        return self.draw(
            [OBJECTS.index(clip.name) for clip in clips],
            [backs.index(clip.background) for clip in clips],
            torch.from_numpy(np.stack([clip.path() for clip in clips])),
        )


def _extent(frame: torch.Tensor, back: torch.Tensor) -> tuple[float, float, float] | None:
    """Return the middle and the side of what isn't background in a frame (3, SIZE, SIZE); None if nothing is."""
    mask = (frame - back.view(3, 1, 1)).abs().amax(0) > 0.12
    ys, xs = torch.nonzero(mask, as_tuple=True)
    if len(xs) < 12:
        return None
    low_x, high_x = (torch.quantile(xs.float(), q).item() for q in (0.01, 0.99))
    low_y, high_y = (torch.quantile(ys.float(), q).item() for q in (0.01, 0.99))
    return (low_x + high_x + 1) / 2, (low_y + high_y + 1) / 2, max(high_x - low_x, high_y - low_y) + 1


def judge(painter: Painter, clip: torch.Tensor) -> Clip | None:
    """Say what a clip (3, frames, SIZE, SIZE) in 0..1 shows, by how what isn't background goes and the nearest sprite.

    None if nothing is seen in its first, middle or last frame.
    """
    clip = clip.to(painter.device)
    corners = torch.stack([clip[:, :, a, b] for a in (0, -1) for b in (0, -1)]).flatten(2)  # (4, 3, frames)
    back = corners.permute(1, 0, 2).reshape(3, -1).median(1).values
    distances = (painter.backgrounds - back).abs().sum(1)
    background = int(distances.argmin())
    seen = [_extent(clip[:, i], painter.backgrounds[background]) for i in (0, clip.shape[1] // 2, -1)]
    if any(extent is None for extent in seen):
        return None
    (x0, y0, s0), (x, y, size), (x1, y1, s1) = (extent for extent in seen if extent is not None)
    dx, dy, growth = x1 - x0, y1 - y0, s1 / s0
    if growth > 1.6 or growth < 1 / 1.6:
        motion = "growing" if growth > 1 else "shrinking"
    elif max(abs(dx), abs(dy)) < 8:
        motion = ""
    elif abs(dx) > abs(dy):
        motion = "moving right" if dx > 0 else "moving left"
    else:
        motion = "moving down" if dy > 0 else "moving up"
    middle = clip[:, clip.shape[1] // 2]
    # A sprite fills its square in one direction at least, so the extent gives the scale; a pixel about for the rest.
    best, name = float("inf"), ""
    everything = list(range(len(OBJECTS)))
    for side in (size - 1, size, size + 1.5, size + 3):
        for ox in (-1.0, 0.0, 1.0):
            for oy in (-1.0, 0.0, 1.0):
                path = torch.tensor([[[x + ox, y + oy, side]]]).repeat(len(OBJECTS), 1, 1)
                drawn = painter.draw(everything, [background] * len(OBJECTS), path)[:, :, 0]
                errors = (drawn - middle).square().mean((1, 2, 3))
                if errors.min() < best:
                    best, name = float(errors.min()), OBJECTS[int(errors.argmin())]
    return Clip(name=name, motion=motion, background=list(BACKGROUNDS)[background], x=x, y=y, size=size)
