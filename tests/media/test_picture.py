from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pil

from omni_bus.errors import BadInput
from omni_bus.media.picture import PICTURE_FORMATS, PictureFormat, encode_picture_blocking
from omni_bus.wire.payloads import Blob, Image


def noisy(channels: int) -> Image:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, channels), np.uint8)
    return Image(48, 64, channels, Blob(pixels.tobytes()))


def read(file: bytes, mode: str) -> Any:
    return np.asarray(Pil.open(io.BytesIO(file)).convert(mode))


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_png_is_exact_whatever_its_compression(channels: int, mode: str) -> None:
    image = noisy(channels)
    for compression in (0, 50, 100):
        file = encode_picture_blocking(image, "png", compression)
        assert read(file, mode).tobytes() == bytes(image.data.view)


@pytest.mark.parametrize("fmt", ["jpeg", "webp"])
def test_compression_is_quality(fmt: PictureFormat) -> None:
    sizes = [len(encode_picture_blocking(noisy(3), fmt, quality)) for quality in (0, 50, 100)]

    assert sizes == sorted(set(sizes))


def test_png_is_smaller_with_less_compression_value() -> None:
    slope = Image(64, 256, 3, Blob(bytes(range(256)) * 192))

    assert len(encode_picture_blocking(slope, "png", 0)) <= len(encode_picture_blocking(slope, "png", 100))


def test_jpeg_shows_transparency_on_white() -> None:
    clear = Image(8, 8, 4, Blob(b"\x10\x20\x30\x00" * 64))

    assert read(encode_picture_blocking(clear, "jpeg"), "RGB").min() > 250


def test_picture_that_a_format_cannot_hold_is_refused() -> None:
    long = Image(1, 20_000, 3, Blob(bytes(60_000)))

    with pytest.raises(BadInput, match="webp came, which can't hold 20000×1"):
        encode_picture_blocking(long, "webp")
    for fmt in PICTURE_FORMATS:
        if fmt != "webp":
            assert encode_picture_blocking(long, fmt)
