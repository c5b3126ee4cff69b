"""The measures of one request, from what it saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from omni_bus.bench.playback import Playback, play
from omni_bus.bench.timings import TokenTimes, token_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.bench.record import Record


class Metric(msgspec.Struct, frozen=True):
    """A measure that a report may hold."""

    name: str
    """As options know it."""
    title: str
    key: str
    """What follows ``mean_`` and the like in the JSON."""
    unit: str
    scale: float = 1.0
    """From seconds to the unit."""


_MS = 1000.0

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ttft", "Time to first token", "ttft_ms", "ms", _MS),
        Metric("tpot", "Time per output token, the first one excepted", "tpot_ms", "ms", _MS),
        Metric("itl", "Inter-token latency, chunk to chunk", "itl_ms", "ms", _MS),
        Metric("e2el", "End-to-end latency", "e2el_ms", "ms", _MS),
        Metric("intended_ttft", "Time to first token, from the intended send time", "intended_ttft_ms", "ms", _MS),
        Metric("intended_e2el", "End-to-end latency, from the intended send time", "intended_e2el_ms", "ms", _MS),
        Metric("audio_ttfp", "Time to first piece of sound", "audio_ttfp_ms", "ms", _MS),
        Metric("audio_rtf", "Real-time factor", "audio_rtf", "×"),
        Metric("audio_duration", "Sound per answer", "audio_duration_s", "s"),
        Metric("audio_gaps", "Gaps in playback", "audio_gaps", ""),
        Metric("audio_longest_gap", "Longest gap in playback", "audio_longest_gap_ms", "ms", _MS),
        Metric("audio_underrun", "Worst deficit against playback", "audio_underrun_ms", "ms", _MS),
    )
}
"""By name, in the order of reports. Names and keys that `vllm bench serve` has are the same here."""

INTENDED = ("intended_ttft", "intended_e2el")
"""Tell more than the others only where requests have a time at which they should be sent."""


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one request; times in seconds."""

    e2el_s: float
    output_tokens: int
    ttft_s: float | None = None
    times: TokenTimes | None = None
    """None where they can't be told."""
    lag_s: float = 0.0
    """How much later than intended it was sent."""
    audio_ttfp_s: float | None = None
    audio_rtf: float | None = None
    playback: Playback | None = None

    @property
    def tpot_s(self) -> float | None:
        """The first token's time is TTFT, so one fewer than all share the rest."""
        return None if self.times is None else self.times.span_s / (self.output_tokens - 1)

    def values(self, name: str) -> Sequence[float]:
        """Return the values of a metric, unscaled: none, one, or for ITL one for each gap."""
        playback = self.playback
        match name:
            case "itl":
                return () if self.times is None else self.times.itls_s
            case "ttft":
                value = self.ttft_s
            case "tpot":
                value = self.tpot_s
            case "e2el":
                value = self.e2el_s
            case "intended_ttft":
                value = None if self.ttft_s is None else self.ttft_s + self.lag_s
            case "intended_e2el":
                value = self.e2el_s + self.lag_s
            case "audio_ttfp":
                value = self.audio_ttfp_s
            case "audio_rtf":
                value = self.audio_rtf
            case "audio_duration":
                value = None if playback is None else playback.duration_s
            case "audio_gaps":
                value = None if playback is None else float(playback.num_gaps)
            case "audio_longest_gap":
                value = None if playback is None else playback.longest_gap_s
            case "audio_underrun":
                value = None if playback is None else playback.underrun_s
            case _:
                raise KeyError(name)
        return () if value is None else (value,)


def measure(record: Record) -> Measures:
    """Return the measures of a request whose whole answer came and whose tokens are counted."""
    arrivals_at = [at for at, _ in record.texts]
    num_tokens = record.output_tokens or 0
    playback = play(record.sounds) if record.sounds else None
    rtf = None
    if playback is not None and playback.duration_s > 0:
        rtf = (record.sounds[-1][0] - record.sent_at) / playback.duration_s
    elif record.heard_s:
        rtf = (record.ended_at - record.sent_at) / record.heard_s
    return Measures(
        e2el_s=record.ended_at - record.sent_at,
        output_tokens=num_tokens,
        ttft_s=arrivals_at[0] - record.sent_at if arrivals_at else None,
        times=token_times(arrivals_at, num_tokens, record.timing),
        lag_s=record.sent_at - record.intended_at,
        audio_ttfp_s=record.sounds[0][0] - record.sent_at if record.sounds else None,
        audio_rtf=rtf,
        playback=playback,
    )
