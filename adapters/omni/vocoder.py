"""A vocoder: codes to sound, piece by piece, the same whatever pieces they came in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class SoundStream(ABC):
    """One stream of codes becoming sound."""

    @abstractmethod
    def decode(self, codes: torch.Tensor | None, *, is_last: bool) -> torch.Tensor:
        """Take the next frames, (frames, codebooks), and return the samples that are certain: (samples,)."""


class Vocoder(ABC):
    """One loaded vocoder."""

    model: Any
    rate_hz: int
    frame_rate_hz: float
    num_codebooks: int
    codebook_size: int
    has_voices: bool
    """Whether a stream needs to know the voice."""

    @abstractmethod
    def begin(self, voice: str, seed: int) -> SoundStream:
        """Return a new stream.

        Raises:
            StageFailed: it knows no such voice.
        """
