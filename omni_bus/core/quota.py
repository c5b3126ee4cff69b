"""What one caller may use of each pipeline: a weight, limits of its own, and a rate."""

from __future__ import annotations

import msgspec


class Quota(msgspec.Struct, frozen=True):
    """Of a caller that the deployment names; others have the defaults: equal weights and no limits of their own.

    Every limit counts for each pipeline by itself, as hosted services count for each model.
    """

    weight: float = 1.0
    """Share of the admissions while callers compete, above 0."""
    max_in_flight: int | None = None
    max_queued: int | None = None
    requests_per_minute: float | None = None
    burst: int | None = None
    """Requests that the rate lets through at once; by default those of six seconds, at least one."""
    max_priority: int | None = None

    def bucket(self, now: float) -> TokenBucket | None:
        """Return a full bucket for the rate; None without one."""
        if self.requests_per_minute is None:
            return None
        burst = self.burst if self.burst is not None else max(1, int(self.requests_per_minute / 10))
        return TokenBucket(self.requests_per_minute / 60, burst, now)


class TokenBucket:
    """A rate with bursts: a request takes a token, and tokens come back at the rate, up to the burst.

    Args:
        rate_hz: tokens a second.
        burst: tokens in a full bucket.
        now: when it begins, full.
    """

    def __init__(self, rate_hz: float, burst: float, now: float) -> None:
        self._rate_hz = rate_hz
        self._burst = burst
        self._tokens = burst
        self._filled_at = now

    def wait_s(self, now: float) -> float:
        """Return how long until there is a token; 0 if there is one."""
        self._fill(now)
        return max(0.0, (1.0 - self._tokens) / self._rate_hz)

    def take(self, now: float) -> None:
        """Take a token that is there."""
        self._fill(now)
        self._tokens -= 1.0

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._filled_at) * self._rate_hz)
        self._filled_at = max(now, self._filled_at)
