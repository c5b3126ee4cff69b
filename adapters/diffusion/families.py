"""What is known of diffusers' pipelines by their class names alone, before anything is loaded."""

from __future__ import annotations

import json
import re

from adapters.shipped import folder_of

_AUDIO = re.compile(r"Audio(?!Text)|MusicLDM|AceStep|DanceDiffusion")
_JOINT = re.compile(r"^LTX2")
_VIDEO = re.compile(
    r"Video|^Wan|^LTX|CogVideoX|Mochi|Allegro|AnimateDiff|SkyReels|^Latte|EasyAnimate|Cosmos|ChronoEdit|Helios|ConsisID"
    r"|^Kandinsky\d(T2V|I2V)|TextToVideo|VideoToVideo|ImageToVideo|^Lucy|^AnyFlow"
)
_NEEDS_IMAGE = re.compile(r"Img2Img|Inpaint|Fill|Edit|ImageToVideo|I2V|Upscale|Kontext(?=Inpaint)|Layered|Pix2Pix")
_TAKES_IMAGE = re.compile(r"Kontext")
_NEEDS_MASK = re.compile(r"Inpaint|Fill")
_NEEDS_VIDEO = re.compile(r"VideoToVideo")
_MANY_IMAGES = re.compile(r"EditPlus|^Flux2|ZImageOmni")
_PACKS = re.compile(r"^(Flux|QwenImage|ZImage|Chroma|Bria|LongCatImage|Ovis|Visual)")
_PUBLISHES_FRAMES = frozenset({"WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"})

FPS = {"Wan": 16, "CogVideoX": 8, "Mochi": 30, "HunyuanVideo": 15, "Allegro": 15, "AnimateDiff": 8}
"""Frames a second that models were trained with, by the beginning of the pipeline's name; 24 otherwise."""


class Family:
    """What a pipeline's class name says."""

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name
        self.needs_image = bool(_NEEDS_IMAGE.search(class_name))
        self.takes_image = self.needs_image or bool(_TAKES_IMAGE.search(class_name) or _MANY_IMAGES.search(class_name))
        self.needs_mask = bool(_NEEDS_MASK.search(class_name))
        self.needs_video = bool(_NEEDS_VIDEO.search(class_name))
        self.takes_many_images = bool(_MANY_IMAGES.search(class_name))
        self.packs_latents = bool(_PACKS.search(class_name))
        """Whether two by two latents are one token, which the model's configuration doesn't say."""
        self.publishes_frames = class_name in _PUBLISHES_FRAMES
        """Whether what its VAE decodes frame group by frame group is the video, in order and final."""
        self.fps = next((float(fps) for start, fps in FPS.items() if class_name.startswith(start)), 24.0)

    @property
    def media(self) -> frozenset[str]:
        """Output ports that it fills."""
        if _JOINT.search(self.class_name):
            return frozenset({"video", "audio"})
        if _AUDIO.search(self.class_name):
            return frozenset({"audio"})
        return frozenset({"video" if _VIDEO.search(self.class_name) else "image"})


def family_in(folder: str) -> Family | None:
    """Return the family of a pipeline's folder; None where there is no such folder."""
    index = folder_of(folder) / "model_index.json"
    if not index.is_file():
        return None
    return Family(str(json.loads(index.read_text(encoding="utf-8")).get("_class_name", "")))
