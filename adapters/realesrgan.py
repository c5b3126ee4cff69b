"""Pictures four times as high and wide, by Real-ESRGAN (the small model for drawn pictures and video).

A picture is enlarged in strips, each with as much of its neighbours as its pixels depend on: so the result is that of
the whole, while memory stays small and a cancel waits for one strip.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.handover import on_thread, start_threads
from adapters.packages import missing
from adapters.realesrgan_weights import INSTALL, MODULE, REACH, SCALE, build_network, find_weights
from adapters.transformers_model import device_of
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StageFailed, StartFailed
from omni_bus.wire.payloads import Image, Payload, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import torch

    from omni_bus.engine import Context, Report

NAME = "realesrgan"

STRIP_PIXELS = 64 * 256
"""Of the picture that is enlarged; 0.3 s on one core."""


class RealEsrganOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """``auto`` (an accelerator if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that are open at once; their strips take turns on one thread."""
    max_pixels: Annotated[int, Meta(ge=1, le=2**26)] = 1024 * 1024
    """Width times height of a picture that is to be enlarged."""


class RealEsrganParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set: a smaller result, in the picture's proportions."""

    width: Annotated[int, Meta(ge=16, le=16384)] | None = None
    """Pixels; None takes four times the picture's."""
    height: Annotated[int, Meta(ge=16, le=16384)] | None = None
    """Pixels; None takes four times the picture's."""


class RealEsrgan(StreamingEngine):
    """Pictures in, the same out, larger; channels are kept, and transparency is enlarged like a grey picture."""

    accepts: ClassVar[dict[str, str]] = {"image": "image"}
    emits: ClassVar[dict[str, str]] = {"image": "image"}
    Options: ClassVar[type[msgspec.Struct]] = RealEsrganOptions
    Params: ClassVar[type[msgspec.Struct]] = RealEsrganParams
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})

    _network: torch.nn.Module
    _device: torch.device

    def __init__(self, options: RealEsrganOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=NAME)

    @classmethod
    def check(cls, options: RealEsrganOptions) -> list[str]:
        """Return what is missing."""
        return missing(NAME, {'pip install "omni-bus[diffusers]"': ("torch",), INSTALL: (MODULE,)})

    def load(self, report: Report) -> None:
        """Load, and enlarge a grey picture.

        Raises:
            StartFailed: a package or the device is not there.
        """
        folder = find_weights()
        if (problems := self.check(self.options)) or folder is None:
            raise StartFailed("; ".join(problems))
        report("importing torch", 0.0)
        import torch

        torch.set_num_threads(self.context.num_threads)
        self._device = device_of(self.options.device)
        report("loading weights", 0.0)
        self._network = build_network(folder).to(self._device)
        start_threads(self._thread, 1)
        report("warming up", 0.0)
        self._thread.submit(self._enlarge_blocking, torch.full((3, 64, 64), 0.5)).result()
        report("warming up", 1.0)

    def unload(self) -> None:
        """Let go of the weights."""
        vars(self).pop("_network", None)

    def close(self) -> None:
        """Let go of the weights and the thread."""
        self._thread.shutdown()
        self.unload()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload], None]:
        """Enlarge one picture after another.

        Raises:
            BadInput: a picture of too many pixels, or a size that it can't have.
        """
        async for picture in inputs.port("image"):
            if not isinstance(picture, Image):
                raise BadInput(f"image: {kind_of(picture)} came (allowed: image)", field="image")
            size = self._size(picture, request.params)
            planes = await on_thread(self._thread, self._planes_blocking, picture)
            rows = max(1, STRIP_PIXELS // picture.width)
            strips = [
                await on_thread(self._thread, self._strip_blocking, planes, first, rows)
                for first in range(0, picture.height, rows)
            ]
            yield "image", await on_thread(self._thread, self._finish_blocking, strips, size, picture.channels)

    def _size(self, picture: Image, params: RealEsrganParams) -> tuple[int, int]:
        """Return the height and width of the result.

        Raises:
            BadInput: names what is wrong.
        """
        height, width = picture.height, picture.width
        if not 1 <= width * height <= self.options.max_pixels:
            allowed = f"1 to {self.options.max_pixels} pixels"
            raise BadInput(f"image: {width}×{height} came (allowed: {allowed})", field="image")
        wanted_height = params.height or round((params.width or SCALE * width) * height / width)
        wanted_width = params.width or round(wanted_height * width / height)
        is_alike = abs(wanted_width * height - wanted_height * width) < max(width, height)
        if not is_alike or wanted_width > SCALE * width or wanted_height > SCALE * height:
            field = "width" if params.width else "height"
            raise BadInput(
                f"{field}: {wanted_width}×{wanted_height} came"
                f" (allowed: at most {SCALE * width}×{SCALE * height}, in these proportions)",
                field=field,
            )
        return max(1, wanted_height), max(1, wanted_width)

    @staticmethod
    def _planes_blocking(picture: Image) -> torch.Tensor:
        """Return three planes, or six where there is transparency, in [0, 1]."""
        import torch

        shape = (picture.height, picture.width, picture.channels)
        planes = torch.frombuffer(bytearray(picture.data.view), dtype=torch.uint8).view(shape).movedim(-1, 0) / 255
        match picture.channels:
            case 1:
                return planes.expand(3, -1, -1)
            case 4:
                return torch.cat([planes[:3], planes[3:].expand(3, -1, -1)])
            case _:
                return planes

    def _strip_blocking(self, planes: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        above = min(first, REACH)
        strip = self._enlarge_blocking(planes[:, first - above : first + rows + REACH])
        return strip[:, SCALE * above : SCALE * (above + min(rows, planes.shape[1] - first))]

    def _enlarge_blocking(self, planes: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            found = self._network(planes.unflatten(0, (-1, 3)).to(self._device))
        return found.flatten(0, 1)

    def _finish_blocking(self, strips: list[torch.Tensor], size: tuple[int, int], channels: int) -> Image:
        import torch
        from torch.nn import functional

        with torch.inference_mode():
            planes = torch.cat(strips, 1)
            if tuple(planes.shape[1:]) != size:
                planes = functional.interpolate(planes[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
            if channels != 3:
                grey = planes[-3:].mean(0, keepdim=True)
                planes = grey if channels == 1 else torch.cat([planes[:3], grey])
            if not planes.isfinite().all():
                raise StageFailed("the model computed pixels that aren't finite")
            pixels = (planes * 255).round().to(torch.uint8).movedim(0, -1).contiguous()
            data: Any = self.context.allocate(pixels.numel())
            torch.frombuffer(data.view, dtype=torch.uint8).view(pixels.shape).copy_(pixels)
        return Image(size[0], size[1], channels, data)
