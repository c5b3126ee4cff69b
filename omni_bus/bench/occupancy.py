"""How many requests a server holds, from what it says of itself."""

from __future__ import annotations

import re
from typing import Any

import msgspec


class Occupancy(msgspec.Struct, frozen=True):
    """What a server said."""

    held: int
    """Requests that run or wait."""
    places: int | None
    """Requests that may run at once; None where the server does not say."""
    source: str
    """The route that said it."""

    @property
    def free(self) -> int | None:
        """Places that are free."""
        return None if self.places is None else max(0, self.places - self.held)


class _Pipeline(msgspec.Struct):
    in_flight: int
    queued: int
    max_in_flight: int


class _Health(msgspec.Struct):
    pipelines: dict[str, _Pipeline]


class _Load(msgspec.Struct):
    server_load: int


def from_health(document: Any) -> Occupancy | None:
    """Read our own ``/health``, which counts the requests of each pipeline."""
    try:
        pipelines = msgspec.convert(document, _Health).pipelines.values()
    except msgspec.ValidationError:
        return None
    held = sum(pipeline.in_flight + pipeline.queued for pipeline in pipelines)
    return Occupancy(held, sum(pipeline.max_in_flight for pipeline in pipelines), "/health")


_GAUGE = re.compile(r"^\w+:num_requests_(?:running|waiting)(?:\{[^}]*\})? +(\S+)$", re.MULTILINE)


def from_metrics(text: str) -> Occupancy | None:
    """Read the Prometheus gauges that vLLM and those that follow it have: requests running and waiting."""
    values = [float(value) for value in _GAUGE.findall(text)]
    return Occupancy(round(sum(values)), None, "/metrics") if values else None


def from_load(document: Any) -> Occupancy | None:
    """Read vLLM's ``/load``; last, because it says 0 unless the server was told to count."""
    try:
        return Occupancy(msgspec.convert(document, _Load).server_load, None, "/load")
    except msgspec.ValidationError:
        return None
