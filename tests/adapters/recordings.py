"""Recorded speech as payloads; see tests/speech."""

from __future__ import annotations

import wave
from pathlib import Path

from omni_bus.wire.payloads import Audio, Blob

FOLDER = Path(__file__).parents[1] / "speech"
RATE_HZ = 16_000
BICYCLE = ["my", "sister", "bought", "a", "small", "red", "bicycle"]
BOTTLES = ["green", "bottles", "stand", "on", "the", "wall", "one", "of", "them", "falls", "down"]
"""After "ten", which some write as a number."""


def pcm_of(name: str) -> bytes:
    """Return a recording: 16 kHz, mono, s16."""
    with wave.open(str(FOLDER / f"{name}.wav")) as file:
        return file.readframes(file.getnframes())


def silence(seconds: float) -> bytes:
    """Return nothing to be heard."""
    return bytes(2 * int(seconds * RATE_HZ))


def sound(*pcm: bytes, piece_s: float = 0.5) -> list[Audio]:
    """Return sounds, one after the other, in pieces."""
    whole, size = b"".join(pcm), 2 * int(piece_s * RATE_HZ)
    return [Audio(RATE_HZ, 1, "s16", Blob(whole[start : start + size])) for start in range(0, len(whole), size)]
