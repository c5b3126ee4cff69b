"""Qwen3-Omni's code2wav while codes still come: a transformer that looks back, then causal convolutions.

The transformer keeps its keys and values from piece to piece; the convolutions are cut where it makes no difference
(`adapters.codec_models.field_of`). What comes out is what the model makes of all codes at once. Its own
``chunked_decode`` is another thing: it forgets all but 25 frames at every 300, and loses the end of each chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.codec_models import CodecModel, CodecStream, field_of
from adapters.omni.vocoder import SoundStream, Vocoder
from adapters.packed_batch import cache_argument

if TYPE_CHECKING:
    import torch

RATE_HZ = 24_000

NUM_FRAMES = (4, 8, 16)
"""Frames of the first, the second and every further piece, so that the first sounds early and the others cost less."""


class Qwen3Code2Wav(CodecModel):
    """The vocoder as `CodecStream` cuts it; its latents are what the transformer makes of frames."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._cache_argument = cache_argument(model.pre_transformer)
        self.num_lost = 0
        """Samples that the convolutions cut off at the end of whatever they are given."""

    @property
    def rate_hz(self) -> int:
        """Of the sound."""
        return RATE_HZ

    @property
    def num_codebooks(self) -> int:
        """Codes of one frame."""
        return int(self.model.config.num_quantizers)

    @property
    def samples_per_frame(self) -> int:
        """Samples of one frame."""
        return int(self.model.total_upsample)

    def begin(self) -> Any:
        """Return the transformer's memory of a new stream."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.pre_transformer.config)

    def latents(self, memory: Any, codes: torch.Tensor) -> torch.Tensor:
        """Return what the transformer makes of the next frames, after those before."""
        hidden = self.model.code_embedding(codes + self.model.code_offset).mean(1)
        found = self.model.pre_transformer(inputs_embeds=hidden, use_cache=True, **{self._cache_argument: memory})
        return found.last_hidden_state.transpose(1, 2)

    def sound(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the samples of latents, with zeros for those that are lost at the end."""
        import torch

        hidden = latents
        for blocks in self.model.upsample:
            for block in blocks:
                hidden = block(hidden)
        for block in self.model.decoder:
            hidden = block(hidden)
        self.num_lost = latents.shape[2] * self.samples_per_frame - hidden.shape[2]
        return torch.nn.functional.pad(hidden.clamp(min=-1, max=1), (0, self.num_lost))


class Qwen3Vocoder(Vocoder):
    """The whole vocoder.

    Args:
        model: transformers' ``Qwen3OmniMoeCode2Wav``.

    Raises:
        ValueError: it can't be cut.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.codec = Qwen3Code2Wav(model)
        self.field = field_of(self.codec)
        self.rate_hz = RATE_HZ
        self.frame_rate_hz = self.codec.frame_rate_hz
        self.num_codebooks = self.codec.num_codebooks
        self.codebook_size = self.codec.codebook_size
        self.has_voices = False

    def begin(self, voice: str, seed: int) -> SoundStream:
        """Return a new stream."""
        del voice, seed
        return Qwen3Stream(self)


class Qwen3Stream(SoundStream):
    """One stream: frames gather to pieces."""

    def __init__(self, vocoder: Qwen3Vocoder) -> None:
        self._codec = vocoder.codec
        self._sound = CodecStream(vocoder.codec, vocoder.field)
        self._waiting: torch.Tensor | None = None
        self._num_pieces = 0

    @property
    def num_missing(self) -> int:
        """Frames that must come before the next piece is whole."""
        return self._size - (0 if self._waiting is None else len(self._waiting))

    @property
    def _size(self) -> int:
        return NUM_FRAMES[min(self._num_pieces, len(NUM_FRAMES) - 1)]

    def decode(self, codes: torch.Tensor | None, *, is_last: bool) -> torch.Tensor:
        """Take the next frames, (frames, codebooks), and return the samples that are certain: (samples,)."""
        import torch

        if codes is not None:
            self._waiting = codes if self._waiting is None else torch.cat([self._waiting, codes])
        pieces: list[torch.Tensor] = []
        while self._waiting is not None and len(self._waiting):
            size = self._size
            if len(self._waiting) < size and not is_last:
                break
            pieces.append(self._sound.decode(self._waiting[:size].T[None], is_last=False))
            self._waiting = self._waiting[size:]
            self._num_pieces += 1
        if is_last:
            rest = self._sound.decode(None, is_last=True)
            pieces.append(rest[: len(rest) - self._codec.num_lost] if self._num_pieces else rest)
        return torch.cat(pieces) if pieces else torch.zeros(0)
