"""transformers' own `generate` of omni models on questions of every kind, for comparison with stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from tiny_omni import SPECIALS  # type: ignore[import-not-found] (its folder is on the path)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_TOKENS, MIN_CODES, NUM_CODES = 10, 12, 30
"""Tokens of an answer's text, and frames of codes at least and at most."""


def questions_for(patch_size: int) -> tuple[tuple[Any, ...], ...]:
    """Return texts, pictures (height, width, 3), clips (frames, height, width, 3) and sounds at 16 kHz."""
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (56, 84, 3), np.uint8)
    other = rng.integers(0, 255, (90, 60, 3), np.uint8)
    clip = rng.integers(0, 255, (4, 4 * patch_size, 4 * patch_size, 3), np.uint8)
    sound = (rng.standard_normal(12_000) * 0.1).astype(np.float32)
    long_sound = (rng.standard_normal(40_000) * 0.1).astype(np.float32)
    return (
        ("Hello",),
        ("Tell me a story about a dragon. " * 4,),
        (picture, "What is that?"),
        (sound, "What do you hear?"),
        (clip, "What happens?"),
        ("Both: ", other, sound, "And?"),
        (picture, other, "Which?"),
        ("你好! ", long_sound),
    )


class Inputs:
    """What `generate` takes for all questions at once, made as the model's own processor makes it.

    Args:
        folder: the model.
        patch_size: pixels of a patch's side.
        num_audio_tokens: of a sound's spectrogram frames.
        sound_padding: for the feature extractor.
    """

    def __init__(
        self,
        folder: str,
        patch_size: int,
        num_audio_tokens: Callable[[torch.Tensor], torch.Tensor],
        sound_padding: dict[str, Any],
    ) -> None:
        self.questions = questions_for(patch_size)
        self._patch_size = patch_size
        self._num_audio_tokens = num_audio_tokens
        self._sound_padding = sound_padding
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._images: Any = transformers.AutoImageProcessor.from_pretrained(folder)
        self._sound: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)

    def for_generate(self, pixels: str, questions: tuple[tuple[Any, ...], ...]) -> dict[str, Any]:
        """Return the arguments for a batch of questions; `pixels` is what those of pictures are called."""
        parts = [part for question in questions for part in question if not isinstance(part, str)]
        pictures = [Pillow.fromarray(part) for part in parts if part.ndim == 3]
        sounds = [part for part in parts if part.ndim == 1]
        found: dict[str, Any] = {}
        counts: dict[int, Iterator[int]] = {4: iter([2 * 4 * 4 // 4])}
        if pictures:
            seen = self._images(pictures, return_tensors="pt")
            found |= {pixels: seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
            counts[3] = iter((seen["image_grid_thw"].prod(-1) // 4).tolist())
        if sounds:
            features, mask = self._heard(sounds)
            found |= {"input_features": features, "feature_attention_mask": mask}
            counts[1] = iter(self._num_audio_tokens(mask.sum(-1)).tolist())
        for clip in (part for part in parts if part.ndim == 4):
            found[f"{pixels}_videos"] = torch.from_numpy(self._patches(clip))
            found["video_grid_thw"] = torch.tensor([[2, 4, 4]])
            found["video_second_per_grid"] = torch.tensor([2 * 0.5])
        texts = ["".join(self._written(part, counts) for part in question) for question in questions]
        whole = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
        return {**self._tokenizer(whole, return_tensors="pt", padding=True), **found}

    def _heard(self, sounds: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return spectrograms and their masks; each sound is looked at by itself, as where it is the only one."""
        arguments = {"sampling_rate": 16_000, "return_attention_mask": True, "return_tensors": "pt"}
        found = [self._sound([sound], **arguments, **self._sound_padding) for sound in sounds]
        longest = max(each["attention_mask"].shape[1] for each in found)

        def padded(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, longest - values.shape[-1]))

        features = torch.cat([padded(each["input_features"]) for each in found])
        return features, torch.cat([padded(each["attention_mask"]) for each in found])

    def _written(self, part: Any, counts: dict[int, Iterator[int]]) -> str:
        if isinstance(part, str):
            return part
        begin, pad, end = {
            1: ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
            3: ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
            4: ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
        }[part.ndim]
        return begin + pad * next(counts[part.ndim]) + end

    def _patches(self, clip: np.ndarray) -> np.ndarray:
        """Return a clip's patches: the layout of Qwen2-VL's processor, written out for one that needs no resizing."""
        frames = (clip / 255 - np.array(self._images.image_mean)) / np.array(self._images.image_std)
        size = self._patch_size
        split = frames.transpose(0, 3, 1, 2).reshape(2, 2, 3, 2, 2, size, 2, 2, size)
        return split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(32, -1).astype(np.float32)


def to_end(ids: list[int]) -> list[int]:
    """Return a row of a batch without what comes after its end."""
    end = SPECIALS.index("<|im_end|>")
    return ids[: ids.index(end) + 1] if end in ids else ids
