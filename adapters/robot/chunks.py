"""What becomes of a chunk of actions before it is sent: shortened, averaged with earlier ones, or joined to the last.

Pure: steps and arrays in, arrays out. A chunk is (steps, action_dim); its row 0 is for the step of its observation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Chunk = "npt.NDArray[np.floating[Any]]"

MAX_CHUNKS = 64
"""Chunks that an ensemble remembers; far more than horizons have rows that still count."""


class Ensemble:
    """Temporal ensembling: what several chunks say of a step, averaged (Zhao et al. 2023, ACT, section IV-A).

    Prediction i of a step, 0 being the oldest, has weight ``exp(-coefficient * i)``: a positive coefficient trusts the
    older ones more.
    """

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient
        self._chunks: list[tuple[int, npt.NDArray[np.float64]]] = []

    def add(self, step: int, chunk: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the chunk that begins at `step`, each row averaged with what earlier chunks said of its step."""
        fitting = [
            (start, rows)
            for start, rows in self._chunks
            if start <= step < start + len(rows) and rows.shape[1:] == chunk.shape[1:]
        ]
        self._chunks = [*fitting, (step, chunk.astype(np.float64))][-MAX_CHUNKS:]
        total = np.zeros(chunk.shape, np.float64)
        weights = np.zeros(len(chunk), np.float64)
        seen = np.zeros(len(chunk), np.int64)
        """Predictions of each row that came before the one at hand."""
        for start, rows in self._chunks:
            past = step - start
            count = min(len(rows) - past, len(chunk))
            weight = np.exp(-self._coefficient * seen[:count])
            total[:count] += weight[:, None] * rows[past : past + count]
            weights[:count] += weight
            seen[:count] += 1
        return (total / weights[:, None]).astype(chunk.dtype)


def soft_mask(horizon: int, delay: int, overlap: int) -> npt.NDArray[np.float64]:
    """Return how much each row of a new chunk is bound to the previous one (Black et al. 2025, RTC, equation 5).

    Args:
        horizon: rows of the new chunk.
        delay: rows that are executed before it arrives: weight 1.
        overlap: rows of the previous chunk that are left; from there on weight 0, and between the two it falls as
            ``c (e^c - 1) / (e - 1)`` with c from just below 1 down to just above 0.
    """
    weights = np.zeros(horizon, np.float64)
    overlap = min(overlap, horizon)
    delay = min(delay, overlap)
    weights[:delay] = 1.0
    falling = np.arange(delay, overlap)
    c = (overlap - falling) / (overlap - delay + 1)
    weights[delay:overlap] = c * np.expm1(c) / np.expm1(1.0)
    return weights


def join(previous: npt.NDArray[Any], chunk: npt.NDArray[Any], delay: int) -> npt.NDArray[Any]:
    """Return a new chunk that begins as the previous one goes on, and passes over into its own.

    Args:
        previous: rows that are left of it, row 0 for the new chunk's row 0.
        chunk: what the policy says, made without knowing of `previous`.
        delay: rows that will have been executed when it arrives.
    """
    count = min(len(previous), len(chunk))
    weights = soft_mask(len(chunk), delay, len(previous))[:count, None]
    joined = chunk.copy()
    joined[:count] = weights * previous[:count] + (1.0 - weights) * chunk[:count]
    return joined


class Sent:
    """The chunk that a robot got last, and the step at which it begins."""

    def __init__(self) -> None:
        self._start = 0
        self._chunk: npt.NDArray[Any] | None = None

    def keep(self, step: int, chunk: npt.NDArray[Any]) -> None:
        """One is sent for `step`."""
        self._start, self._chunk = step, chunk

    def left_at(self, step: int) -> npt.NDArray[Any] | None:
        """Return its rows from `step` on; None where there are none."""
        if self._chunk is None or not 0 <= step - self._start < len(self._chunk):
            return None
        return self._chunk[step - self._start :]
