"""When requests are sent: all at once, at a constant rate, as a Poisson process, or burstier or smoother than that."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


def offsets(count: int, rate: float, burstiness: float, dice: random.Random) -> list[float]:
    """Return when each request is meant to be sent, in seconds from the first one.

    The gaps follow a gamma distribution whose shape is the burstiness and whose mean is ``1 / rate``: 1 is a Poisson
    process, less comes in bursts, more is smoother, infinity is a constant rate. These are the meanings that
    ``vllm bench serve`` gives its options of the same names.

    Args:
        count: how many.
        rate: requests a second; infinity sends all of them at once.
        burstiness: shape of the distribution, above 0; may be infinity.
        dice: decides the gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    mean_s = 1.0 / rate
    found: list[float] = []
    at = 0.0
    for _ in range(count):
        found.append(at)
        at += mean_s if math.isinf(burstiness) else dice.gammavariate(burstiness, mean_s / burstiness)
    return found
