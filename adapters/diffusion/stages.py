"""One pipeline over three stages: prompts are encoded in one, noise is removed in another, latents decoded in a third.

What crosses is what the pipeline's own code hands from one part to the next, so the picture is that of one process:
what its `encode_prompt` returned, and what its VAE's `decode` is given. Each stage loads its own weights only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.diffusion import media
from adapters.diffusion.drawing import Drawing
from adapters.diffusion.engine import Diffusers
from adapters.diffusion.families import Family
from adapters.diffusion.interposed import DENOISERS, Interposed
from adapters.diffusion.params import DiffusionParams
from omni_bus.engine import EngineRequest, Report
from omni_bus.errors import BadInput, StartFailed
from omni_bus.wire.payloads import Json, Latents, Payload, Tensor

TEXT_PARTS = frozenset(f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3", "_4"))


class _Taken(Exception):
    """What this stage is for was done; raised through the pipeline's own code."""


# --- the encoder --------------------------------------------------------------------------------------------


class EncoderParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides about a prompt's encoding; the denoiser must be given the same."""

    negative_prompt: Annotated[str, Meta(min_length=1)] | None = None
    """What is not to be in the output."""
    guidance_scale: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """How closely the prompt is followed: above 1, most pipelines encode what is not to be in the output, too."""
    num_images: Annotated[int, Meta(ge=1, le=16)] = 1
    """Pictures of one prompt."""
    fps: ClassVar[float | None] = None


class _Encoding(Drawing):
    def _draw(self, own: Interposed) -> None:
        own.remember(self._work.prompts, None)
        calls: list[dict[str, Any]] = []
        tensors: list[Any] = []
        encode = own.pipeline.encode_prompt

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            found = encode(*args, **kwargs)
            calls.append({"arguments": _settings(kwargs), "result": _outline(found, tensors)})
            return found

        def stop(*args: Any, **kwargs: Any) -> None:
            raise _Taken

        own.replace("encode_prompt", encode_prompt)
        own.replace("prepare_latents", stop)
        with suppress(_Taken):
            own.pipeline(**self._plan.arguments)
        self._emit("conditioning", Json({"calls": calls}))
        for tensor in tensors:
            self._emit("embeddings", Tensor(*media.raw(tensor, self._work.allocate)))


