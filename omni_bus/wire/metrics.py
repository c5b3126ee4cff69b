"""Measures of an engine as Prometheus models them: families of samples, each with a name, labels and a value."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "unknown"]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One value."""

    name: str
    """As it is exposed: the family's name, with ``_total``, ``_bucket``, ``_sum`` or ``_count`` where its kind has
    one."""
    value: float
    labels: dict[str, str] = {}


class Metric(msgspec.Struct, frozen=True, array_like=True):
    """One family of samples."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...] = ()
