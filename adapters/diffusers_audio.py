"""Sound and music from text with diffusers' audio pipelines: Stable Audio, AudioLDM 2, MusicLDM, ACE-Step and the like.

What a pipeline's call takes says what a request may set. Stable Audio Open's own scheduler needs ``torchsde``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.diffusers_engine import DenoisingParams, DiffusersEngine, DiffusersOptions
from adapters.sound import pcm16
from omni_bus.errors import BadInput, StageFailed
from omni_bus.wire.payloads import Audio, Blob, Payload

if TYPE_CHECKING:
    from omni_bus.engine import Context

Seconds = Annotated[float, Meta(gt=0, le=3600)]

LENGTHS = ("audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s", "duration")
"""What pipelines call the length in seconds; the first is the end of a window."""


class AudioOptions(DiffusersOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    max_audio_length: Seconds = 300.0
    """Seconds that a request may ask for; less where the model can do less."""


class AudioParams(DenoisingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    audio_length: Seconds | None = None
    """Seconds of sound; None takes the pipeline's own."""
    audio_start: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Where in the piece the sound begins, in seconds; without a length it means nothing."""


class DiffusersAudio(DiffusersEngine):
    """A description in, PCM out: s16 at the model's rate, with the model's channels."""

    name: ClassVar[str] = "diffusers-audio"
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    Options: ClassVar[type[msgspec.Struct]] = AudioOptions
    Params: ClassVar[type[msgspec.Struct]] = AudioParams

    def __init__(self, options: AudioOptions, context: Context) -> None:
        super().__init__(options, context)
        self._rate_hz = 0
        self._length = ""
        self._longest = options.max_audio_length

    def examine(self, pipeline: Any, takes: frozenset[str]) -> None:
        """Find the pipeline's rate, what it calls the length, and the longest sound that it makes."""
        self._length = next((name for name in LENGTHS if name in takes), "")
        self._rate_hz = _rate_of(pipeline)
        if not self._length or not self._rate_hz:
            raise ValueError(f"{type(pipeline).__name__} makes no sound")
        if self._length == "audio_end_in_s":
            # It always computes this much and cuts a window out.
            window = pipeline.transformer.config.sample_size * pipeline.vae.hop_length / self._rate_hz
            self._longest = min(self._longest, window)
        # LongCat makes no longer ones, whatever is asked for.
        self._longest = min(self._longest, getattr(pipeline, "max_wav_duration", self._longest))

    def arguments(self, params: AudioParams) -> dict[str, Any]:
        """Return the window."""
        if params.audio_length is None:
            return {}
        if params.audio_start and self._length != "audio_end_in_s":
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
        start = {"audio_start_in_s": params.audio_start} if self._length == "audio_end_in_s" else {}
        return {self._length: end} | start

    def payloads(self, output: Any) -> list[tuple[str, Payload]]:
        """Return the sound in pieces of a second."""
        import numpy as np
        import torch

        sound = torch.as_tensor(output.audios)[0].float().cpu().numpy()  # (channels, samples) or (samples,)
        if not np.isfinite(sound).all():
            raise StageFailed("the model computed samples that aren't finite")
        whole = pcm16(np.atleast_2d(sound).T, self._rate_hz)
        view, size = whole.data.view, 2 * whole.channels * self._rate_hz
        return [
            ("audio", Audio(self._rate_hz, whole.channels, "s16", Blob(view[at : at + size])))
            for at in range(0, len(view), size)
        ]


def _rate_of(pipeline: Any) -> int:
    """Return the rate in Hz of what comes out last: a vocoder's or else a VAE's; 0 where neither has one."""
    for part in (getattr(pipeline, "vocoder", None), getattr(pipeline, "vae", None)):
        config = getattr(part, "config", None)
        for name in ("sampling_rate", "sample_rate"):
            if rate := getattr(config, name, 0):
                return int(rate)
    return 0
