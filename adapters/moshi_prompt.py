"""Who Moshi is and how it sounds: what is put into its streams before a conversation.

As PersonaPlex (NVIDIA, on Moshi's architecture) was trained: first an example of the voice in the model's stream of
sound, then the instructions in its stream of text, a token a frame, while it is silent; half a second of silence after
each. The user's stream holds a tone all the while, which says that this is no conversation yet.
"""

from __future__ import annotations

import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adapters.sound import mono, resampled
from omni_bus.errors import BadInput, StartFailed, unknown_name
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    import torch

    from adapters.sound import Waveform

SUFFIX = ".wav"

PAUSE = 3
"""The text token of a frame in which nothing is written (moshi 0.2.13)."""

TAG = "<system>"
"""Before and after instructions (PersonaPlex)."""

TONE_HZ = 440
SILENCE_S = 0.5
SETTLE_S = 1.0
"""After so long the codec's codes of silence, and of the tone, are typical."""


class Frames(NamedTuple):
    """What is primed, on the CPU."""

    text: torch.Tensor
    """Tokens, (frames,)."""
    said: torch.Tensor
    """The model's codes, (frames, codebooks)."""


def voice_names(folder: str | None) -> tuple[str, ...]:
    """Return the voices in a folder: its WAV files without their ending."""
    if folder is None:
        return ()
    return tuple(sorted(path.stem for path in Path(folder).expanduser().glob(f"*{SUFFIX}")))


def voice_problems(folder: str | None) -> list[str]:
    """Return what is wrong with a folder of voices and can be seen without reading them."""
    if folder is None or voice_names(folder):
        return []
    return [f"voices: '{folder}' is no folder with WAV files in it (allowed: one, a voice's example in each)"]


class Prompts:
    """Makes what is primed.

    Args:
        codec: a `MimiModel`.
        num_codebooks: of the model.
        tokenizer: of the model.
        folder: of the voices, or None.
        max_frames: that one prompt may have.

    Raises:
        StartFailed: a voice can't be read, or is too long.
    """

    def __init__(self, codec: Any, num_codebooks: int, tokenizer: Any, folder: str | None, max_frames: int) -> None:
        import numpy as np

        config = codec.config
        self._codec = codec
        self._num_codebooks = num_codebooks
        self._tokenizer = tokenizer
        self._max_frames = max_frames
        self._rate_hz = int(config.sampling_rate)
        self._frame_s = int(config.frame_size) / self._rate_hz
        times = np.arange(int(SETTLE_S * self._rate_hz), dtype=np.float32) / np.float32(self._rate_hz)
        self._silence = self._encoded(np.zeros(len(times), np.float32))[-1]
        self.tone = self._encoded((np.sin(2 * np.pi * TONE_HZ * times) / 2).astype(np.float32))[-1]
        """The user's codes while a prompt is primed, (codebooks,)."""
        self._voices = {name: self._voice(Path(str(folder)).expanduser(), name) for name in voice_names(folder)}

    def of(self, instructions: str | None, voice: str | None) -> Frames | None:
        """Return what is primed; None for nothing.

        Raises:
            BadInput: a voice that isn't there, or more than the model can look back on.
        """
        import torch

        parts: list[Frames] = []
        if voice is not None:
            if voice not in self._voices:
                raise unknown_name("voice", voice, self._voices, field="voice")
            parts.append(self._spoken(self._voices[voice]))
        if instructions is not None and (words := instructions.strip()):
            tagged = words if words.startswith(TAG) and words.endswith(TAG) else f"{TAG} {words} {TAG}"
            tokens = self._tokenizer.encode(tagged, add_special_tokens=False)
            parts.append(self._written(tokens))
        if not parts:
            return None
        frames = Frames(torch.cat([part.text for part in parts]), torch.cat([part.said for part in parts]))
        if len(frames.text) > self._max_frames:
            raise BadInput(
                f"instructions: with the voice they take {len(frames.text)} frames (allowed: {self._max_frames}, a "
                "token of text or 80 ms of the voice each)",
                field="instructions",
            )
        return frames

    def _spoken(self, voice: torch.Tensor) -> Frames:
        import torch

        said = torch.cat([voice, self._silence.expand(self._num_silent, -1)])
        return Frames(torch.full((len(said),), PAUSE), said)

    def _written(self, tokens: list[int]) -> Frames:
        import torch

        text = torch.tensor([*tokens, *[PAUSE] * self._num_silent])
        return Frames(text, self._silence.expand(len(text), -1))

    @property
    def _num_silent(self) -> int:
        return int(SILENCE_S / self._frame_s)

    def _voice(self, folder: Path, name: str) -> torch.Tensor:
        path = folder / f"{name}{SUFFIX}"
        try:
            samples = _read(path, self._rate_hz)
        except (OSError, EOFError, wave.Error) as error:
            raise StartFailed(f"voices: '{path}' can't be read: {error}", field="voices") from error
        allowed_s = self._max_frames / 2 * self._frame_s
        if not self._frame_s <= len(samples) / self._rate_hz <= allowed_s:
            seconds = len(samples) / self._rate_hz
            raise StartFailed(
                f"voices: '{path}' has {seconds:.2f} s of sound (allowed: {self._frame_s:g} to {allowed_s:g} s)",
                field="voices",
            )
        return self._encoded(samples)

    def _encoded(self, samples: Waveform) -> torch.Tensor:
        """Return the codes of the frames that are whole, (frames, codebooks)."""
        import torch

        codec = self._codec
        num_whole = int(len(samples) / self._rate_hz / self._frame_s) * int(codec.config.frame_size)
        sound = torch.from_numpy(samples[:num_whole])[None, None].to(codec.device, codec.dtype)
        with torch.inference_mode():
            codes = codec.encode(sound, num_quantizers=self._num_codebooks).audio_codes
        return codes[0].transpose(0, 1).cpu()


def _read(path: Path, rate_hz: int) -> Waveform:
    """Return a WAV file's samples at this rate, (samples,), float32 in [-1, 1].

    Raises:
        wave.Error: its samples are not of 16 bits.
    """
    with wave.open(str(path), "rb") as file:
        if file.getsampwidth() != 2:
            raise wave.Error(f"samples of {8 * file.getsampwidth()} bits (allowed: 16)")
        sound = Audio(file.getframerate(), file.getnchannels(), "s16", Blob(file.readframes(file.getnframes())))
    return resampled(mono(sound), sound.rate_hz, rate_hz)
