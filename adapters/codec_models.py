"""Decoders of transformers' audio codecs, as two parts: codes to latents with a memory, latents to sound without one.

The second part is made of convolutions, so a piece of sound depends on a few latents around it only; `field_of` finds
how many. With these beside it, a piece comes out as it does when everything is decoded at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

PROBES = (64, 512)
"""Latents that are decoded to find the field; the second if it is wider than half of the first."""


class Field(NamedTuple):
    """Latents before and after one that its sound depends on."""

    left: int
    right: int


class CodecModel(ABC):
    """One loaded codec.

    Args:
        model: the codec.
    """

    latents_per_frame: int = 1

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def rate_hz(self) -> int:
        """Of the sound."""
        return int(self.model.config.sampling_rate)

    @property
    @abstractmethod
    def num_codebooks(self) -> int:
        """Codes of one frame, at most."""

    @property
    def codebook_size(self) -> int:
        """Codes are below this."""
        return int(self.model.config.codebook_size)

    @property
    @abstractmethod
    def samples_per_frame(self) -> int:
        """Samples of one frame."""

    @property
    def frame_rate_hz(self) -> float:
        """Frames of one second."""
        return self.rate_hz / self.samples_per_frame

    def begin(self) -> Any:
        """Return the memory of a new stream."""
        return None

    @abstractmethod
    def latents(self, memory: Any, codes: torch.Tensor) -> torch.Tensor:
        """Return the latents (1, width, time) of the next frames' codes (1, codebooks, frames)."""

    @abstractmethod
    def sound(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the samples (1, 1, samples) of latents."""


class Dac(CodecModel):
    """Descript's codec; what comes later plays a part as well, so its sound is a little late."""

    @property
    def num_codebooks(self) -> int:
        """Codes of one frame, at most."""
        return int(self.model.config.n_codebooks)

    @property
    def samples_per_frame(self) -> int:
        """Samples of one frame."""
        return int(self.model.config.hop_length)

    def latents(self, memory: Any, codes: torch.Tensor) -> torch.Tensor:
        """Return the sum of the codebooks' vectors."""
        return self.model.quantizer.from_codes(codes)[0]

    def sound(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the samples of latents."""
        return self.model.decoder(latents)


class Xcodec(CodecModel):
    """X-Codec: one vector for meaning and sound, of which a part is read by a Dac's decoder."""

    @property
    def rate_hz(self) -> int:
        """Of the sound."""
        return int(self.model.config.sample_rate)

    @property
    def num_codebooks(self) -> int:
        """Codes of one frame, at most."""
        return int(self.model.config.num_quantizers)

    @property
    def samples_per_frame(self) -> int:
        """Samples of one frame."""
        return int(self.model.config.hop_length)

    def latents(self, memory: Any, codes: torch.Tensor) -> torch.Tensor:
        """Return the part of the codebooks' sum that sound is made of."""
        quantised = self.model.quantizer.decode(codes.transpose(0, 1))
        return self.model.fc2(quantised.transpose(1, 2)).transpose(1, 2)

    def sound(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the samples of latents."""
        return self.model.acoustic_decoder(latents)


class Mimi(CodecModel):
    """Kyutai's codec; a transformer that looks back stands between codes and convolutions, all of them causal."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        decoder: Any = getattr(model, "decoder", None)
        if getattr(decoder, "decoder_seanet", None) is None or decoder.upsample is None:
            raise ValueError("its parts are not those that transformers 5.24 gives it")
        self.latents_per_frame = int(decoder.upsample.conv.stride[0])

    @property
    def num_codebooks(self) -> int:
        """Codes of one frame, at most."""
        return int(self.model.config.num_quantizers)

    @property
    def samples_per_frame(self) -> int:
        """Samples of one frame."""
        return round(self.rate_hz / float(self.model.config.frame_rate))

    def begin(self) -> _MimiMemory:
        """Return the memory of a new stream."""
        from transformers import DynamicCache

        return _MimiMemory(DynamicCache(config=self.model.decoder.config))

    def latents(self, memory: _MimiMemory, codes: torch.Tensor) -> torch.Tensor:
        """Return what the transformer makes of the next frames, after those before."""
        import torch

        decoder = self.model.decoder
        quantised = self.model.quantizer.decode(codes)
        # Each upsampled frame overlaps with the one before it and with no other.
        joined = quantised if memory.last is None else torch.cat([memory.last, quantised], dim=2)
        known = 0 if memory.last is None else self.latents_per_frame
        memory.last = quantised[:, :, -1:]
        hidden = decoder.upsample(joined)[:, :, known:].transpose(1, 2)
        found = decoder.decoder_transformer(hidden, cache=memory.cache, use_cache=True)
        return found.last_hidden_state.transpose(1, 2)

    def sound(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the samples of latents."""
        return self.model.decoder.decoder_seanet(latents)


class _MimiMemory:
    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.last: torch.Tensor | None = None
        """The last frame's vector."""


CODEC_MODELS: dict[str, type[CodecModel]] = {
    "dac": Dac,
    "higgs_audio_v2_tokenizer": Xcodec,  # transformers loads it only where torchaudio is
    "mimi": Mimi,
    "xcodec": Xcodec,
}
"""By ``model_type`` of a checkpoint's ``config.json``."""


def field_of(codec: CodecModel) -> Field:
    """Return how far a latent's sound depends on the latents around it.

    Found by differentiating: latents that the sound does not depend on have no gradient, whatever the weights.

    Raises:
        ValueError: further than the longest of `PROBES` shows, or its sound has another length than its latents say.
    """
    import torch

    samples = codec.samples_per_frame // codec.latents_per_frame
    frame = torch.zeros(1, codec.num_codebooks, 1, dtype=torch.long, device=codec.model.device)
    with torch.inference_mode():
        width = codec.latents(codec.begin(), frame).shape[1]
    for num_latents in PROBES:
        generator = torch.Generator().manual_seed(0)
        # Small ones, so that no activation is saturated and hides what stands behind it.
        small = torch.randn(1, width, num_latents, generator=generator) / 100
        latents = small.to(frame.device, codec.model.dtype)
        latents.requires_grad_()
        sound = codec.sound(latents)
        if sound.shape != (1, 1, num_latents * samples):
            raise ValueError(f"{num_latents} latents gave sound of shape {tuple(sound.shape)}")
        middle = num_latents // 2
        [gradient] = torch.autograd.grad(sound[..., middle * samples : (middle + 1) * samples].sum(), latents)
        touched = gradient.abs().sum(dim=(0, 1)).nonzero().flatten().tolist()
        if touched and touched[0] > 0 and touched[-1] < num_latents - 1:
            return Field(middle - touched[0], touched[-1] - middle)
    raise ValueError("its sound depends on all that came before")


class CodecStream:
    """One stream of codes becoming sound, piece by piece.

    Args:
        codec: the codec.
        field: its field.
    """

    def __init__(self, codec: CodecModel, field: Field) -> None:
        self._codec = codec
        self._field = field
        self._memory = codec.begin()
        self._latents: torch.Tensor | None = None
        """Those that sound to come depends on."""
        self._first = 0
        """The index of the first of them in the whole stream."""
        self._num_done = 0
        """Latents whose sound was given out."""
        self._num_ready = 0
        """Latents whose sound can be."""

    def decode(self, codes: torch.Tensor | None, *, is_last: bool) -> torch.Tensor:
        """Take the next frames' codes (1, codebooks, frames) and return the samples that are certain: (samples,)."""
        import torch

        latents = self.take(codes, is_last=is_last)
        return torch.zeros(0) if latents is None else self.cut(self._codec.sound(latents)[0, 0])

    def take(self, codes: torch.Tensor | None, *, is_last: bool) -> torch.Tensor | None:
        """Take the next frames' codes, (1, codebooks, frames), and return what to make sound of.

        Returns:
            Latents, (1, width, time), whose sound `cut` is to be given; None while no more of it is certain.
        """
        import torch

        if codes is not None:
            new = self._codec.latents(self._memory, codes)
            self._latents = new if self._latents is None else torch.cat([self._latents, new], dim=2)
        if self._latents is None:
            return None
        end = self._first + self._latents.shape[2]
        self._num_ready = end if is_last else max(self._num_done, end - self._field.right)
        return None if self._num_ready == self._num_done else self._latents

    def cut(self, sound: torch.Tensor) -> torch.Tensor:
        """Return what is certain and new, (samples,), of the sound of the latents that `take` returned, (samples,)."""
        assert self._latents is not None
        samples = self._codec.samples_per_frame // self._codec.latents_per_frame
        piece = sound[(self._num_done - self._first) * samples : (self._num_ready - self._first) * samples]
        keep = max(self._first, self._num_ready - self._field.left)
        self._latents = self._latents[:, :, keep - self._first :]
        self._first, self._num_done = keep, self._num_ready
        return piece
