"""Whether and when a process that died is started again."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
"""Restarts are counted over ten minutes: a crash a day is bad luck, five in a minute are a bug."""

FIRST_DELAY_S = 0.1
"""A process that dies once is bad luck: its callers should wait for little more than its start."""

SECOND_DELAY_S = 0.5
"""Dying again within the window looks like a bug; from here on the delay doubles."""

MAX_DELAY_S = 30.0

_MAX_DOUBLINGS = 20
"""Beyond any delay; without it, the thousandth death would be beyond a float."""


class RestartPolicy:
    """Exponential back-off with jitter, and a budget; after it, the process stays down.

    Args:
        max_restarts: within `WINDOW_S`.
        max_delay_s: what the delay doubles up to, apart from jitter.
    """

    def __init__(self, max_restarts: int, max_delay_s: float = MAX_DELAY_S) -> None:
        self._max_restarts = max_restarts
        self._max_delay_s = max_delay_s
        self._died_at: deque[float] = deque()

    def on_death(self, now: float, jitter: float) -> float | None:
        """Return the seconds to wait before a restart; None when the budget is used up.

        Args:
            now: monotonic seconds.
            jitter: drawn from [0, 1); spreads restarts of what died together over half the delay.
        """
        while self._died_at and now - self._died_at[0] > WINDOW_S:
            self._died_at.popleft()
        if len(self._died_at) >= self._max_restarts:
            return None
        delay = FIRST_DELAY_S
        if self._died_at:
            doublings = min(len(self._died_at) - 1, _MAX_DOUBLINGS)
            delay = SECOND_DELAY_S * 2**doublings
        self._died_at.append(now)
        return min(self._max_delay_s, delay) * (0.75 + 0.5 * jitter)
