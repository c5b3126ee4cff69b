"""A vocoder: codes to sound, piece by piece, the same whatever pieces they came in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class SoundStream(ABC):
    """One stream of codes becoming sound."""

    @property
    @abstractmethod
    def num_missing(self) -> int:
        """Frames that must come before more sound is certain."""

    @abstractmethod
    def decode(self, codes: torch.Tensor | None, *, is_last: bool) -> torch.Tensor:
        """Take the next frames, (frames, codebooks), and return the samples that are certain: (samples,)."""


class NewCodes(NamedTuple):
    """What came on one stream."""

    stream: Any
    """Of the vocoder that is asked."""
    codes: torch.Tensor | None
    """(frames, codebooks)."""
    is_last: bool


class Vocoder(ABC):
    """One loaded vocoder."""

    model: Any
    rate_hz: int
    frame_rate_hz: float
    num_codebooks: int
    codebook_size: int
    has_voices: bool
    """Whether a stream needs to know the voice."""
    max_together: int = 1
    """Streams in one `decode`, of which all sound when the last one does."""

    @abstractmethod
    def begin(self, voice: str, seed: int) -> SoundStream:
        """Return a new stream.

        Raises:
            StageFailed: it knows no such voice.
        """

    def decode(self, news: Sequence[NewCodes]) -> list[torch.Tensor]:
        """Take what came on several streams, each named once; return the samples that are certain of each."""
        return [new.stream.decode(new.codes, is_last=new.is_last) for new in news]

    def record(self, most: int) -> None:
        """Have a GPU remember the passes for up to `most` streams; by default nothing is remembered."""
        del most
