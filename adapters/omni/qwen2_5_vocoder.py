"""Qwen2.5-Omni's token2wav while codes still come: a flow in blocks of spectrogram, then BigVGAN.

The flow looks at whole blocks of 24 spectrogram frames (12 codes), in some layers one block back or one ahead; over
the steps of its solver that adds up, so that strictly each frame depends on all. Here each block is given out once,
solved with `LEFT` blocks before and `RIGHT` after it, from noise that belongs to its place in the stream. What that
changes is tested. BigVGAN is made of convolutions and is cut where it makes no difference
(`adapters.codec_models.field_of`). On a GPU, streams whose pieces are due together are solved together. On a CPU they
take turns: arithmetic limits it, so nothing is lost, and a stream has the same bits in any company.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from adapters.codec_models import CodecModel, CodecStream, Field, field_of
from adapters.omni.qwen2_5_flow import Flow, Voice, Window
from adapters.omni.vocoder import NewCodes, SoundStream, Vocoder
from omni_bus.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

LEFT = 2
"""Blocks before."""

RIGHT = 1
"""Blocks after: 0.24 s of codes that must be there."""

MOST = (2, 2, 4, 8)
"""Blocks of the first pieces and of every further one: the first sounds early, the next is there before it has sounded
if codes come at three times the speed of speech, and the others cost less. Of one block no sound is certain: BigVGAN
looks 30 frames ahead."""

WINDOWS = tuple(min(LEFT, sum(MOST[:index])) + most + RIGHT for index, most in enumerate(MOST))
"""Blocks that are solved for each of these; a stream's last piece is no longer."""

MAX_TOGETHER = 8
"""Windows in one pass of a GPU."""


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
        """Return the samples, of each row."""
        return self.model(latents).reshape(len(latents), 1, -1)


