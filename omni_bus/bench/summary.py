"""What many requests come to."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from omni_bus.bench.goodput import is_good
from omni_bus.bench.measures import METRICS, Measures, measure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from omni_bus.bench.record import Record


class Distribution(msgspec.Struct, frozen=True):
    """Of one metric, in its unit."""

    count: int
    mean: float
    median: float
    std: float
    """Of the whole population, as numpy's default."""
    min: float
    max: float
    percentiles: dict[float, float]


class Failures(msgspec.Struct):
    """Those that have one name."""

    count: int
    message: str
    """Of the first."""


class Summary(msgspec.Struct, kw_only=True):
    """One phase of a run."""

    label: str
    duration_s: float
    """From the first request's intended send time to the last one's end."""
    num_requests: int
    completed: int
    left: int
    failures: dict[str, Failures]
    input_tokens: int | None
    """None where no request knows."""
    output_tokens: int
    tokens_from: dict[str, int]
    """How many requests' output tokens were counted by what."""
    times_from: dict[str, int]
    """How many requests' token times are the ``client``'s, the ``server``'s, or ``unmeasured``."""
    tokens_per_chunk: float | None
    good: int | None
    """Requests that kept the limits, where there are limits."""
    max_concurrent: int
    max_tokens_per_s: float
    """In the best second."""
    audio_s: float
    heard_s: float | None
    """How much sound was sent to complete answers; None without any."""
    num_gaps: int
    longest_gap_s: float
    """Of all answers."""
    continuous: int | None
    """Answers with sound that a player would have played through; None without sound."""
    max_lag_s: float
    """How much later than intended a request was sent, at worst."""
    metrics: dict[str, Distribution]

    @property
    def failed(self) -> int:
        """How many failed, whatever the name."""
        return sum(failures.count for failures in self.failures.values())

    def per_second(self, amount: float) -> float:
        """Return the rate of an amount over the phase."""
        return amount / self.duration_s if self.duration_s > 0 else 0.0


def distribution(values: Sequence[float], percentiles: Iterable[float]) -> Distribution | None:
    """Return the distribution of values; None of no values."""
    if not values:
        return None
    array = np.asarray(values)
    found = {percentile: float(np.percentile(array, percentile)) for percentile in percentiles}
    return Distribution(
        count=len(values),
        mean=float(array.mean()),
        median=float(np.median(array)),
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        percentiles=found,
    )


def summarise(
    records: Sequence[Record],
    *,
    label: str,
    names: Sequence[str],
    percentiles: Sequence[float],
    limits: Mapping[str, float],
) -> Summary:
    """Return the summary of a phase.

    Args:
        records: every request of it.
        label: what the phase is called.
        names: metrics to report, of `METRICS`.
        percentiles: from 0 to 100.
        limits: of goodput; none asks for no goodput.
    """
    complete = [record for record in records if record.is_complete]
    measured = [measure(record) for record in complete]
    playbacks = [found.playback for found in measured if found.playback is not None]
    num_chunks = sum(len(record.texts) for record in complete)
    output_tokens = sum(found.output_tokens for found in measured)
    counted = [record.prompt_tokens for record in complete if record.prompt_tokens is not None]
    heard = [record.heard_s for record in complete if record.heard_s is not None]
    return Summary(
        label=label,
        duration_s=_duration_s(records),
        num_requests=len(records),
        completed=len(complete),
        left=sum(record.has_left for record in records),
        failures=_failures(records),
        input_tokens=sum(counted) if counted else None,
        output_tokens=output_tokens,
        tokens_from=dict(Counter(record.tokens_from for record in complete if record.tokens_from)),
        times_from=_times_from(measured),
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        good=sum(is_good(found, limits) for found in measured) if limits else None,
        max_concurrent=max_concurrent(records),
        max_tokens_per_s=max(tokens_by_second(complete), default=0.0),
        audio_s=math.fsum(playback.duration_s for playback in playbacks),
        heard_s=math.fsum(heard) if heard else None,
        longest_gap_s=max((playback.longest_gap_s for playback in playbacks), default=0.0),
        num_gaps=sum(playback.num_gaps for playback in playbacks),
        continuous=sum(playback.is_continuous for playback in playbacks) if playbacks else None,
        max_lag_s=max((record.sent_at - record.intended_at for record in records), default=0.0),
        metrics=_metrics(measured, names, percentiles),
    )


def _metrics(
    measured: Sequence[Measures], names: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    for name in names:
        scale = METRICS[name].scale
        values = [value * scale for one in measured for value in one.values(name)]
        if (told := distribution(values, percentiles)) is not None:
            found[name] = told
    return found


def _duration_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(record.ended_at for record in records) - min(record.intended_at for record in records)


def _failures(records: Iterable[Record]) -> dict[str, Failures]:
    found: dict[str, Failures] = {}
    for record in records:
        if record.failure:
            found.setdefault(record.failure, Failures(0, record.message)).count += 1
    return dict(sorted(found.items(), key=lambda item: -item[1].count))


def _times_from(measured: Iterable[Measures]) -> dict[str, int]:
    """Count sources of token times among the answers that have any: those of two tokens or more."""
    told = (found.times for found in measured if found.output_tokens > 1)
    return dict(Counter("unmeasured" if times is None else times.source for times in told))


def max_concurrent(records: Iterable[Record]) -> int:
    """Return how many requests were under way at once, at most."""
    return max((level for _, level in concurrency(records)), default=0)


def concurrency(records: Iterable[Record]) -> list[tuple[float, int]]:
    """Return each moment at which the number of requests under way changes, in order, and the number from then on."""
    changes: Counter[float] = Counter()
    for record in records:
        if record.ended_at > record.sent_at:
            changes[record.sent_at] += 1
            changes[record.ended_at] -= 1
    level = 0
    found: list[tuple[float, int]] = []
    for at in sorted(changes):
        level += changes[at]
        found.append((at, level))
    return found


def tokens_by_second(records: Iterable[Record]) -> list[float]:
    """Return the tokens that came in each second; those of an answer are spread evenly over its pieces of text."""
    found: defaultdict[int, float] = defaultdict(float)
    for record in records:
        if record.texts and record.output_tokens:
            share = record.output_tokens / len(record.texts)
            for at, _ in record.texts:
                found[int(at)] += share
    return [found[second] for second in range(max(found, default=-1) + 1)]
