"""Requests to the diffusion engine and what they gave, for its tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image

from omni_bus.testing import Collected, StepDriver
from omni_bus.wire.payloads import Blob, Image, Payload, Text, Video

if TYPE_CHECKING:
    from omni_bus.engine import StepEngine

SIDE = 64
_random = np.random.default_rng(0)
NOISE = _random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
MASK = np.repeat(np.array([[255], [0]], np.uint8), SIDE // 2, axis=0).repeat(SIDE, axis=1)
CLIP = _random.integers(0, 256, (9, SIDE, SIDE, 3), dtype=np.uint8)
MAX_STEPS = 500


def begin_with(kinds: Sequence[str]) -> dict[str, Any]:
    """Return what a call of the pipeline begins with."""
    found = {
        "image": ("image", PIL.Image.fromarray(NOISE)),
        "mask": ("mask_image", PIL.Image.fromarray(MASK)),
        "video": ("video", [PIL.Image.fromarray(frame) for frame in CLIP]),
    }
    return dict(found[kind] for kind in kinds)


def inputs_of(kinds: Sequence[str]) -> dict[str, list[Payload]]:
    """Return the same as payloads of the engine's ports."""
    found: dict[str, tuple[str, Payload]] = {
        "image": ("images", Image(SIDE, SIDE, 3, Blob(NOISE.tobytes()))),
        "mask": ("mask", Image(SIDE, SIDE, 1, Blob(MASK.tobytes()))),
        "video": ("video", Video(0, len(CLIP), SIDE, SIDE, 1, 16, Blob(CLIP.tobytes()))),
    }
    return {port: [payload] for port, payload in (found[kind] for kind in kinds)}


def run(
    engine: StepEngine,
    *requests: tuple[str, dict[str, Any]],
    inputs: Mapping[str, list[Payload]] | None = None,
    outputs: Sequence[str] | None = None,
) -> list[Collected]:
    """Run requests that come one step after the other; raise what the first one failed with."""
    driver = StepDriver(engine)
    ids: list[str] = []
    for prompt, params in requests:
        ids.append(driver.add({"prompt": [Text(prompt)], **(inputs or {})}, params, outputs=outputs))
        driver.step()
    for _ in range(MAX_STEPS):
        if not driver.live:
            break
        driver.step()
    for request in ids:
        if (error := driver.results[request].error) is not None:
            raise error
    assert not driver.live
    return [driver.results[request] for request in ids]


def pixels_in(result: Collected) -> np.ndarray[Any, Any]:
    """Return all pictures and frames of a request: uint8, (number, height, width, 3)."""
    return np.concatenate(
        [
            np.frombuffer(payload.data.view, np.uint8).reshape(-1, payload.height, payload.width, 3)
            for payload in result.port("image") + result.port("video")
        ]
    )