class Qwen25Vocoder(Vocoder):
    """The whole token2wav.

    Args:
        model: transformers' ``Qwen2_5OmniToken2WavModel``, in float32.
        speakers: by name, a vector ``cond`` and a spectrogram ``ref_mel``.

    Raises:
        ValueError: BigVGAN can't be cut.
    """

    def __init__(self, model: Any, speakers: dict[str, dict[str, Any]]) -> None:
        self.model = model
        flow: Any = model.code2wav_dit_model
        self.flow = Flow(flow)
        self._voices = {
            name: self.flow.voice(speaker["cond"].float(), speaker["ref_mel"].float())
            for name, speaker in speakers.items()
        }
        self.bigvgan = BigVgan(model.code2wav_bigvgan_model)
        self.field: Field = field_of(self.bigvgan)
        self.rate_hz = self.bigvgan.rate_hz
        self.frame_rate_hz = self.rate_hz / self.bigvgan.samples_per_frame / self.flow.repeats
        self.num_codebooks = 1
        self.codebook_size = int(flow.config.num_embeds)
        self.has_voices = True
        self.block_codes = int(flow.block_size) // self.flow.repeats
        self.max_together = 1 if flow.device.type == "cpu" else MAX_TOGETHER

    def begin(self, voice: str, seed: int) -> SoundStream:
        """Return a new stream.

        Raises:
            StageFailed: there is no such voice.
        """
        if voice not in self._voices:
            raise StageFailed(f"voice '{voice}' came, the model has {', '.join(self._voices)}")
        return Qwen25Stream(self, self._voices[voice], seed)

    def record(self, most: int) -> None:
        """Have a GPU remember the solver's steps for up to `most` streams at once.

        Raises:
            RuntimeError: something in them can't be recorded.
        """
        frames = self.block_codes * self.flow.repeats
        self.flow.record([blocks * frames for blocks in WINDOWS], min(most, self.max_together))

    def decode(self, news: Sequence[NewCodes]) -> list[torch.Tensor]:
        """Take what came on several streams, each named once; return the samples that are certain of each."""
        import torch

        streams: list[Qwen25Stream] = [new.stream for new in news]
        for new in news:
            new.stream.take(new.codes)
        pieces: list[list[torch.Tensor]] = [[] for _ in news]
        while due := [index for index, new in enumerate(news) if streams[index].is_due(is_last=new.is_last)]:
            spectrograms = self._solve([streams[index].window(is_last=news[index].is_last) for index in due])
            latents: dict[int, torch.Tensor] = {}
            for index, solved in zip(due, spectrograms, strict=True):
                found = streams[index].advance(solved, is_last=news[index].is_last)
                if found is not None:
                    latents[index] = found
            for index, sound in self._sounds(latents).items():
                pieces[index].append(streams[index].sound.cut(sound))
        return [torch.cat(found) if found else torch.zeros(0) for found in pieces]

    def _solve(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Return the windows' spectrograms; those of about the same length are solved in one pass."""
        sizes = [len(window.codes) / self.block_codes for window in windows]
        groups: dict[int, list[int]] = {}
        for index, size in enumerate(sizes):
            groups.setdefault(min(blocks for blocks in WINDOWS if blocks >= size), []).append(index)
        solved: dict[int, torch.Tensor] = {}
        for together in _parts(groups.values(), self.max_together):
            found = self.flow.solve([windows[index] for index in together])
            solved.update(zip(together, found, strict=True))
        return [solved[index] for index in range(len(windows))]

    def _sounds(self, latents: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the sound, (samples,), of latents, (1, bands, frames); those of one length are decoded in one pass."""
        import torch

        groups: dict[int, list[int]] = {}
        for index, found in latents.items():
            groups.setdefault(found.shape[2], []).append(index)
        sounds: dict[int, torch.Tensor] = {}
        for together in _parts(groups.values(), self.max_together):
            made = self.bigvgan.sound(torch.cat([latents[index] for index in together]))
            sounds.update(zip(together, made[:, 0], strict=True))
        return sounds


def _parts(groups: Iterable[list[int]], most: int) -> list[list[int]]:
    """Return groups in parts of at most so many."""
    return [group[at : at + most] for group in groups for at in range(0, len(group), most)]


class Qwen25Stream(SoundStream):
    """One stream: codes gather to blocks, solved blocks go to BigVGAN."""

    def __init__(self, vocoder: Qwen25Vocoder, voice: Voice, seed: int) -> None:
        import torch

        self._vocoder = vocoder
        self._voice = voice
        # On the CPU whatever the device is, so that a seed gives the same noise everywhere.
        self._generator = torch.Generator().manual_seed(seed)
        self._codes = torch.zeros(0, dtype=torch.long, device=voice.vector.device)
        self._noise = torch.zeros(0, vocoder.flow.bands, device=voice.vector.device)
        """Both from `_first` on."""
        self._first = 0
        """The first block that is still needed."""
        self._num_solved = 0
        """Blocks whose spectrogram was given to BigVGAN."""
        self._num_pieces = 0
        self.sound = CodecStream(vocoder.bigvgan, vocoder.field)

    def decode(self, codes: torch.Tensor | None, *, is_last: bool) -> torch.Tensor:
        """Take the next codes, (frames, 1), and return the samples that are certain: (samples,)."""
        return self._vocoder.decode([NewCodes(self, codes, is_last)])[0]

    def take(self, codes: torch.Tensor | None) -> None:
        """Take the next codes, (frames, 1)."""
        import torch

        if codes is not None:
            self._codes = torch.cat([self._codes, codes[:, 0]])

    @property
    def _num_left(self) -> int:
        """Codes that are not solved."""
        return len(self._codes) - (self._num_solved - self._first) * self._vocoder.block_codes

    @property
    def _num_blocks(self) -> int:
        """Blocks of the next piece, unless it is the last."""
        return MOST[min(self._num_pieces, len(MOST) - 1)]

    @property
    def num_missing(self) -> int:
        """Codes that must come before the next piece can be solved."""
        return (self._num_blocks + RIGHT) * self._vocoder.block_codes - self._num_left

    def is_due(self, *, is_last: bool) -> bool:
        """Return whether the next piece can be solved."""
        return self._num_left > 0 if is_last else self.num_missing <= 0

    def window(self, *, is_last: bool) -> Window:
        """Return the codes of the next piece with what stands around them."""
        size, repeats = self._vocoder.block_codes, self._vocoder.flow.repeats
        drop = max(0, self._num_solved - LEFT - self._first)
        self._codes, self._noise = self._codes[drop * size :], self._noise[drop * size * repeats :]
        self._first += drop
        end = (self._num_solved - self._first + self._num_blocks + RIGHT) * size
        codes = self._codes[:end]
        return Window(codes, self._noise_for(len(codes) * repeats), self._voice)

    def advance(self, solved: torch.Tensor, *, is_last: bool) -> torch.Tensor | None:
        """Take the spectrogram of `window`, (bands, frames).

        Returns:
            What to make sound of, and to give `sound.cut` the sound of; None while no more of it is certain.
        """
        size, repeats = self._vocoder.block_codes, self._vocoder.flow.repeats
        num_blocks = self._num_blocks
        is_end = is_last and self._num_left <= (num_blocks + RIGHT) * size
        if is_end:
            num_blocks += RIGHT
        begin = (self._num_solved - self._first) * size
        self._num_solved += num_blocks
        self._num_pieces += 1
        piece = solved[None, :, begin * repeats : (begin + num_blocks * size) * repeats]
        return self.sound.take(piece, is_last=is_end)

    def _noise_for(self, num_frames: int) -> torch.Tensor:
        """Return noise for the first frames from `_first` on; more of it is drawn where there is too little."""
        import torch

        missing = num_frames - len(self._noise)
        if missing > 0:
            new = torch.randn(missing, self._vocoder.flow.bands, generator=self._generator)
            self._noise = torch.cat([self._noise, new.to(self._noise.device)])
        return self._noise[:num_frames]
