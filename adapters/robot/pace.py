"""How many denoise steps a policy can still make before a deadline."""

from __future__ import annotations

import math
from collections import deque

MAX_DENOISE_STEPS = 1000

NUM_REMEMBERED = 8
"""Steps whose slowest one is what the next is expected to take."""

SLACK_S = 0.002
"""What an answer takes from the policy's thread to its stage; half a step is kept free besides."""


class Pace:
    """How long steps take, by what the last ones of a batch of that size took."""

    def __init__(self) -> None:
        self._first: dict[int, deque[float]] = {}
        self._later: dict[int, deque[float]] = {}

    def note(self, num_rows: int, seconds: float, *, is_first: bool) -> None:
        """Remember what a step took; the first one of a batch reads pictures and prompts as well."""
        measured = self._first if is_first else self._later
        measured.setdefault(num_rows, deque(maxlen=NUM_REMEMBERED)).append(seconds)

    def affordable(self, num_rows: int, now: float, deadline: float | None, *, is_first: bool) -> int:
        """Return how many steps can still be made, one at least."""
        if deadline is None:
            return MAX_DENOISE_STEPS
        later = _expected(self._later, num_rows)
        if later <= 0:
            return MAX_DENOISE_STEPS
        reading = max(_expected(self._first, num_rows) - later, 0.0) if is_first else 0.0
        left_s = deadline - now - reading - SLACK_S
        return max(1, min(MAX_DENOISE_STEPS, math.floor(left_s / later - 0.5)))


def _expected(measured: dict[int, deque[float]], num_rows: int) -> float:
    """Return what was measured with the nearest number of rows, in proportion where that was smaller."""
    if not measured:
        return 0.0
    nearest = min(measured, key=lambda known: (abs(known - num_rows), -known))
    return max(measured[nearest]) * max(1.0, num_rows / nearest)
