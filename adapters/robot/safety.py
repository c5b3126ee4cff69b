"""What is refused instead of served, or instead of sent: pure, time is passed in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_bus.errors import BadInput, QuotaExceeded, StageFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class RateLimit:
    """Observations that one robot may send: `rate_hz` on average, `burst` at once."""

    def __init__(self, rate_hz: float, burst: int) -> None:
        self._rate_hz = rate_hz
        self._burst = burst
        self._tokens = float(burst)
        self._at: float | None = None

    def spend(self, now: float) -> None:
        """Account for an observation.

        Raises:
            QuotaExceeded: it came too soon; says when the next one may come.
        """
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate_hz)
        self._at = now
        if self._tokens < 1.0:
            wait_s = (1.0 - self._tokens) / self._rate_hz
            raise QuotaExceeded(
                f"observations come faster than {self._rate_hz:g} a second (allowed: the next one in {wait_s:.3f} s)",
                retry_after_s=wait_s,
            )
        self._tokens -= 1.0


class Freshness:
    """Refuses what was overtaken or is too old.

    Args:
        sequence_key: the observation's key with its number, which must grow; empty for none.
        timestamp_key: the one with the moment of its making, Unix seconds; empty for none.
        max_age_s: older observations are refused.
    """

    def __init__(self, sequence_key: str, timestamp_key: str, max_age_s: float | None) -> None:
        self._sequence_key = sequence_key
        self._timestamp_key = timestamp_key
        self._max_age_s = max_age_s
        self._last: int | None = None

    def check(self, values: Mapping[str, Any], unix_now: float) -> None:
        """Let an observation pass, or not.

        Raises:
            BadInput: it is stale, or does not say what it must.
        """
        if self._sequence_key:
            number = number_at(values, self._sequence_key)
            if self._last is not None and number <= self._last:
                raise BadInput(
                    f"{self._sequence_key}: a stale observation, number {number:g} came after {self._last:g}",
                    field=self._sequence_key,
                )
            self._last = number
        if self._timestamp_key and self._max_age_s is not None:
            age_s = unix_now - number_at(values, self._timestamp_key)
            if age_s > self._max_age_s:
                raise stale(self._timestamp_key, age_s, self._max_age_s)


def stale(field: str, age_s: float, max_age_s: float) -> BadInput:
    """Return the refusal of an observation that is too old."""
    return BadInput(f"{field}: a stale observation, {age_s:.3f} s old (allowed: at most {max_age_s:g} s)", field=field)


def number_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the number under a key.

    Raises:
        BadInput: there is none.
    """
    value = values.get(key)
    number = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        came = "nothing" if key not in values else f"a {type(value).__name__}"
        raise BadInput(f"{key}: {came} came (allowed: a number)", field=key)
    return number


def check_finite(values: Any, path: str = "") -> None:
    """Refuse numbers that are none.

    Raises:
        BadInput: names the key.
    """
    match values:
        case np.ndarray() if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise BadInput(f"{path}: NaN or infinity came (allowed: finite numbers)", field=path)
        case float() | np.floating() if not np.isfinite(values):
            raise BadInput(f"{path}: {values} came (allowed: finite numbers)", field=path)
        case dict():
            for key, value in values.items():
                check_finite(value, f"{path}.{key}" if path else str(key))
        case list():
            for value in values:
                check_finite(value, path)
        case _:
            pass


def check_actions(actions: Mapping[str, Any], low: Sequence[float], high: Sequence[float]) -> None:
    """Refuse to send what no robot should execute.

    Args:
        actions: arrays by name; ``actions`` is (steps, action_dim).
        low: least value of each dimension, or one for all; empty for no limit.
        high: greatest.

    Raises:
        StageFailed: NaN, infinity, out of range, or no ``actions`` of two dimensions.
    """
    chunk = actions.get("actions")
    if not isinstance(chunk, np.ndarray) or chunk.ndim != 2:
        shape = getattr(chunk, "shape", "none")
        raise StageFailed(f"the policy gave actions of shape {shape} (allowed: two dimensions, steps first)")
    for name, array in actions.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise StageFailed(f"the policy gave NaN or infinity in '{name}': not sent")
    for limits, is_low in ((low, True), (high, False)):
        if not limits:
            continue
        if len(limits) not in (1, chunk.shape[1]):
            raise StageFailed(f"actions have {chunk.shape[1]} dimensions, their limits {len(limits)}")
        broken = chunk < np.asarray(limits) if is_low else chunk > np.asarray(limits)
        if broken.any():
            row, column = (int(i) for i in np.argwhere(broken)[0])
            bound = limits[column] if len(limits) > 1 else limits[0]
            word = "below" if is_low else "above"
            found = f"{chunk[row, column]:g} for dimension {column} of step {row}"
            raise StageFailed(f"the policy gave {found}, {word} {bound:g}: not sent")
