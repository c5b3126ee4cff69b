"""Token times where tokens arrive bundled: several in one chunk, so that the client's clock sees no gap between them.

A server that is asked with ``return_stage_metrics`` says in its chunks how its stages fared (vLLM-Omni's
``metrics.stage_metrics``, cumulative, by stage id). Gaps that the client saw win; the server's fill in where there are
none; and where neither tells, the request is unmeasured rather than zero.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.bench.record import StageTiming


class TokenTimes(msgspec.Struct, frozen=True):
    """Times between the output's tokens."""

    itls_s: tuple[float, ...]
    """Gaps; none where only their mean is known."""
    span_s: float
    """From the first token to the last."""
    source: str
    """``client`` or ``server``."""


def token_times(arrivals_at: Sequence[float], num_tokens: int, timing: StageTiming | None) -> TokenTimes | None:
    """Return the times between tokens; None where they can't be told, or there are none.

    Args:
        arrivals_at: when each piece of text came, in seconds.
        num_tokens: tokens of the whole answer.
        timing: what the server said, if it did.
    """
    if num_tokens < 2:
        return None
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(arrivals_at))
    if any(gap > 0 for gap in gaps):
        return TokenTimes(gaps, arrivals_at[-1] - arrivals_at[0], "client")
    if timing is None:
        return None
    if _agrees(timing, num_tokens):
        return TokenTimes(timing.itls_s, sum(timing.itls_s), "server")
    if timing.tpot_s is not None and timing.tpot_s > 0:
        return TokenTimes((), timing.tpot_s * (num_tokens - 1), "server")
    return None


def _agrees(timing: StageTiming, num_tokens: int) -> bool:
    """Whether the server's gaps are those of this very answer."""
    gaps = timing.itls_s
    return (
        timing.num_tokens == num_tokens
        and len(gaps) == num_tokens - 1
        and all(gap >= 0 for gap in gaps)
        and sum(gaps) > 0
    )
