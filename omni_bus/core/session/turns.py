"""When a pause ends a turn."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from omni_bus.core.session.config import SemanticVad, TurnDetection

Heard: TypeAlias = Literal["start", "pause", "resume", "end"]
"""What a detector of speech says. A pause is too short for an end, which may follow; else speech is resumed."""


class Patience(Struct, frozen=True):
    """How long a pause must be, in ms, by how complete the words sound: a score in [0, 1], or unknown."""

    sure: float
    likely: float
    sure_ms: int
    likely_ms: int
    unlikely_ms: int
    unknown_ms: int

    def pause_ms(self, score: float | None) -> int:
        """Return how long the pause must be."""
        if score is None:
            return self.unknown_ms
        if score >= self.sure:
            return self.sure_ms
        return self.likely_ms if score >= self.likely else self.unlikely_ms


# SGLang-Omni's figures.
PATIENCE = {
    "low": Patience(0.99, 0.92, 500, 1200, 3000, 800),
    "medium": Patience(0.97, 0.88, 250, 640, 2000, 640),
    "high": Patience(0.93, 0.80, 200, 320, 1200, 512),
}

JUDGED_MS = 8000
"""Of a turn the last so much is judged: what smart-turn looks at."""

CANDIDATE_MS = 160
"""A pause of this length is asked about, and may be the end of the turn."""


def candidate_ms(detection: TurnDetection) -> int:
    """Return the pause after which a detector of speech should speak up."""
    return CANDIDATE_MS if isinstance(detection, SemanticVad) else detection.silence_duration_ms


def pause_ms(detection: TurnDetection, score: float | None) -> int:
    """Return the pause that ends a turn."""
    if isinstance(detection, SemanticVad):
        return PATIENCE["medium" if detection.eagerness == "auto" else detection.eagerness].pause_ms(score)
    return detection.silence_duration_ms


def prefix_ms(detection: TurnDetection) -> int:
    """Return how much before the first word belongs to a turn."""
    return 300 if isinstance(detection, SemanticVad) else detection.prefix_padding_ms
