"""Qwen2.5-Omni's token2wav while codes still come: a flow in blocks of spectrogram, then BigVGAN.

The flow looks at whole blocks of 24 spectrogram frames (12 codes), in some layers one block back or one ahead; over
the steps of its solver that adds up, so that strictly each frame depends on all. Here each block is given out once,
solved with `LEFT` blocks before and `RIGHT` after it, from noise that belongs to its place in the stream. What that
changes is tested. BigVGAN is made of convolutions and is cut where it makes no difference
(`adapters.codec_models.field_of`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from adapters.codec_models import CodecModel, CodecStream, Field, field_of
from adapters.omni.vocoder import SoundStream, Vocoder
from omni_bus.errors import StageFailed

if TYPE_CHECKING:
    import torch

LEFT = 2
"""Blocks before."""

RIGHT = 1
"""Blocks after: 0.24 s of codes that must be there."""

MOST = (1, 2, 4, 8)
"""Blocks of the first pieces and of every further one, so that the first sounds early and the others cost less."""

NUM_STEPS = 10
GUIDANCE = 0.5
SWAY = -1.0
"""The published solver: points in time, weight of guidance, and how far the points lean to the beginning."""


class BigVgan(CodecModel):
    """The second part as `CodecStream` cuts it; its latents are spectrogram frames, which come as they are."""

    @property
    def rate_hz(self) -> int:
        """Of the sound."""
        return 24_000

    @property
    def num_codebooks(self) -> int:
        """Bands of the spectrogram."""
        return int(self.model.config.mel_dim)

    @property
    def samples_per_frame(self) -> int:
        """Samples of one spectrogram frame."""
        return math.prod(self.model.config.upsample_rates)

    def latents(self, memory: Any, codes: torch.Tensor) -> torch.Tensor:
        """Return spectrogram frames, (1, bands, frames), as they are."""
        del memory
        return codes.to(self.model.dtype)

    def sound(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the samples."""
        return self.model(latents).reshape(1, 1, -1)


class Qwen25Vocoder(Vocoder):
    """The whole token2wav.

    Args:
        model: transformers' ``Qwen2_5OmniToken2WavModel``, in float32.
        speakers: by name, a vector ``cond`` and a spectrogram ``ref_mel``.

    Raises:
        StartFailed: BigVGAN can't be cut.
    """

    def __init__(self, model: Any, speakers: dict[str, dict[str, Any]]) -> None:
        self.model = model
        self._speakers = speakers
        self.flow: Any = model.code2wav_dit_model
        self.bigvgan = BigVgan(model.code2wav_bigvgan_model)
        self.field: Field = field_of(self.bigvgan)
        self.rate_hz = self.bigvgan.rate_hz
        self.frame_rate_hz = self.rate_hz / self.bigvgan.samples_per_frame / self.flow.repeats
        self.num_codebooks = 1
        self.codebook_size = int(self.flow.config.num_embeds)
        self.has_voices = True
        self.block_codes = int(self.flow.block_size) // int(self.flow.repeats)

    def begin(self, voice: str, seed: int) -> SoundStream:
        """Return a new stream.

        Raises:
            StageFailed: there is no such voice.
        """
        if voice not in self._speakers:
            raise StageFailed(f"voice '{voice}' came, the model has {', '.join(self._speakers)}")
        speaker = self._speakers[voice]
        return Qwen25Stream(self, speaker["cond"].float(), speaker["ref_mel"].float(), seed)

    def solve(
        self, codes: torch.Tensor, noise: torch.Tensor, condition: torch.Tensor, reference: torch.Tensor
    ) -> torch.Tensor:
        """Return the spectrogram of codes.

        Args:
            codes: (1, codes).
            noise: (1, frames, bands).
            condition: the voice's vector, (1, width).
            reference: the voice's spectrogram, (1, frames, bands).

        Returns:
            (1, bands, frames).
        """
        import torch
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

        conditions = condition[:, None].expand(-1, noise.shape[1], -1)

        def slope(time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            both = self.flow(
                hidden_states=state,
                condition_vector=reference,
                speaker_embedding=conditions,
                quantized_code=codes,
                time_step=time,
                apply_cfg=True,
            )
            guided, free = both.chunk(2)
            return guided + GUIDANCE * (guided - free)

        times = torch.linspace(0, 1, NUM_STEPS, device=noise.device)
        times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        return RungeKutta4ODESolver(slope, noise).integrate(times)[-1].transpose(1, 2)


class Qwen25Stream(SoundStream):
    """One stream: codes gather to blocks, solved blocks go to BigVGAN."""

    def __init__(self, vocoder: Qwen25Vocoder, condition: torch.Tensor, reference: torch.Tensor, seed: int) -> None:
        import torch

        self._vocoder = vocoder
        self._condition = condition
        self._reference = reference
        # On the CPU whatever the device is, so that a seed gives the same noise everywhere.
        self._generator = torch.Generator().manual_seed(seed)
        self._codes: torch.Tensor | None = None
        self._noise: torch.Tensor | None = None
        """Both from `_first` on."""
        self._first = 0
        """The first block that is still needed."""
        self._num_solved = 0
        """Blocks whose spectrogram was given to BigVGAN."""
        self._num_pieces = 0
        self._sound = CodecStream(vocoder.bigvgan, vocoder.field)

    def decode(self, codes: torch.Tensor | None, *, is_last: bool) -> torch.Tensor:
        """Take the next codes, (frames, 1), and return the samples that are certain: (samples,)."""
        import torch

        size = self._vocoder.block_codes
        if codes is not None:
            new = codes[:, 0]
            self._codes = new if self._codes is None else torch.cat([self._codes, new])
        pieces: list[torch.Tensor] = []
        while self._codes is not None:
            num_left = self._first * size + len(self._codes) - self._num_solved * size
            num_blocks = MOST[min(self._num_pieces, len(MOST) - 1)]
            if num_left <= 0 or (num_left < (num_blocks + RIGHT) * size and not is_last):
                break
            pieces.append(self._sound.decode(self._solve_next(num_blocks), is_last=False))
        if is_last:
            pieces.append(self._sound.decode(None, is_last=True))
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def _solve_next(self, num_blocks: int) -> torch.Tensor:
        """Return the spectrogram of the next blocks, or what there is of them: (1, bands, frames)."""
        assert self._codes is not None
        vocoder = self._vocoder
        size = vocoder.block_codes
        drop = max(0, self._num_solved - LEFT - self._first)
        repeats = int(vocoder.flow.repeats)
        if drop:
            self._codes = self._codes[drop * size :]
            if self._noise is not None:
                self._noise = self._noise[:, drop * size * repeats :]
            self._first += drop
        begin = (self._num_solved - self._first) * size
        codes = self._codes[: begin + (num_blocks + RIGHT) * size]
        noise = self._noise_for(len(codes) * repeats)
        solved = vocoder.solve(codes[None], noise, self._condition, self._reference)
        self._num_solved += num_blocks
        self._num_pieces += 1
        return solved[:, :, begin * repeats : (begin + num_blocks * size) * repeats]

    def _noise_for(self, num_frames: int) -> torch.Tensor:
        """Return noise for the first frames from `_first` on; more of it is drawn where there is too little."""
        import torch

        device, bands = self._condition.device, int(self._vocoder.flow.mel_dim)
        known = 0 if self._noise is None else self._noise.shape[1]
        if num_frames > known:
            new = torch.randn(1, num_frames - known, bands, generator=self._generator).to(device)
            self._noise = new if self._noise is None else torch.cat([self._noise, new], dim=1)
        assert self._noise is not None
        return self._noise[:, :num_frames]