class DiffusersEncoder(Diffusers):
    """The text encoders of a pipeline: a prompt in, its embeddings out."""

    name: ClassVar[str] = "diffusers-encoder"
    accepts: ClassVar[dict[str, str]] = {"prompt": "text"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset()
    emits: ClassVar[dict[str, str]] = {"conditioning": "json", "embeddings": "tensor"}
    Params: ClassVar[type[msgspec.Struct]] = EncoderParams
    drawing: ClassVar[type[Drawing]] = _Encoding
    without: ClassVar[frozenset[str]] = frozenset({*DENOISERS, "vae"})

    def load(self, report: Report) -> None:
        """Load the text encoders.

        Raises:
            StartFailed: the pipeline's way from a prompt to latents isn't known.
        """
        super().load(report)
        _check_cut(self, "encode_prompt", "prepare_latents")

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: it can't be honoured.
        """
        given = msgspec.structs.asdict(request.params)
        self._begin(request, self._call.arguments(DiffusionParams(**given), inputs))


# --- the denoiser -------------------------------------------------------------------------------------------


class _Denoising(Drawing):
    def _draw(self, own: Interposed) -> None:
        [conditioning] = self._plan.inputs["conditioning"]
        assert isinstance(conditioning, Json)
        device = own.pipeline._execution_device  # noqa: SLF001 (diffusers has no other name for it)
        tensors = [media.tensor_of(payload).to(device) for payload in self._plan.inputs["embeddings"]]
        calls = iter(conditioning.value["calls"])

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            call = next(calls, None)
            if call is None:
                raise BadInput("negative_prompt: the encoder had none (allowed: what it had)", field="negative_prompt")
            _check_equal(call["arguments"], _settings(kwargs))
            return _filled(call["result"], tensors)

        def decode(latents: Any, *args: Any, **kwargs: Any) -> None:
            self._report("decode", self.num_steps_done)
            shape = media.raw(latents, self._work.allocate)
            self._emit("latents", Latents(self.num_steps_done, self._num_steps, *shape))
            raise _Taken

        own.replace("encode_prompt", encode_prompt)
        vars(own.pipeline.vae)["decode"] = decode
        self._report("encode", 0)
        with suppress(_Taken):
            self._run(own)


class DiffusersDenoiser(Diffusers):
    """The denoiser of a pipeline: embeddings in, latents out. Its requests share steps as those of `Diffusers`."""

    name: ClassVar[str] = "diffusers-denoiser"
    accepts: ClassVar[dict[str, str]] = {"conditioning": "json", "embeddings": "tensor"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset()
    emits: ClassVar[dict[str, str]] = {"latents": "latents", "progress": "json"}
    drawing: ClassVar[type[Drawing]] = _Denoising
    without: ClassVar[frozenset[str]] = TEXT_PARTS | {"vae"}

    def load(self, report: Report) -> None:
        """Load the denoiser.

        Raises:
            StartFailed: the pipeline has no VAE that would decode.
        """
        super().load(report)
        _check_cut(self, "encode_prompt", "vae")

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: it can't be honoured.
        """
        conditioning = inputs.get("conditioning", ())
        if len(conditioning) != 1 or not _is_conditioning(conditioning[0], len(inputs.get("embeddings", ()))):
            raise BadInput(
                "conditioning: it isn't an encoder's (allowed: one of diffusers-encoder)", field="conditioning"
            )
        if request.params.num_previews:
            raise BadInput("num_previews: this stage can't decode (allowed: 0)", field="num_previews")
        self._check_lora(request.params.lora)
        # Pipelines count their prompts; the text itself went to the encoder.
        self._begin(request, self._call.settings(request.params) | {"prompt": " "}, inputs)


# --- the decoder --------------------------------------------------------------------------------------------


class DecoderParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    """Frames to show in a second."""


class _Decoding(Drawing):
    def _draw(self, own: Interposed) -> None:
        import torch

        own.quantise()
        self._publish_frames(own)
        pipeline = own.pipeline
        for payload in self._plan.inputs["latents"]:
            with torch.no_grad():
                latents = media.tensor_of(payload).to(pipeline.vae.device)
                pixels = pipeline.vae.decode(latents, return_dict=False)[0]
                if Family(type(pipeline).__name__).media == {"image"}:
                    # A video VAE that draws pictures gives clips of one frame.
                    images = pipeline.image_processor.postprocess(pixels[:, :, 0] if pixels.ndim == 5 else pixels)
                    self._put_out(media.Pictures(images=images))
                else:
                    self._put_out(media.Clips(frames=pipeline.video_processor.postprocess_video(pixels)))


class DiffusersDecoder(Diffusers):
    """The VAE of a pipeline: latents in, pictures or video out."""

    name: ClassVar[str] = "diffusers-decoder"
    accepts: ClassVar[dict[str, str]] = {"latents": "latents"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset()
    emits: ClassVar[dict[str, str]] = {"image": "image", "video": "video"}
    Params: ClassVar[type[msgspec.Struct]] = DecoderParams
    drawing: ClassVar[type[Drawing]] = _Decoding
    without: ClassVar[frozenset[str]] = TEXT_PARTS | {*DENOISERS}

    def load(self, report: Report) -> None:
        """Load the VAE.

        Raises:
            StartFailed: the pipeline has none.
        """
        super().load(report)
        _check_cut(self, "vae")

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: there are no latents, or not of this VAE.
        """
        for payload in inputs.get("latents", ()):
            assert isinstance(payload, Latents)
            self._check_latents(payload)
        if not inputs.get("latents"):
            raise BadInput("latents: none came (allowed: a denoiser's)", field="latents")
        self._begin(request, {}, inputs)

    def _check_latents(self, payload: Latents) -> None:
        config = self._pipeline.vae.config
        channels = getattr(config, "latent_channels", None) or getattr(config, "z_dim", None)
        if len(payload.shape) not in {4, 5} or payload.shape[1] != channels or 0 in payload.shape:
            raise BadInput(
                f"latents: {payload.shape} came (allowed: {channels} channels, as (samples, channels, …))",
                field="latents",
            )


# --- what crosses -------------------------------------------------------------------------------------------


def _check_cut(engine: Diffusers, *needed: str) -> None:
    pipeline = engine._pipeline  # noqa: SLF001 (the classes of this module are that engine)
    for name in needed:
        if getattr(pipeline, name, None) is None:
            raise StartFailed(
                f"model: {type(pipeline).__name__} has no {name} and can't be cut there (allowed: adapter diffusers)",
                field="model",
            )


def _settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and switches that a prompt was encoded with."""
    return {name: value for name, value in kwargs.items() if isinstance(value, (bool, int, float))}


def _check_equal(encoder: Mapping[str, Any], denoiser: Mapping[str, Any]) -> None:
    for name, value in denoiser.items():
        if encoder.get(name) != value:
            raise BadInput(
                f"guidance_scale: the prompt was encoded with {name} {encoder.get(name)}, this stage wants {value}"
                " (allowed: the same parameters and call in both stages)",
                field="guidance_scale",
            )


def _outline(value: Any, tensors: list[Any]) -> Any:
    """Return how tensors are nested in a value, and put them at the end of a list."""
    import torch

    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return len(tensors) - 1
    return {type(value).__name__: [_outline(item, tensors) for item in value]}


def _filled(outline: Any, tensors: Sequence[Any]) -> Any:
    if outline is None:
        return None
    if isinstance(outline, int):
        return tensors[outline]
    [(kind, items)] = outline.items()
    filled = [_filled(item, tensors) for item in items]
    return tuple(filled) if kind == "tuple" else filled


def _is_conditioning(payload: Payload, num_tensors: int) -> bool:
    """Whether it is what an encoder says, with that many tensors; checked, since a client may feed this port."""

    def is_outline(value: Any, depth: int = 0) -> bool:
        if value is None:
            return True
        if isinstance(value, int) and not isinstance(value, bool):
            return 0 <= value < num_tensors
        if not isinstance(value, dict) or len(value) != 1 or depth > 4:
            return False
        [(kind, items)] = value.items()
        return kind in {"tuple", "list"} and isinstance(items, list) and all(is_outline(i, depth + 1) for i in items)

    calls = payload.value.get("calls") if isinstance(payload, Json) and isinstance(payload.value, dict) else None
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("arguments"), dict) and is_outline(call.get("result"))
        for call in calls
    )
