"""What one request may set of a diffusion pipeline, and the ports that its stage has: the contract with the gateways.

============  ========  ==========================================================================================
``prompt``    text      in; what is to be made
``images``    image     in, optional; references, the first is the picture to edit or to begin with
``mask``      image     in, optional; white where the picture may change
``video``     video     in, optional; the clip to edit or to begin with
``audio``     audio     in, optional; the sound to edit or to begin with
``image``     image     out; one payload for each picture, uint8 RGB
``video``     video     out; uint8 frames in pieces, each with the index of its first frame
``audio``     audio     out; s16 in pieces of a second, at the model's rate
``progress``  json      out; ``{"step": 3, "num_steps": 20, "phase": "denoise"}`` after each denoising step; the other
                        phases are ``"encode"`` (step 0) and ``"decode"`` (all steps)
``preview``   image     out; the picture, or the clip's first frame, as it would be by now; ``num_previews`` of them
============  ========  ==========================================================================================

Of ``image``, ``video`` and ``audio`` a stage fills what its model makes; an edge from another is refused at the start.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

MAX_SEED = 2**63 - 1

Argument: TypeAlias = str | int | float | bool | list[int | float]
"""A value of a pipeline's call that a TOML or a request may name."""

Side = Annotated[int, Meta(ge=16, le=16384)]
"""Pixels; a stage's ``max_pixels`` limits both together, and its model says of what they must be multiples."""

Seconds = Annotated[float, Meta(gt=0, le=3600)]

ACCEPTS = {"prompt": "text", "images": "image", "mask": "image", "video": "video", "audio": "audio"}
OPTIONAL_INPUTS = frozenset({"images", "mask", "video", "audio"})
MEDIA = {"image": "image", "video": "video", "audio": "audio"}
EMITS = {**MEDIA, "progress": "json", "preview": "image"}


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the adapters that a stage's table names under ``loras``, and how much of it."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set; what a pipeline's call doesn't take is refused by name. None: the pipeline's own."""

    negative_prompt: Annotated[str, Meta(min_length=1)] | None = None
    """What is not to be in the output."""
    guidance_scale: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """How closely the prompt is followed."""
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Denoising steps."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """The same seed and request give the same output, alone or beside others; None draws a fresh seed."""
    width: Side | None = None
    height: Side | None = None
    num_images: Annotated[int, Meta(ge=1, le=16)] = 1
    """Pictures of one prompt."""
    num_frames: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Frames of a video."""
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    """Frames to show in a second; models that know a rate are told, with others it is the time base of the frames."""
    audio_length: Seconds | None = None
    """Seconds of sound."""
    audio_start: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Where in the piece the sound begins, in seconds; without a length it means nothing."""
    strength: Annotated[float, Meta(ge=0, le=1)] | None = None
    """How much of the picture or clip to begin with is replaced: 1 keeps nothing of it."""
    num_previews: Annotated[int, Meta(ge=0, le=100)] = 0
    """Pictures for the port ``preview``, evenly over the steps; at most one a step."""
    lora: Lora | None = None
    extra: dict[str, Argument] = msgspec.field(default_factory=dict)
    """Other arguments of the pipeline's call, by their names in diffusers."""
