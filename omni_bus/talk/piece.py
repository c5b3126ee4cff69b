"""The grain of a conversation: 20 ms of sound, either way."""

from __future__ import annotations

RATE_HZ = 24_000
"""Both ways; s16 little-endian, one channel: the default of OpenAI's events."""
PIECE_S = 0.02
PIECE_BYTES = int(RATE_HZ * PIECE_S) * 2
SILENCE = bytes(PIECE_BYTES)


def seconds_of(num_bytes: int) -> float:
    """Return how long so much sound is."""
    return num_bytes / (2 * RATE_HZ)
