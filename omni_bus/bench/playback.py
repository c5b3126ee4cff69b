"""What a listener hears who plays sound as soon as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTINUOUS_S = 0.1
"""A deficit up to this is one that any player's buffer hides; vLLM-Omni's threshold."""


class Playback(msgspec.Struct, frozen=True):
    """How playing in real time went."""

    duration_s: float
    """Of the sound."""
    underrun_s: float
    """The worst deficit of a player that begins with the first piece: how long it should have waited before that. It is
    also all the silence together of one that waits where the sound runs out, since each wait moves what follows."""
    num_gaps: int
    """Silences of that second player."""
    longest_gap_s: float
    """The longest of them; 0 if there is none."""

    @property
    def is_continuous(self) -> bool:
        """Whether a player with an ordinary buffer would have played it through."""
        return self.underrun_s <= CONTINUOUS_S


def play(sounds: Sequence[tuple[float, float]]) -> Playback:
    """Play pieces of sound.

    Args:
        sounds: of each piece, when it came and how long it is, in seconds; at least one.
    """
    begun_at = sounds[0][0]
    duration_s = underrun_s = longest_gap_s = 0.0
    num_gaps = 0
    for at, length_s in sounds:
        late_s = at - begun_at - duration_s
        if late_s > underrun_s:  # beyond what the silences so far have moved everything
            num_gaps += 1
            longest_gap_s = max(longest_gap_s, late_s - underrun_s)
            underrun_s = late_s
        duration_s += length_s
    return Playback(duration_s, underrun_s, num_gaps, longest_gap_s)
