"""A run as a table for a person and as JSON for a program; keys are those of ``vllm bench serve`` where it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_bus.bench.measures import METRICS, measure
from omni_bus.bench.run import first_ttft_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from omni_bus.bench.costs import ClientCost, ServerCost
    from omni_bus.bench.occupancy import Occupancy
    from omni_bus.bench.record import Record
    from omni_bus.bench.round_trip import Heard
    from omni_bus.bench.run import Outcome, Phase, SlowReaders, Storm
    from omni_bus.bench.summary import Distribution, Summary

_WIDTH = 78
_COLUMN = 11

Told = tuple["Phase", "Summary"]
"""A phase and what it came to."""


# --- JSON ---------------------------------------------------------------------------------------------------


def as_json(
    outcome: Outcome, told: Sequence[Told], settings: Mapping[str, Any], *, is_detailed: bool
) -> dict[str, Any]:
    """Return everything; the measured phase on top, every phase under ``phases``.

    Args:
        outcome: of the run.
        told: its phases in order; the last one is the measured one.
        settings: what the run was told, put on top as it is.
        is_detailed: with the moments of each request.
    """
    document: dict[str, Any] = {**settings, "model_id": outcome.model, **_phase_json(*told[-1])}
    if len(told) > 1:
        document["phases"] = {phase.label: _phase_json(phase, summary) for phase, summary in told}
        document["ratios"] = ratios(*(summary for _, summary in told))
    if outcome.slow is not None:
        document["slow_readers"] = _slow_json(outcome.slow)
    if outcome.storm is not None:
        document["storm"] = _storm_json(outcome.storm, told[-1][1])
    if outcome.heard is not None:
        document |= _heard_json(outcome.heard)
    if is_detailed:
        document["requests"] = [_request_json(record) for record in told[-1][0].records]
    return document


def _phase_json(phase: Phase, summary: Summary) -> dict[str, Any]:
    found: dict[str, Any] = {
        "duration": summary.duration_s,
        "num_prompts": summary.num_requests,
        "completed": summary.completed,
        "failed": summary.failed,
        "left": summary.left,
        "failures": {name: {"count": one.count, "message": one.message} for name, one in summary.failures.items()},
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "tokens_from": summary.tokens_from,
        "token_times_from": summary.times_from,
        "tokens_per_chunk": summary.tokens_per_chunk,
        "request_throughput": summary.per_second(summary.completed),
        "request_goodput": None if summary.good is None else summary.per_second(summary.good),
        "output_throughput": summary.per_second(summary.output_tokens),
        "total_token_throughput": summary.per_second(summary.output_tokens + (summary.input_tokens or 0)),
        "max_output_tokens_per_s": summary.max_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent,
        "max_send_lag_ms": summary.max_lag_s * 1000,
    }
    if summary.continuous is not None:
        found["total_audio_duration_s"] = summary.audio_s
        found["audio_throughput"] = summary.per_second(summary.audio_s)
        found["audio_gaps"] = summary.num_gaps
        found["longest_audio_gap_ms"] = summary.longest_gap_s * 1000
        found["audio_continuity_rate"] = summary.continuous / summary.completed
    if summary.heard_s is not None:
        found["total_input_audio_duration_s"] = summary.heard_s
        found["rtfx"] = summary.per_second(summary.heard_s)
    for name, one in summary.metrics.items():
        found |= _distribution_json(METRICS[name].key, one)
    found["client"] = _client_json(phase.client)
    if phase.server is not None:
        found["server"] = _server_json(phase.server, summary.output_tokens)
    return found


def _distribution_json(key: str, one: Distribution) -> dict[str, float]:
    found = {f"mean_{key}": one.mean, f"median_{key}": one.median, f"std_{key}": one.std}
    found |= {f"min_{key}": one.min, f"max_{key}": one.max}
    return found | {f"p{percentile:g}_{key}": value for percentile, value in one.percentiles.items()}


def _client_json(cost: ClientCost) -> dict[str, Any]:
    return {
        "cpu_s": cost.cpu_s,
        "cpu_share": cost.cpu_share,
        "loop_lag_ms": {"median": cost.median_lag_ms, "p99": cost.p99_lag_ms, "max": cost.max_lag_ms},
        "is_saturated": cost.is_saturated,
    }


def _server_json(cost: ServerCost, output_tokens: int) -> dict[str, Any]:
    processes = {
        name: {
            "processes": one.num_processes,
            "cpu_s": one.cpu_s,
            "cpu_s_per_1000_output_tokens": _per_thousand(one.cpu_s, output_tokens),
        }
        for name, one in cost.processes.items()
    }
    return {
        "cpu_s": cost.cpu_s,
        "cpu_s_per_1000_output_tokens": _per_thousand(cost.cpu_s, output_tokens),
        "processes": processes,
        "ended_processes": cost.num_ended,
    }


def _slow_json(slow: SlowReaders) -> dict[str, Any]:
    failed = [record for record in slow.records if record.failure]
    return {
        "requests": len(slow.records),
        "pieces_per_s": slow.rate,
        "pieces_per_s_read": read_rate(slow.records),
        "failures": {record.failure: record.message for record in failed},
    }


def _storm_json(storm: Storm, summary: Summary) -> dict[str, Any]:
    return {
        "clients": summary.num_requests,
        "left": summary.left,
        "left_within_s": storm.spread_s,
        "occupancy_at_once": _occupancy_json(storm.at_once),
        "occupancy_at_last": _occupancy_json(storm.at_last),
        "occupancy_answered_after_ms": storm.answered_s * 1000,
        "next_ttft_ms": _ms(first_ttft_s(storm.after)),
        "median_ttft_before_ms": _ms(_median_ttft_s(storm.calm)),
        "failed_after": sum(not record.is_complete for record in storm.after),
    }


def _heard_json(heard: Heard) -> dict[str, Any]:
    errors = heard.errors
    return {
        "word_error_rate": errors.rate if errors.words else None,
        "word_errors": {
            "words": errors.words,
            "substituted": errors.substituted,
            "left_out": errors.left_out,
            "put_in": errors.put_in,
            "texts": heard.num_texts,
            "not_recognised": list(heard.failures),
            "worst": [{"said": said, "heard": other} for said, other in heard.worst],
        },
    }


def _occupancy_json(found: Occupancy | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"held": found.held, "places": found.places, "free": found.free, "source": found.source}


def _request_json(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {
        "intended_at_s": record.intended_at,
        "sent_at_s": record.sent_at,
        "ended_at_s": record.ended_at,
        "input_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "failure": record.failure or None,
        "left": record.has_left,
        "text_at_s": [at for at, _ in record.texts],
        "audio_at_s": [at for at, _ in record.sounds],
    }
    if record.is_complete:
        one = measure(record)
        values = {name: one.values(name) for name in METRICS if name != "itl"}
        found |= {METRICS[name].key: had[0] * METRICS[name].scale for name, had in values.items() if had}
        found["itl_ms"] = [gap * 1000 for gap in one.values("itl")]
    return found


# --- figures that both need ---------------------------------------------------------------------------------


def ratios(before: Summary, after: Summary) -> dict[str, dict[str, float]]:
    """Return, for each metric that both have, its figures in the second phase as multiples of the first."""
    found: dict[str, dict[str, float]] = {}
    for name in METRICS:
        if name in before.metrics and name in after.metrics:
            old, new = _figures(before.metrics[name]), _figures(after.metrics[name])
            found[name] = {label: new[label] / value for label, value in old.items() if value > 0}
    return found


def _figures(one: Distribution) -> dict[str, float]:
    """Return what a table shows of a metric, by its heading."""
    percentiles = {f"p{percentile:g}": value for percentile, value in one.percentiles.items()}
    return {"mean": one.mean, "median": one.median, **percentiles, "max": one.max}


def read_rate(records: Iterable[Record]) -> float | None:
    """Return the pieces a second that were read of answers, from the first to the last; None if there were too few."""
    pieces = seconds = 0.0
    for record in records:
        found = record.texts or record.sounds
        if len(found) > 1:
            pieces += len(found) - 1
            seconds += found[-1][0] - found[0][0]
    return pieces / seconds if seconds > 0 else None


def _median_ttft_s(records: Sequence[Record]) -> float | None:
    found = sorted(ttft for record in records if (ttft := first_ttft_s([record])) is not None)
    return found[len(found) // 2] if found else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _per_thousand(cpu_s: float, output_tokens: int) -> float | None:
    return cpu_s * 1000 / output_tokens if output_tokens else None


# --- the table ----------------------------------------------------------------------------------------------


def as_table(outcome: Outcome, told: Sequence[Told], heading: str) -> str:
    """Return a page of at most `_WIDTH` characters a line, but for messages."""
    lines = [heading, ""]
    for phase, summary in told:
        lines += _phase_lines(phase, summary, has_title=len(told) > 1)
    if len(told) > 1:
        lines += _ratio_lines(*(summary for _, summary in told))
    if outcome.slow is not None:
        lines += _slow_lines(outcome.slow)
    if outcome.storm is not None:
        lines += _storm_lines(outcome.storm)
    if outcome.heard is not None:
        lines += _heard_lines(outcome.heard)
    return "\n".join(lines).rstrip()


def _phase_lines(phase: Phase, summary: Summary, *, has_title: bool) -> list[str]:
    lines = [_rule(summary.label)] if has_title else []
    lines += _amount_lines(summary)
    for name, failures in summary.failures.items():
        lines.append(f"  failed: {failures.count} × {name}: {failures.message}".rstrip(": "))
    lines += ["", *_metric_lines(summary), *_note_lines(summary), ""]
    lines += _client_lines(phase.client)
    if phase.server is not None:
        lines += _server_lines(phase.server, summary.output_tokens)
    return [*lines, ""]


def _amount_lines(summary: Summary) -> list[str]:
    requests = f"{summary.completed} completed, {summary.failed} failed"
    requests += f", {summary.left} left by their clients" if summary.left else ""
    rows = [
        ("Requests", requests),
        ("Duration", f"{summary.duration_s:.2f} s"),
        ("Request throughput", f"{summary.per_second(summary.completed):.2f} requests/s"),
    ]
    if summary.good is not None:
        share = f"{summary.good} of {summary.num_requests} kept the limits"
        rows.append(("Goodput", f"{summary.per_second(summary.good):.2f} requests/s ({share})"))
    if summary.tokens_from or not summary.completed:  # else nothing counts tokens
        tokens = f"{summary.output_tokens} tokens, {summary.per_second(summary.output_tokens):.1f} tokens/s"
        rows.append(("Output", f"{tokens} (best second {summary.max_tokens_per_s:.0f})"))
    if summary.input_tokens is not None:
        rows.append(("Input", f"{summary.input_tokens} tokens"))
    rows.append(("Most at once", f"{summary.max_concurrent} request{'' if summary.max_concurrent == 1 else 's'}"))
    if summary.max_lag_s >= 0.001:  # what a timer rounds says nothing
        rows.append(("Sent late by", f"up to {summary.max_lag_s * 1000:.1f} ms"))
    if summary.heard_s is not None:
        rate = f"{summary.per_second(summary.heard_s):.2f} s of sound a second"
        rows.append(("Sound heard", f"{summary.heard_s:.2f} s, {rate}"))
    if summary.continuous is not None:
        longest = f" (longest {summary.longest_gap_s * 1000:.0f} ms)" if summary.num_gaps else ""
        whole = f"{summary.continuous} of {summary.completed} answers continuous"
        rows += [
            ("Sound", f"{summary.audio_s:.2f} s, {summary.per_second(summary.audio_s):.2f} s of sound a second"),
            ("Gaps in playback", f"{summary.num_gaps}{longest}; {whole}"),
        ]
    return [f"{title:<22}{value}" for title, value in rows]


def _metric_lines(summary: Summary) -> list[str]:
    if not summary.metrics:
        return ["no request completed, so there is nothing to measure"]
    heads = _figures(next(iter(summary.metrics.values())))
    width = max(len(_title(name)) for name in summary.metrics) + 2
    lines = [" " * width + "".join(f"{head:>{_COLUMN}}" for head in heads)]
    for name, one in summary.metrics.items():
        lines.append(f"{_title(name):<{width}}" + "".join(f"{value:>{_COLUMN}.2f}" for value in _figures(one).values()))
    return lines


def _title(name: str) -> str:
    unit = METRICS[name].unit
    return f"{name} ({unit})" if unit else name


def _note_lines(summary: Summary) -> list[str]:
    """Say where figures come from, and what they leave out."""
    lines: list[str] = []
    if summary.tokens_from:
        sources = {
            "usage": "the server's usage",
            "tokenize": "the server's tokeniser",
            "chunks": "chunks, one token each",
        }
        told = [f"{sources[source]} ({count})" for source, count in summary.tokens_from.items()]
        chunks = f"; {summary.tokens_per_chunk:.2f} tokens in a chunk" if summary.tokens_per_chunk else ""
        lines.append(f"tokens counted by {', '.join(told)}{chunks}")
    server, unmeasured = summary.times_from.get("server", 0), summary.times_from.get("unmeasured", 0)
    if server:
        lines.append(f"times between tokens of {server} answers are the server's, since their tokens came bundled")
    if unmeasured:
        lines.append(f"times between tokens of {unmeasured} answers are not known: their tokens came bundled")
    return lines


def _client_lines(cost: ClientCost) -> list[str]:
    words = f"{cost.cpu_share:.0%} of a core; event loop late by {cost.median_lag_ms:.1f} ms (median), "
    lines = [f"client: {words}{cost.p99_lag_ms:.1f} ms (p99), {cost.max_lag_ms:.1f} ms (most)"]
    if cost.is_saturated:
        why = "was busy" if cost.is_busy else "had to wait for a processor"
        lines.append(f"warning: the client itself {why}, so these times are partly its own")
    return lines


def _server_lines(cost: ServerCost, output_tokens: int) -> list[str]:
    width = max((len(name) for name in cost.processes), default=0) + 2
    width = max(width, len("server process") + 2)
    lines = ["", f"{'server process':<{width}}{'processes':>10}{'CPU s':>10}{'CPU s / 1,000 tokens':>22}"]
    rows = [(name, one.num_processes, one.cpu_s) for name, one in cost.processes.items()]
    rows.append(("all", sum(row[1] for row in rows), cost.cpu_s))
    for name, num_processes, cpu_s in rows:
        per = _per_thousand(cpu_s, output_tokens)
        shown = "-" if per is None else f"{per:.3f}"
        lines.append(f"{name:<{width}}{num_processes:>10}{cpu_s:>10.2f}{shown:>22}")
    if cost.num_ended:
        lines.append(f"{cost.num_ended} processes ended meanwhile; what they used is not in these figures")
    return lines


def _ratio_lines(before: Summary, after: Summary) -> list[str]:
    lines = [_rule(f"{after.label} / {before.label}")]
    found = ratios(before, after)
    if not found:
        return [*lines, "nothing completed in both", ""]
    heads = _figures(next(iter(after.metrics.values())))
    width = max(len(name) for name in found) + 2
    lines.append(" " * width + "".join(f"{head:>{_COLUMN}}" for head in heads))
    for name, shares in found.items():
        cells = (f"{shares[head]:>{_COLUMN}.2f}" if head in shares else f"{'-':>{_COLUMN}}" for head in heads)
        lines.append(f"{name:<{width}}{''.join(cells)}")
    return [*lines, ""]


def _slow_lines(slow: SlowReaders) -> list[str]:
    rate = read_rate(slow.records)
    shown = "-" if rate is None else f"{rate:.1f}"
    lines = [f"slow readers: {len(slow.records)} answers, read at {shown} pieces a second each (told: {slow.rate:g})"]
    lines += [f"  failed: {record.failure}: {record.message}" for record in slow.records if record.failure]
    return lines


def _storm_lines(storm: Storm) -> list[str]:
    lines = [_rule("after the storm"), f"clients left within {storm.spread_s:.2f} s of sending, at random moments"]
    for title, found in (("when the last had left", storm.at_once), ("after the next requests", storm.at_last)):
        lines.append(f"{title:<26}{_occupancy_words(found)}")
    next_ms, before_ms = _ms(first_ttft_s(storm.after)), _ms(_median_ttft_s(storm.calm))
    failed = sum(not record.is_complete for record in storm.after)
    shown = "failed" if next_ms is None else f"{next_ms:.2f} ms"
    usual = "-" if before_ms is None else f"{before_ms:.2f} ms"
    lines.append(f"{'TTFT of the next request':<26}{shown} (median before: {usual})")
    if failed:
        lines.append(f"{failed} of the {len(storm.after)} requests after it failed: {storm.after[0].failure}")
    return lines


def _heard_lines(heard: Heard) -> list[str]:
    errors = heard.errors
    kinds = f"{errors.substituted} substituted, {errors.left_out} left out, {errors.put_in} put in"
    rate = f"{errors.rate:.2%}" if errors.words else "-"
    lines = [f"word errors: {rate} ({kinds}; of {errors.words} words in {heard.num_texts} texts)"]
    for said, other in heard.worst:
        lines += [f"  said:  {said}", f"  heard: {other}"]
    if heard.failures:
        lines.append(f"{len(heard.failures)} texts were not recognised: {heard.failures[0]}")
    return lines


def _occupancy_words(found: Occupancy | None) -> str:
    if found is None:
        return "unknown: the server has no /health with pipelines, /metrics with requests, or /load"
    if found.free is None:
        return f"{found.held} requests held ({found.source})"
    return f"{found.held} requests held, {found.free} of {found.places} places free ({found.source})"


def _rule(title: str) -> str:
    return f"── {title} ".ljust(_WIDTH, "─")
