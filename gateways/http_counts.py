"""What an HTTP gateway counts of its requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from aiohttp import web

from omni_bus.wire.metrics import Metric, Sample

if TYPE_CHECKING:
    from omni_bus.wire.metrics import Kind


class HttpCounts:
    """Requests by route and outcome. Their labels are the router's and not the client's, so they stay few."""

    def __init__(self) -> None:
        self.num_open = 0
        self._ended: Counter[tuple[str, str, str]] = Counter()

    def end(self, request: web.BaseRequest, outcome: str) -> None:
        """Count a request that ended; its outcome is a status, or ``gone`` where the client left."""
        resource = request.match_info.route.resource if isinstance(request, web.Request) else None
        route, method = ("none", "any") if resource is None else (resource.canonical, request.method)
        self._ended[method, route, outcome] += 1

    def metrics(self, process: str) -> list[Metric]:
        """Return the counts of the gateway's process of that name."""
        requests = [
            Sample(
                "omni_bus_http_requests_total",
                count,
                {"process": process, "method": method, "route": route, "status": outcome},
            )
            for (method, route, outcome), count in self._ended.items()
        ]
        labels = {"process": process}
        return [
            Metric("omni_bus_http_requests", "counter", "HTTP requests that have ended.", tuple(requests)),
            one("omni_bus_http_requests_open", "gauge", "HTTP requests under way.", self.num_open, labels),
        ]


def one(name: str, kind: Kind, words: str, value: float, labels: dict[str, str]) -> Metric:
    """Return a metric of one sample."""
    return Metric(name, kind, words, (Sample(exposed_name(name, kind), float(value), labels),))


def exposed_name(name: str, kind: Kind) -> str:
    """Return the name of a metric's samples."""
    return f"{name}_total" if kind == "counter" else name
