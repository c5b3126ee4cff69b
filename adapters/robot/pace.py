"""How many denoise steps a policy can still make before a deadline."""

from __future__ import annotations

import math

MAX_DENOISE_STEPS = 1000


class Pace:
    """How long steps take, by what the last ones of a batch of that size took."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._later: dict[int, float] = {}

    def note(self, num_rows: int, seconds: float, *, is_first: bool) -> None:
        """Remember what a step took; the first one of a batch reads pictures and prompts as well."""
        (self._first if is_first else self._later)[num_rows] = seconds

    def affordable(self, num_rows: int, now: float, deadline: float | None, *, is_first: bool) -> int:
        """Return how many steps can still be made, one at least."""
        if deadline is None:
            return MAX_DENOISE_STEPS
        later = _expected(self._later, num_rows)
        first = _expected(self._first, num_rows) - later if is_first else 0.0
        if later <= 0:
            return MAX_DENOISE_STEPS
        return max(1, min(MAX_DENOISE_STEPS, math.floor((deadline - now - max(first, 0.0)) / later)))


def _expected(measured: dict[int, float], num_rows: int) -> float:
    """Return what was measured with the nearest number of rows, in proportion where that was smaller."""
    if not measured:
        return 0.0
    nearest = min(measured, key=lambda known: (abs(known - num_rows), -known))
    return measured[nearest] * max(1.0, num_rows / nearest)
