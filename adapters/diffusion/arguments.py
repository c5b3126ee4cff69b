"""From a request to the arguments of a pipeline's call, and every reason to refuse it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from adapters.diffusion import media
from adapters.diffusion.families import Family
from adapters.diffusion.options import DiffusionOptions
from adapters.diffusion.params import DiffusionParams
from omni_bus.errors import BadInput, MediaTooLarge, StartFailed, did_you_mean
from omni_bus.wire.payloads import Audio, Image, Payload, Text, Video, kind_of

OURS = frozenset({
    "prompt", "generator", "output_type", "return_dict", "callback", "callback_steps", "callback_on_step_end",
    "callback_on_step_end_tensor_inputs", "num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt",
})  # fmt: skip
"""Arguments of calls that are the engine's own business."""

LENGTHS = ("audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s", "duration")
"""What pipelines call the length in seconds; the first is the end of a window."""

COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")


class Call:
    """What a loaded pipeline's call takes."""

    def __init__(self, pipeline: Any, family: Family, options: DiffusionOptions) -> None:
        """Look at the pipeline.

        Raises:
            StartFailed: `options.call` names an argument that it doesn't take.
        """
        self._pipeline = pipeline
        self._family = family
        self._options = options
        parameters = inspect.signature(type(pipeline).__call__).parameters
        self._defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.takes = frozenset(parameters) - {"self"}
        known = self.takes - OURS
        for name in options.call:
            if name not in known:
                raise StartFailed(
                    f"call: unknown argument '{name}'{did_you_mean(name, known)} (known: {', '.join(sorted(known))})",
                    field="call",
                )
        self.rate_hz = rate_of(pipeline)
        self.length = next((name for name in LENGTHS if name in self.takes), "")
        self._longest = self._longest_sound()
        denoiser = getattr(pipeline, "transformer", None)
        config = getattr(denoiser, "config", {})
        is_distilled = bool(getattr(config, "guidance_embeds", False))
        has_true_guidance = "true_cfg_scale" in self.takes and not is_distilled
        self._guidance = "true_cfg_scale" if has_true_guidance else "guidance_scale"
        """What the pipeline calls the guidance that is meant."""
        self._negative_guidance = "true_cfg_scale" if "true_cfg_scale" in self.takes else "guidance_scale"
        self._side_multiple = self._multiple_of_sides(config)
        self._frames_multiple = _first_int(
            pipeline, "vae_scale_factor_temporal", "vae_temporal_compression_ratio", default=1
        )

    def _longest_sound(self) -> float:
        longest = self._options.max_audio_length
        if self.length == "audio_end_in_s" and self.rate_hz:
            # It always computes this much and cuts a window out.
            window = self._pipeline.transformer.config.sample_size * self._pipeline.vae.hop_length / self.rate_hz
            longest = min(longest, window)
        # LongCat makes no longer ones, whatever is asked for.
        return min(longest, getattr(self._pipeline, "max_wav_duration", longest))

    def _multiple_of_sides(self, config: Any) -> int:
        scale = _first_int(
            self._pipeline,
            "vae_scale_factor_spatial",
            "vae_spatial_compression_ratio",
            "vae_scale_factor",
            default=8 if getattr(self._pipeline, "vae", None) is not None else 1,
        )
        patch = getattr(config, "patch_size", 1) or 1
        patch = int(patch[-1]) if isinstance(patch, (list, tuple)) else int(patch)
        return scale * (2 if self._family.packs_latents else patch)

    def example(self) -> dict[str, Any]:
        """Return a call to warm up with."""
        import PIL.Image

        found: dict[str, Any] = dict(self._options.call) | {"prompt": "rain"}
        if "num_inference_steps" in self.takes:
            found["num_inference_steps"] = 2  # solvers of second order want more than one
        side = 64 * max(1, self._side_multiple // 64)
        grey = PIL.Image.new("RGB", (found.get("width", 4 * side), found.get("height", 4 * side)), (128, 128, 128))
        if self._family.needs_image:
            found["image"] = grey
        if self._family.needs_mask:
            found["mask_image"] = PIL.Image.new("L", grey.size, 255)
        if self._family.needs_video:
            found["video"] = [grey] * (2 * self._frames_multiple + 1)
        return found

    def arguments(self, params: DiffusionParams, inputs: Mapping[str, Sequence[Payload]]) -> dict[str, Any]:
        """Return the arguments of a request.

        Raises:
            BadInput: it can't be honoured; names the parameter or the input, and what is allowed.
        """
        found = self.settings(params) | {"prompt": self._prompt(inputs.get("prompt", ()))}
        self._add_media(inputs, found)
        return found

    def settings(self, params: DiffusionParams) -> dict[str, Any]:
        """Return what a request's parameters come to, without its inputs.

        Raises:
            BadInput: a parameter can't be honoured.
        """
        found: dict[str, Any] = dict(self._options.call)
        for name, value in params.extra.items():
            if name not in self.takes - OURS:
                known = ", ".join(sorted(self.takes - OURS))
                raise BadInput(
                    f"extra: unknown argument '{name}'{did_you_mean(name, self.takes)} (known: {known})", field="extra"
                )
            found[name] = value
        for name in ("num_inference_steps", "num_frames", "strength", "width", "height"):
            if (value := getattr(params, name)) is not None:
                self._require(name, name)
                found[name] = value
        self._add_guidance(params, found)
        self._add_counts(params, found)
        self._add_length(params, found)
        self._check_sizes(params, found)
        return found

    def time_base(self, fps: float | None) -> tuple[int, int]:
        """Return the seconds of a frame, as a fraction; the model's own for None."""
        call, own = self._options.call, self._defaults
        known = (fps, self._options.fps, call.get("frame_rate"), call.get("fps"), own.get("frame_rate"), own.get("fps"))
        found = next((rate for rate in known if isinstance(rate, (int, float)) and rate > 0), self._family.fps)
        rate = Fraction(found).limit_denominator(1001)
        return rate.denominator, rate.numerator

    def num_steps(self, arguments: Mapping[str, Any]) -> int:
        """Return the denoising steps that were asked for; 0 where the pipeline decides."""
        found = arguments.get("num_inference_steps", self._defaults.get("num_inference_steps"))
        return found if isinstance(found, int) else 0

    def _prompt(self, payloads: Sequence[Payload]) -> str:
        pieces: list[str] = []
        for payload in payloads:
            if not isinstance(payload, Text):
                raise BadInput(f"prompt: {kind_of(payload)} came (allowed: text)", field="prompt")
            pieces.append(payload.text)
        prompt = "".join(pieces)
        if not prompt.strip():
            raise BadInput("prompt: it is blank (allowed: a text)", field="prompt")
        check_length(self._pipeline, "prompt", prompt)
        return prompt

    def _require(self, field: str, *arguments: str) -> str:
        """Return the first of these arguments that the call takes.

        Raises:
            BadInput: it takes none.
        """
        for name in arguments:
            if name in self.takes:
                return name
        raise BadInput(f"{field}: the model has no such setting (allowed: null)", field=field)

    def _add_guidance(self, params: DiffusionParams, found: dict[str, Any]) -> None:
        if params.guidance_scale is not None:
            found[self._require("guidance_scale", self._guidance)] = params.guidance_scale
            if self._guidance == "true_cfg_scale" and params.guidance_scale > 1 and params.negative_prompt is None:
                found.setdefault("negative_prompt", " ")  # without one these pipelines leave guidance out
        if params.negative_prompt is None:
            return
        found[self._require("negative_prompt", "negative_prompt")] = params.negative_prompt
        check_length(self._pipeline, "negative_prompt", params.negative_prompt)
        scale = found.get(self._negative_guidance, self._defaults.get(self._negative_guidance))
        if isinstance(scale, (int, float)) and scale <= 1:
            raise BadInput(
                f"negative_prompt: it changes nothing at a {self._negative_guidance} of {scale:g}"
                f" (allowed: null, or a {self._negative_guidance} above 1)",
                field="negative_prompt",
            )

    def _add_counts(self, params: DiffusionParams, found: dict[str, Any]) -> None:
        if params.num_images == 1:
            return
        if self._family.media != {"image"} or COUNTS[0] not in self.takes:
            raise BadInput(
                f"num_images: {params.num_images} came, and the model makes one of each prompt (allowed: 1)",
                field="num_images",
            )
        found[COUNTS[0]] = params.num_images

    def _add_length(self, params: DiffusionParams, found: dict[str, Any]) -> None:
        for name in ("frame_rate", "fps"):
            if params.fps is not None and name in self.takes:
                found[name] = params.fps
        if params.fps is not None and "video" not in self._family.media:
            raise BadInput(f"fps: {params.fps:g} came, and the model makes no video (allowed: null)", field="fps")
        if params.audio_length is None:
            return
        self._require("audio_length", self.length)
        if params.audio_start and self.length != "audio_end_in_s":
            raise BadInput(
                f"audio_start: {params.audio_start:g} came, and the model's sounds have no parts (allowed: 0)",
                field="audio_start",
            )
        end = params.audio_start + params.audio_length
        if end > self._longest:
            field = "audio_length" if params.audio_length > self._longest else "audio_start"
            raise BadInput(
                f"{field}: the sound would end at {end:g} s (allowed: at most {self._longest:g} s)", field=field
            )
        found[self.length] = end
        if self.length == "audio_end_in_s":
            found["audio_start_in_s"] = params.audio_start

    def _add_media(self, inputs: Mapping[str, Sequence[Payload]], found: dict[str, Any]) -> None:
        images = [payload for payload in inputs.get("images", ()) if isinstance(payload, Image)]
        if images:
            name = self._require("images", "image")
            for image in images:
                self._check_pixels("images", image.width, image.height)
            if len(images) > 1 and not self._family.takes_many_images:
                raise BadInput(f"images: {len(images)} came (allowed: 1)", field="images")
            pictures = [media.picture(image, "images") for image in images]
            found[name] = pictures if len(pictures) > 1 else pictures[0]
        elif self._family.needs_image and "image" not in found:
            raise BadInput("images: none came (allowed: at least 1)", field="images")
        for mask in inputs.get("mask", ()):
            assert isinstance(mask, Image)
            self._check_pixels("mask", mask.width, mask.height)
            found[self._require("mask", "mask_image")] = media.mask_picture(mask)
        if self._family.needs_mask and "mask_image" not in found:
            raise BadInput("mask: none came (allowed: 1)", field="mask")
        self._add_clip([payload for payload in inputs.get("video", ()) if isinstance(payload, Video)], found)
        self._add_sound([payload for payload in inputs.get("audio", ()) if isinstance(payload, Audio)], found)

    def _add_clip(self, clip: list[Video], found: dict[str, Any]) -> None:
        num_frames = sum(piece.num_frames for piece in clip)
        if clip:
            name = self._require("video", "video")
            self._check_pixels("video", clip[0].width, clip[0].height)
            if not 1 <= num_frames <= self._options.max_num_frames:
                allowed = f"1 to {self._options.max_num_frames}"
                raise BadInput(f"video: {num_frames} frames came (allowed: {allowed})", field="video")
            found[name] = media.frames(clip)
        elif self._family.needs_video:
            raise BadInput("video: none came (allowed: a clip)", field="video")

    def _add_sound(self, pieces: list[Audio], found: dict[str, Any]) -> None:
        if not pieces:
            return
        import numpy as np
        import torch

        name = self._require("audio", "initial_audio_waveforms")
        if pieces[0].rate_hz != self.rate_hz:
            raise BadInput(f"audio: {pieces[0].rate_hz} Hz came (allowed: {self.rate_hz} Hz)", field="audio")
        kind, scale = ("<i2", 32768.0) if pieces[0].format == "s16" else ("<f4", 1.0)
        samples = np.concatenate([np.frombuffer(piece.data.view, kind) for piece in pieces]).astype(np.float32) / scale
        found[name] = torch.from_numpy(samples.reshape(1, -1, pieces[0].channels).transpose(0, 2, 1).copy())
        found["initial_audio_sampling_rate"] = torch.tensor([self.rate_hz])

    def _check_pixels(self, field: str, width: int, height: int) -> None:
        if width * height > self._options.max_pixels:
            raise MediaTooLarge(
                f"{field}: {width}×{height} came (allowed: at most {self._options.max_pixels} pixels)", field=field
            )

    def _side(self, name: str, found: Mapping[str, Any]) -> int:
        """Return pixels that a side will have, about, where neither request nor call says it."""
        for side in (found.get(name), self._defaults.get(name)):
            if isinstance(side, int):
                return side
        return 1024

    def _check_sizes(self, params: DiffusionParams, found: dict[str, Any]) -> None:
        """Refuse sizes that pipelines would change, or would fail at later."""
        for name in ("width", "height"):
            value, multiple = getattr(params, name), self._side_multiple
            if value is not None and value % multiple:
                raise BadInput(f"{name}: {value} came (allowed: multiples of {multiple})", field=name)
        if params.width is not None or params.height is not None:
            width, height = (self._side(name, found) for name in ("width", "height"))
            self._check_pixels("height" if params.width is None else "width", width, height)
        num_frames, step = params.num_frames, self._frames_multiple
        if num_frames is None:
            return
        if num_frames > self._options.max_num_frames:
            allowed = f"at most {self._options.max_num_frames}"
            raise BadInput(f"num_frames: {num_frames} came (allowed: {allowed})", field="num_frames")
        if (num_frames - 1) % step:
            allowed = f"one more than a multiple of {step}"
            raise BadInput(f"num_frames: {num_frames} came (allowed: {allowed})", field="num_frames")


def check_length(pipeline: Any, field: str, text: str) -> None:
    """Refuse a text that all of the pipeline's tokenizers would cut silently; Flux and SD3 mean one of theirs to.

    Raises:
        BadInput: it is longer.
    """
    found = [getattr(pipeline, name, None) for name in ("tokenizer", "tokenizer_2", "tokenizer_3")]
    tokenizers: list[Any] = [tokenizer for tokenizer in found if hasattr(tokenizer, "model_max_length")]
    if not tokenizers:
        return
    tokenizer = max(tokenizers, key=lambda one: one.model_max_length)
    longest = tokenizer.model_max_length
    if not 0 < longest < 1_000_000:  # huge: the tokenizer knows no limit
        return
    # A token of these vocabularies has no more characters, so longer texts need not be looked at.
    num_tokens = longest + 1 if len(text) > 100 * longest else len(tokenizer(text, verbose=False)["input_ids"])
    if num_tokens > longest:
        raise BadInput(f"{field}: it comes to more than {longest} tokens (allowed: at most {longest})", field=field)


def rate_of(pipeline: Any) -> int:
    """Return the rate in Hz of what comes out last: a vocoder's or else a VAE's; 0 where neither has one."""
    for part in (getattr(pipeline, "vocoder", None), getattr(pipeline, "vae", None)):
        config = getattr(part, "config", None)
        for name in ("output_sampling_rate", "sampling_rate", "sample_rate"):
            if rate := getattr(config, name, 0):
                return int(rate)
    return 0


def _first_int(pipeline: Any, *names: str, default: int) -> int:
    return next((int(value) for name in names if (value := getattr(pipeline, name, None))), default)
