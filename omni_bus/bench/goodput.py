"""Goodput: requests a second that kept every limit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from omni_bus.bench.measures import METRICS, Measures
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEYS = ("ttft", "tpot", "e2el", "audio_ttfp", "audio_rtf", "audio_gaps", "audio_longest_gap", "audio_underrun")
"""Metrics of which a request has at most one value."""

_MAY_BE_ZERO = ("audio_gaps", "audio_longest_gap", "audio_underrun")
"""Limits that say: none at all."""


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Return the limits of ``KEY:VALUE`` words, in the metrics' units.

    Raises:
        BadInput: a word that is no such pair, an unknown key, a value that is no positive number, a key given twice.
    """
    allowed = (
        f"allowed: KEY:VALUE; keys {', '.join(KEYS)}; values above 0, or 0 for {', '.join(_MAY_BE_ZERO)}; "
        "milliseconds, or for audio_rtf a factor, for audio_gaps a number"
    )
    limits: dict[str, float] = {}
    for word in words:
        key, _, text = word.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if key not in KEYS or not 0 <= value < math.inf or (value == 0 and key not in _MAY_BE_ZERO):
            raise BadInput(f"--goodput {word} came ({allowed})", field="--goodput")
        if key in limits:
            raise BadInput(f"--goodput {word}: {key} came twice (allowed: each key once)", field="--goodput")
        limits[key] = value
    return limits


def is_good(measures: Measures, limits: Mapping[str, float]) -> bool:
    """Whether a request kept the limits.

    What was not measured kept nothing, with one exception: an answer of one token has no time per further token.
    """
    for key, limit in limits.items():
        values = measures.values(key)
        if not values:
            if key == "tpot" and measures.output_tokens == 1:
                continue
            return False
        if values[0] * METRICS[key].scale > limit:
            return False
    return True
