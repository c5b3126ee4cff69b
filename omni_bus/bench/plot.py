"""A run as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_bus.bench.measures import METRICS, measure
from omni_bus.bench.summary import concurrency, tokens_by_second
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_bus.bench.record import Record

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


def draw(phases: Mapping[str, Sequence[Record]], heading: str, path: str) -> None:
    """Draw distributions of latencies, and requests and tokens over time, into a file.

    Args:
        phases: requests by the phase's label.
        heading: what was measured.
        path: of the file; its ending decides the format.
    """
    from matplotlib import pyplot as plt

    names = _names(phases)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.2), constrained_layout=True)
    for axis, name in zip((axes[0][0], axes[0][1], axes[1][0]), names, strict=False):
        _draw_distribution(axis, phases, name)
    for axis in (axes[0][0], axes[0][1], axes[1][0])[len(names) :]:
        axis.set_axis_off()
    _draw_time(axes[1][1], phases)
    figure.suptitle(heading, fontsize=11)
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
        p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
        axis.axvline(p99, color=colour, linewidth=0.8, linestyle=":")
        axis.annotate(f"p99 {p99:.3g}", (p99, 0.03), color=colour, fontsize=8, rotation=90, ha="right", va="bottom")
    axis.set_title(metric.title, fontsize=10)
    axis.set_xlabel(metric.unit)
    axis.set_ylabel("share of values")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    if len(phases) > 1:
        axis.legend(fontsize=8, loc="center right")


def _draw_time(axis: Any, phases: Mapping[str, Sequence[Record]]) -> None:
    """Draw requests under way, tokens of each second, and where requests failed, over time."""
    tokens_axis = axis.twinx()
    for (label, records), colour in zip(phases.items(), _COLOURS, strict=False):
        levels = concurrency(records)
        axis.step([at for at, _ in levels], [level for _, level in levels], where="post", color=colour, label=label)
        tokens = tokens_by_second(records)
        middles = [second + 0.5 for second in range(len(tokens))]
        tokens_axis.plot(middles, tokens, color=colour, linewidth=0.9, linestyle="--", marker=".")
        failed = [record.ended_at for record in records if record.failure]
        if failed:
            axis.plot(failed, [0] * len(failed), "x", color="#b01030", label=f"failed, {label}")
    axis.set_title("Requests under way (line) and output tokens of each second (dashed)", fontsize=10)
    axis.set_xlabel("s")
    axis.set_ylabel("requests")
    axis.set_ylim(bottom=0)
    tokens_axis.set_ylabel("tokens/s")
    tokens_axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if len(phases) > 1 or axis.get_legend_handles_labels()[0][1:]:
        axis.legend(fontsize=8, loc="lower center")
