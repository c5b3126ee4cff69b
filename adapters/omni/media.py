"""Pictures, sound and clips of a conversation, as an omni model's processors make them for its encoders."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from adapters.speech_input import SpeechInput
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Image, Payload, Video, kind_of
from omni_bus.wire.prompt import MEDIA_PORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from adapters.omni.family import Family
    from adapters.transformers_model import ModelLoader
    from omni_bus.wire.prompt import Prompt


class Media(NamedTuple):
    """What the encoders are given, and the tokens that it comes to."""

    pixels: torch.Tensor | None = None
    """Patches of all pictures, (patches, width)."""
    image_grids: torch.Tensor | None = None
    """(pictures, 3): patches in time, height and width."""
    clip_pixels: torch.Tensor | None = None
    clip_grids: torch.Tensor | None = None
    seconds_per_grid: Sequence[float] = ()
    """Of each clip, from one patch in time to the next."""
    features: torch.Tensor | None = None
    """Spectrograms, (sounds, bands, frames)."""
    features_mask: torch.Tensor | None = None
    """(sounds, frames), 1 where there is sound."""
    counts: dict[str, int] = {}  # noqa: RUF012 (never changed)
    """Tokens by input port, for the account."""

    @property
    def num_frames(self) -> torch.Tensor | None:
        """Spectrogram frames of each sound."""
        return None if self.features_mask is None else self.features_mask.sum(dim=1)


class MediaReader:
    """The processors of one model.

    Args:
        family: what kind of model it is.
        loader: finds them.
        tokenizer: spells the placeholders.
        max_video_frames: pictures of a clip that the model sees.

    Raises:
        StartFailed: a processor isn't there.
    """

    def __init__(self, family: Family, loader: ModelLoader, tokenizer: Any, max_video_frames: int) -> None:
        import transformers

        self._family = family
        self._images: Any = loader.part("loading processor", transformers.AutoImageProcessor)
        self._sound: Any = loader.part("loading processor", transformers.AutoFeatureExtractor)
        self._max_video_frames = max_video_frames
        self._spellings: dict[str, str] = {
            port: tokenizer.convert_ids_to_tokens(id_) for port, id_ in family.placeholders.items()
        }

    @property
    def max_sound_s(self) -> float:
        """Seconds of one sound, at most."""
        return self._sound.n_samples / self._sound.sampling_rate

    def read(self, prompt: Prompt, text: str | None, inputs: dict[str, list[Payload]]) -> tuple[str | None, Media]:
        """Return the prompt's text with as many placeholders as the media come to, and the media.

        Raises:
            BadInput: what came doesn't fit the messages, or the model can't take it; names the port.
        """
        payloads = {port: inputs.get(port, []) for port in self._family.placeholders}
        self._check_counts(prompt, text, payloads)
        counts: dict[str, list[int]] = {}
        fields: dict[str, Any] = {}
        if payloads["images"]:
            fields |= self._read_images(payloads["images"])
            counts["images"] = self._num_tokens(fields["image_grids"])
        if payloads["video"]:
            fields |= self._read_clips(payloads["video"])
            counts["video"] = self._num_tokens(fields["clip_grids"])
        if payloads["audio"]:
            fields |= self._read_sound(payloads["audio"])
            lengths = fields["features_mask"].sum(dim=1).tolist()
            counts["audio"] = [self._family.num_audio_tokens(length) for length in lengths]
            if min(counts["audio"]) < 1:
                raise BadInput("audio: a sound is too short to be heard (allowed: 0.1 s and more)", field="audio")
        for port, each in counts.items():
            text = _repeated(text or "", self._spellings[port], each)
        return text, Media(**fields, counts={port: sum(each) for port, each in counts.items()})

    def _check_counts(self, prompt: Prompt, text: str | None, payloads: dict[str, list[Payload]]) -> None:
        """Refuse payloads without a part, parts without a payload, and placeholders that somebody wrote."""
        for kind, port in MEDIA_PORTS.items():
            parts = [
                part
                for message in prompt.messages
                if isinstance(message.content, list)
                for part in message.content
                if part.type == kind
            ]
            if len(parts) != len(payloads[port]):
                raise BadInput(
                    f"{port}: {len(payloads[port])} payloads came for {len(parts)} {kind} parts "
                    "(allowed: one for each)",
                    field=port,
                )
            written = (text or "").count(self._spellings[port])
            if written != len(parts):
                raise BadInput(
                    f"messages: {self._spellings[port]} stands {written} times in the prompt for {len(parts)} "
                    f"{kind} parts (allowed: once for each, and in no text)",
                    field="messages",
                )
        if prompt.token_ids is not None:
            for id_ in self._family.placeholders.values():
                if id_ in prompt.token_ids:
                    raise BadInput(f"token_ids: {id_} stands for media (allowed: with messages)", field="token_ids")

    def _num_tokens(self, grids: torch.Tensor) -> list[int]:
        return (grids.prod(dim=1) // self._images.merge_size**2).tolist()

    # --- pictures ---

    def _read_images(self, payloads: list[Payload]) -> dict[str, Any]:
        found = self._patches([_picture(payload) for payload in payloads], "images")
        return {"pixels": found["pixel_values"], "image_grids": found["image_grid_thw"]}

    def _patches(self, pictures: list[Any], field: str) -> Any:
        try:
            return self._images(images=pictures, return_tensors="pt")
        except (ValueError, ZeroDivisionError) as error:
            raise BadInput(
                f"{field}: a picture came that the model can't see: {str(error)[:200]} (allowed: at most 200 times "
                "as wide as high, or as high as wide)",
                field=field,
            ) from error

    def _read_clips(self, payloads: list[Payload]) -> dict[str, Any]:
        import torch

        pixels: list[torch.Tensor] = []
        grids: list[list[int]] = []
        seconds: list[float] = []
        for payload in payloads:
            frames, interval_s = _frames(payload, self._max_video_frames, self._images.temporal_patch_size)
            found = self._patches(frames, "video")
            [height, width] = found["image_grid_thw"][0, 1:].tolist()
            together = int(self._images.temporal_patch_size)
            pixels.append(clip_patches(found["pixel_values"].reshape(len(frames), height * width, -1), together))
            grids.append([len(frames) // together, height, width])
            seconds.append(together * interval_s)
        return {"clip_pixels": torch.cat(pixels), "clip_grids": torch.tensor(grids), "seconds_per_grid": seconds}

    # --- sound ---

    def _read_sound(self, payloads: list[Payload]) -> dict[str, Any]:
        rate_hz = int(self._sound.sampling_rate)
        waves = [self._waveform(payload, rate_hz) for payload in payloads]
        padding: dict[str, Any] = (
            {"padding": "max_length"} if self._family.pads_audio else {"padding": True, "truncation": False}
        )
        found = self._sound(waves, sampling_rate=rate_hz, return_attention_mask=True, return_tensors="pt", **padding)
        return {"features": found["input_features"], "features_mask": found["attention_mask"]}

    def _waveform(self, payload: Payload, rate_hz: int) -> npt.NDArray[np.float32]:
        import numpy as np

        reader = SpeechInput(rate_hz)
        wave = np.concatenate([reader.feed(payload), reader.end()])
        seconds = len(wave) / rate_hz
        if not 0.1 <= seconds <= self.max_sound_s:
            raise BadInput(
                f"audio: a sound of {seconds:.4g} s came (allowed: 0.1 to {self.max_sound_s:g} s)", field="audio"
            )
        return wave


def clip_patches(pictures: torch.Tensor, together: int) -> torch.Tensor:
    """Return the patches of a clip from those of its pictures.

    Args:
        pictures: each as the processor makes it of a single picture, whose patches repeat it in time: (pictures,
            patches, colours * together * height * width).
        together: pictures of one patch in time.

    Returns:
        (pictures / together * patches, the same width).
    """
    num_pictures, num_patches, width = pictures.shape
    split = pictures.reshape(num_pictures // together, together, num_patches, 3, together, -1)
    # Of each picture one of its equal repetitions.
    joined = split[..., 0, :].permute(0, 2, 3, 1, 4)
    return joined.reshape(num_pictures // together * num_patches, width)


def _repeated(text: str, placeholder: str, counts: list[int]) -> str:
    """Return a text with each placeholder repeated."""
    following = iter(counts)
    return re.sub(re.escape(placeholder), lambda found: found[0] * next(following), text)


def _picture(payload: Payload) -> Any:
    import numpy as np
    from PIL import Image as Pillow

    if not isinstance(payload, Image):
        raise BadInput(f"images: {kind_of(payload)} came (allowed: image)", field="images")
    if not payload.height or not payload.width:
        raise BadInput("images: a picture without pixels came (allowed: at least one)", field="images")
    array = np.frombuffer(payload.data.view, np.uint8).reshape(payload.height, payload.width, payload.channels)
    return Pillow.fromarray(array[:, :, 0] if payload.channels == 1 else array).convert("RGB")


def _frames(payload: Payload, max_frames: int, together: int) -> tuple[list[Any], float]:
    """Return pictures evenly spread over a clip, the last repeated until patches are full, and seconds between them."""
    import numpy as np
    from PIL import Image as Pillow

    if not isinstance(payload, Video):
        raise BadInput(f"video: {kind_of(payload)} came (allowed: video)", field="video")
    if not payload.num_frames or not payload.height or not payload.width:
        raise BadInput("video: a clip without frames came (allowed: at least one)", field="video")
    num_chosen = min(max_frames, payload.num_frames)
    chosen = np.linspace(0, payload.num_frames - 1, num_chosen).round().astype(int).tolist()
    frames = np.frombuffer(payload.data.view, np.uint8).reshape(payload.num_frames, payload.height, payload.width, 3)
    pictures = [Pillow.fromarray(frames[i]) for i in chosen]
    pictures += pictures[-1:] * (-len(pictures) % together)
    frame_s = payload.time_base_num / payload.time_base_den
    return pictures, frame_s * (payload.num_frames - 1) / max(1, num_chosen - 1)
