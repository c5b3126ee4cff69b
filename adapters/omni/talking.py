"""A talker: how it begins on a thinker's prompt, what it takes for each code, and what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from adapters.packed_decoder import PackedDecoder
    from adapters.token_choice import TokenChoice


class Beginning(NamedTuple):
    """What a talker reads before its first code."""

    embeddings: torch.Tensor
    """(tokens, width of the decoder)."""
    positions: torch.Tensor
    """(3, tokens): in time, height and width."""
    rows: torch.Tensor | None = None
    """What it reads of the thinker after that, before rows that haven't come yet: (rows, width)."""


class TalkerModel(ABC):
    """One loaded talker.

    What it is given of the thinker are rows, (width,): one for each token of the prompt, and one for each token of the
    reply but the last. After the prompt and the first row of the reply it says its first code; each code after that
    takes one more row, then `end`, then `pad` for as long as it speaks.
    """

    model: Any
    decoder: PackedDecoder
    context_length: int
    num_codebooks: int
    frame_rate_hz: float
    voices: Sequence[str]
    history: tuple[int, ...]
    """Codes that count as said before, for the repetition penalty."""
    ends: frozenset[int]
    """Codes that end the speech."""
    suppressed: torch.Tensor
    """Codes that are never said, of all of `head`'s: bool."""
    end: torch.Tensor
    """The row after the reply's last one."""
    pad: torch.Tensor
    """The rows after that."""

    @abstractmethod
    def begin(self, rows: torch.Tensor, prompt: torch.Tensor, voice: str) -> Beginning:
        """Return what is read first.

        Args:
            rows: of the prompt, and the first of the reply: (n + 1, width of the thinker).
            prompt: ids and positions of the prompt's tokens, (4, n), float32.
            voice: one of `voices`.

        Raises:
            BadInput: the prompt leaves nothing to speak in.
        """

    @abstractmethod
    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of first codes, (rows, codes), after states, (rows, width)."""

    @abstractmethod
    def frames(
        self, states: torch.Tensor, codes: Sequence[int], choices: Sequence[Sequence[TokenChoice]], *, is_exact: bool
    ) -> list[list[int]]:
        """Return whole frames of `num_codebooks` codes.

        Args:
            states: after which the first codes were said, (rows, width).
            codes: the first codes.
            choices: how the others are chosen, for each row.
            is_exact: a row must not depend on how many there are.
        """

    @abstractmethod
    def embed(self, frames: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return what the decoder is given after frames, (requests, codebooks), and beside rows, (requests, width)."""

    def checked_voice(self, voice: str | None) -> str:
        """Return the name of a voice as the model knows it; the first one where none is asked for.

        Raises:
            BadInput: it has no such voice.
        """
        if voice is None:
            return self.voices[0]
        for name in self.voices:
            if name.lower() == voice.lower():
                return name
        raise BadInput(f"voice: the model has no such voice (allowed: {', '.join(self.voices)})", field="voice")
