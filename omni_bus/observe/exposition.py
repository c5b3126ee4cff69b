"""Prometheus' text exposition format, version 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from omni_bus.wire.metrics import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(metrics: Iterable[Metric]) -> str:
    """Write metrics; those of one name, from several replicas say, become one family, as the format wants."""
    families: dict[str, list[Metric]] = {}
    for metric in metrics:
        families.setdefault(metric.name, []).append(metric)
    lines: list[str] = []
    for name, members in families.items():
        first = members[0]
        # In this version of the format a counter's family has the name of its samples.
        exposed = f"{name}_total" if first.kind == "counter" and not name.endswith("_total") else name
        lines.append(f"# HELP {exposed} {_escaped(first.help)}")
        lines.append(f"# TYPE {exposed} {'untyped' if first.kind == 'unknown' else first.kind}")
        lines += [
            f"{sample.name}{labels_of(sample.labels)} {_number(sample.value)}"
            for member in members
            for sample in member.samples
        ]
    return "".join(f"{line}\n" for line in lines)


def labels_of(labels: Mapping[str, str]) -> str:
    """Write labels, nothing where there are none: ``{stage="llm",replica="0"}``."""
    pairs = ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
