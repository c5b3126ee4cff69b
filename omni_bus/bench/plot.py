"""A run as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.bench.measures import METRICS, measure
from omni_bus.bench.record import Record
from omni_bus.bench.summary import concurrency, distribution, tokens_by_second
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COLOURS = ("#3b6fb6", "#d1682b", "#4b9a5b")


def require() -> None:
    """Refuse at once what can't be drawn later.

    Raises:
        BadInput: matplotlib is missing.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BadInput(
            "--plot needs the package matplotlib, which is not installed (pip install 'omni-bus[bench]')",
            field="--plot",
        ) from error
    mpl.use("agg")  # a window would want a display


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn; requests by the label of their phase."""

    heading: str
    compared: dict[str, list[Record]]
    """Whose latencies are drawn."""
    over_time: dict[str, list[Record]]
    """Whose course is drawn."""


def draw(drawing: Drawing, path: str) -> None:
    """Draw distributions of latencies, and requests and tokens over time, into a file.

    Args:
        drawing: what.
        path: of the file; its ending decides the format.
    """
    from matplotlib import pyplot as plt

    names = _names(drawing.compared)
    num_columns = 2 if len(names) > 1 else 1
    figure, axes = plt.subplots(
        -(-(len(names) + 1) // num_columns), num_columns, figsize=(11, 7.2), constrained_layout=True, squeeze=False
    )
    places = list(axes.flat)
    for axis, name in zip(places, names, strict=False):
        _draw_distribution(axis, drawing.compared, name)
    _draw_time(places[len(names)], drawing.over_time)
    for axis in places[len(names) + 1 :]:
        axis.set_axis_off()
    figure.suptitle(drawing.heading, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _names(phases: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return the three metrics that tell most of these answers."""
    measured = [measure(record) for records in phases.values() for record in records if record.is_complete]
    wanted = ("ttft", "audio_ttfp", "audio_rtf", "itl", "e2el")
    return [name for name in wanted if any(one.values(name) for one in measured)][:3]


def _draw_distribution(axis: Any, phases: Mapping[str, Sequence[Record]], name: str) -> None:
    """Draw which share of the values is at most so large."""
    metric = METRICS[name]
    for (label, records), colour in zip(phases.items(), _COLOURS, strict=False):
        measured = [measure(record) for record in records if record.is_complete]
        values = sorted(value * metric.scale for one in measured for value in one.values(name))
        if not values:
            continue
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axis.step(values, shares, where="post", color=colour, label=label)
        told = distribution(values, (99.0,))
        assert told is not None
        p99 = told.percentiles[99.0]
        axis.axvline(p99, color=colour, linewidth=0.8, linestyle=":")
        axis.annotate(
            f"p99 {p99:.0f}" if p99 >= 100 else f"p99 {p99:.3g}",
            (p99, 0.03),
            color=colour,
            fontsize=8,
            rotation=90,
            ha="right",
            va="bottom",
        )
    axis.set_title(metric.title, fontsize=10)
    axis.set_xlabel(metric.unit)
    axis.set_ylabel("share of values")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    if len(phases) > 1:
        axis.legend(fontsize=8, loc="center right")


def _draw_time(axis: Any, phases: Mapping[str, Sequence[Record]]) -> None:
    """Draw requests under way, tokens of each second, and where requests failed, over time."""
    tokens_axis = None
    for (label, records), colour in zip(phases.items(), _COLOURS, strict=False):
        levels = concurrency(records)
        axis.step([at for at, _ in levels], [level for _, level in levels], where="post", color=colour, label=label)
        tokens = tokens_by_second(records)
        if not tokens:
            continue
        if tokens_axis is None:
            tokens_axis = axis.twinx()
            tokens_axis.set_ylabel("tokens/s")
        middles = [second + 0.5 for second in range(len(tokens))]
        tokens_axis.plot(middles, tokens, color=colour, linewidth=0.9, linestyle="--", marker=".")
    _draw_failures(axis, phases)
    tokens_words = "" if tokens_axis is None else " (line) and output tokens of each second (dashed)"
    axis.set_title(f"Requests under way{tokens_words}", fontsize=10)
    axis.set_xlabel("s")
    axis.set_ylabel("requests")
    axis.set_ylim(bottom=0)
    if tokens_axis is not None:
        tokens_axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if len(axis.get_legend_handles_labels()[0]) > 1:
        axis.legend(fontsize=8, loc="lower center")


def _draw_failures(axis: Any, phases: Mapping[str, Sequence[Record]]) -> None:
    """Mark when requests failed, or were left."""
    ended = [record for records in phases.values() for record in records]
    for title, marker, colour, moments in (
        ("failed", "x", "#b01030", [record.ended_at for record in ended if record.failure]),
        ("left", "|", "#777777", [record.ended_at for record in ended if record.has_left]),
    ):
        if moments:
            axis.plot(moments, [0] * len(moments), marker, color=colour, label=title, clip_on=False, zorder=3)
