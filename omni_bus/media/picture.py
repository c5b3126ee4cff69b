"""Pictures to files: PNG, JPEG, WebP. On an `EncodingPool`; decoding is `omni_bus.media.decode`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from omni_bus.wire.payloads import Image

PictureFormat: TypeAlias = Literal["png", "jpeg", "webp"]
PICTURE_FORMATS: tuple[PictureFormat, ...] = get_args(PictureFormat)
PICTURE_TYPES: dict[PictureFormat, str] = {fmt: f"image/{fmt}" for fmt in PICTURE_FORMATS}
"""Media types."""

MAX_SIDES: dict[PictureFormat, int] = {"png": 2**31 - 1, "jpeg": 65_500, "webp": 16_383}
"""Pixels that a file can be high or wide."""

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def encode_picture_blocking(image: Image, fmt: PictureFormat, compression: int = 100) -> bytes:
    """Return a picture as a file.

    Args:
        image: its channels are kept; a JPEG has no transparency and shows it on white.
        fmt: of the file.
        compression: 0 to 100: the quality of JPEG and WebP; a PNG has no loss and is made faster and larger at 100.

    Raises:
        BadInput: the format can't hold a picture of this size, or Pillow is not installed.
    """
    try:
        import PIL.Image
    except ImportError:
        message = f"output_format: {fmt} needs Pillow (pip install pillow) where the gateway runs"
        raise BadInput(message, field="output_format") from None
    if max(image.width, image.height) > MAX_SIDES[fmt]:
        raise BadInput(
            f"output_format: {fmt} came, which can't hold {image.width}×{image.height} (allowed: png)",
            field="output_format",
        )
    picture = PIL.Image.frombytes(_MODES[image.channels], (image.width, image.height), bytes(image.data.view))
    settings: dict[str, Any] = {"quality": compression}
    if fmt == "png":
        settings = {"compress_level": 1 + 8 * (100 - compression) // 100}
    elif fmt == "jpeg" and image.channels == 4:
        white = PIL.Image.new("RGBA", picture.size, "white")
        picture = PIL.Image.alpha_composite(white, picture).convert("RGB")
    file = io.BytesIO()
    picture.save(file, fmt.upper(), **settings)
    return file.getvalue()
