"""A stage that draws what it was told: one colour, from the seed; and remembers each request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from omni_bus.engine import EngineRequest, Inputs, Report, StreamingEngine
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Blob, Image, Json, Payload, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

TOML = """
[stages.brush]
adapter = "painter:Painter"
[stages.plain]
adapter = "painter:Plain"
[stages.wide]
adapter = "painter:Wide"
[stages.llm]
adapter = "synthetic-text"
tokens = 2
[pipelines.able]
serve_as = "able"
aliases = ["brush"]
edges = [
  "in.prompt -> brush.prompt", "in.images -> brush.images", "in.mask -> brush.mask",
  "brush.image -> out.image", "brush.preview -> out.preview",
]
[pipelines.plain]
serve_as = "plain"
edges = ["in.prompt -> plain.prompt", "plain.image -> out.image"]
[pipelines.large]
serve_as = "large"
edges = ["in.prompt -> brush.prompt", "brush.image -> wide.image", "wide.image -> out.image"]
[pipelines.chat]
serve_as = "chat"
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""


class PainterParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As `adapters.diffusion.params.DiffusionParams` names them."""

    negative_prompt: str | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=1000)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    width: Annotated[int, Meta(ge=16)] | None = None
    height: Annotated[int, Meta(ge=16)] | None = None
    strength: float | None = None
    num_previews: int = 0
    lora: dict[str, Any] | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class Painter(StreamingEngine):
    """Draws 32 × 16, or as large as it is told, in the colour (seed, seed + 1, seed + 2); previews are grey."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "text", "images": "image", "mask": "image"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"images", "mask"})
    emits: ClassVar[dict[str, str]] = {"image": "image", "preview": "image", "progress": "json"}
    Params = PainterParams
    seen: ClassVar[list[tuple[str, PainterParams, list[Image], list[Image]]]] = []
    """Prompt, parameters, pictures and masks, request by request."""
    num_left: ClassVar[int] = 0
    """Requests that were cancelled."""

    def load(self, report: Report) -> None:
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload], None]:
        prompt = "".join([piece.text async for piece in inputs.port("prompt") if isinstance(piece, Text)])
        images = [piece async for piece in inputs.port("images") if isinstance(piece, Image)]
        masks = [piece async for piece in inputs.port("mask") if isinstance(piece, Image)]
        params: PainterParams = request.params
        Painter.seen.append((prompt, params, images, masks))
        self._check(params)
        if prompt == "for ever":
            try:
                await asyncio.Event().wait()
            finally:
                Painter.num_left += 1
        width, height = params.width or 32, params.height or 16
        if "progress" in request.outputs:
            yield "progress", Json({"step": 1, "num_steps": 1, "phase": "denoise"})
        for _ in range(params.num_previews if "preview" in request.outputs else 0):
            yield "preview", picture(width, height, 128, 128, 128)
        seed = params.seed or 0
        if prompt != "nothing":
            yield "image", picture(width, height, *((seed + i) % 256 for i in range(3)))

    @staticmethod
    def _check(params: PainterParams) -> None:
        if params.lora is not None and params.lora["name"] != "ink":
            name = params.lora["name"]
            raise BadInput(f"lora: unknown adapter '{name}' (known: ink)", field="lora")
        for name in params.extra:
            if name not in ("layers", "eta", "true_cfg_scale", "guidance_scale"):
                raise BadInput(f"extra: unknown argument '{name}' (known: eta)", field="extra")
        if params.width and params.width % 8:
            raise BadInput(f"width: {params.width} came (allowed: multiples of 8)", field="width")


class Plain(StreamingEngine):
    """Draws grey and takes no parameters."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "text"}
    emits: ClassVar[dict[str, str]] = {"image": "image"}

    def load(self, report: Report) -> None:
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload], None]:
        yield "image", picture(16, 16, 128, 128, 128)


class WideParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    width: int | None = None
    height: int | None = None


class Wide(StreamingEngine):
    """Makes a picture as large as it is told, or twice as large."""

    accepts: ClassVar[dict[str, str]] = {"image": "image"}
    emits: ClassVar[dict[str, str]] = {"image": "image"}
    Params = WideParams

    def load(self, report: Report) -> None:
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload], None]:
        async for image in inputs.port("image"):
            assert isinstance(image, Image)
            width, height = request.params.width or 2 * image.width, request.params.height or 2 * image.height
            yield "image", picture(width, height, *image.data.view[:3])


def picture(width: int, height: int, *colour: int) -> Image:
    return Image(height, width, 3, Blob(bytes(colour) * (width * height)))
