"""Between payloads and what pipelines take and give. Pictures are quantised where they were computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from omni_bus.errors import BadInput, StageFailed
from omni_bus.wire.payloads import Audio, Blob, Dtype, Image, Latents, Payload, Tensor, Video

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from omni_bus.engine import Allocate

FRAMES_PER_PIECE = 8
"""Frames of a finished video that travel together."""


class QuantisingProcessor:
    """A pipeline's image or video processor whose pictures come out as uint8, on the device where they were computed.

    Each value is ``round(255 x)``, ties to even, of the float32 value in [0, 1], as diffusers' own way through host
    memory has it; a quarter of the bytes leaves the device.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def postprocess(self, image: Any, output_type: str = "pil", *args: Any, **kwargs: Any) -> Any:
        """Return pictures, (number, height, width, channels)."""
        return quantised(self._processor.postprocess(image, "pt", *args, **kwargs))

    def postprocess_video(self, video: Any, output_type: str = "np", **kwargs: Any) -> Any:
        """Return clips, (number, frames, height, width, channels)."""
        return quantised(self._processor.postprocess_video(video, "pt", **kwargs))


def quantised(values: torch.Tensor) -> torch.Tensor:
    """Return values in [0, 1], channels third from the end, as uint8 with channels last.

    Raises:
        StageFailed: some aren't finite.
    """
    import torch

    if not torch.isfinite(values).all():
        raise StageFailed("the model computed pixels that aren't finite")
    return (values.float() * 255).round().to(torch.uint8).movedim(-3, -1).contiguous()


def pixels_of(value: Any) -> torch.Tensor:
    """Return a pipeline's pictures as uint8 (..., height, width, channels), whatever form it gave them."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value if value.dtype == torch.uint8 else quantised(value.clamp(0, 1))
    if isinstance(value, (list, tuple)):
        return torch.stack([pixels_of(item) for item in value])
    array = np.asarray(value)  # a picture of PIL's, or floats
    if array.dtype != np.uint8:
        if not np.isfinite(array).all():
            raise StageFailed("the model computed pixels that aren't finite")
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    return torch.from_numpy(np.array(array))


def _in_place(pixels: torch.Tensor, allocate: Allocate) -> Blob:
    import torch

    blob = allocate(pixels.numel())
    torch.frombuffer(blob.view, dtype=torch.uint8).view(pixels.shape).copy_(pixels)
    return blob


def raw(tensor: torch.Tensor, allocate: Allocate) -> tuple[Dtype, tuple[int, ...], Blob]:
    """Return a tensor's element type, shape and bytes."""
    import torch

    dtype = cast("Dtype", str(tensor.dtype).removeprefix("torch."))
    return dtype, tuple(tensor.shape), _in_place(tensor.contiguous().flatten().view(torch.uint8), allocate)


def tensor_of(payload: Payload) -> torch.Tensor:
    """Return a tensor of a payload, in memory of its own."""
    import torch

    assert isinstance(payload, Tensor | Latents)
    dtype = getattr(torch, payload.dtype)
    if not len(payload.data):
        return torch.empty(payload.shape, dtype=dtype)
    return torch.frombuffer(bytearray(payload.data.view), dtype=dtype).reshape(payload.shape)


class Pictures(NamedTuple):
    """Output of a stage that isn't a whole pipeline."""

    images: Any


class Clips(NamedTuple):
    """Output of a stage that isn't a whole pipeline."""

    frames: Any


def image_payload(pixels: torch.Tensor, allocate: Allocate) -> Image:
    """Return one picture: uint8, (height, width, channels)."""
    height, width, channels = pixels.shape
    return Image(height, width, channels, _in_place(pixels, allocate))


def video_payload(frames: torch.Tensor, first_frame: int, time_base: tuple[int, int], allocate: Allocate) -> Video:
    """Return consecutive frames: uint8, (frames, height, width, 3)."""
    num_frames, height, width, _ = frames.shape
    return Video(first_frame, num_frames, height, width, *time_base, _in_place(frames, allocate))


def video_pieces(frames: torch.Tensor, time_base: tuple[int, int], allocate: Allocate) -> Iterator[Video]:
    """Return a whole clip in pieces."""
    for first in range(0, len(frames), FRAMES_PER_PIECE):
        yield video_payload(frames[first : first + FRAMES_PER_PIECE], first, time_base, allocate)


def audio_pieces(sound: Any, rate_hz: int, allocate: Allocate) -> Iterator[Audio]:
    """Return a sound, (channels, samples) or (samples,), in pieces of a second.

    Raises:
        StageFailed: there are samples that aren't finite.
    """
    import torch

    samples = torch.as_tensor(sound).float()
    if not torch.isfinite(samples).all():
        raise StageFailed("the model computed samples that aren't finite")
    pcm = (samples.clamp(-1, 1) * 32767).round().to(torch.int16)
    frames = (pcm[:, None] if pcm.ndim == 1 else pcm.T).contiguous()
    for first in range(0, len(frames), rate_hz):
        piece = frames[first : first + rate_hz]
        yield Audio(rate_hz, piece.shape[1], "s16", _in_place(piece.flatten().view(torch.uint8), allocate))


def picture(payload: Image, field: str) -> Any:
    """Return a picture as PIL's, RGB.

    Raises:
        BadInput: it has no pixels.
    """
    import PIL.Image

    if not payload.height or not payload.width:
        raise BadInput(f"{field}: {payload.width}×{payload.height} came (allowed: a picture with pixels)", field=field)
    size, mode = (payload.width, payload.height), {1: "L", 3: "RGB", 4: "RGBA"}[payload.channels]
    return PIL.Image.frombytes(mode, size, bytes(payload.data.view)).convert("RGB")


def mask_picture(payload: Image) -> Any:
    """Return a mask as PIL's, grey; of a picture with transparency it is what is transparent, as in OpenAI's API."""
    import PIL.Image
    import PIL.ImageChops

    if payload.channels != 4:
        return picture(payload, "mask").convert("L")
    alpha = PIL.Image.frombytes("RGBA", (payload.width, payload.height), bytes(payload.data.view)).getchannel("A")
    return PIL.ImageChops.invert(alpha)


def frames(payloads: Sequence[Video]) -> list[Any]:
    """Return a clip as pictures of PIL's."""
    import PIL.Image

    return [
        PIL.Image.frombytes("RGB", (piece.width, piece.height), bytes(piece.data.view[at : at + size]))
        for piece in payloads
        for size in [3 * piece.width * piece.height]
        for at in range(0, len(piece.data), size)
    ]
