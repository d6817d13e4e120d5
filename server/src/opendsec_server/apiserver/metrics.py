"""Metrics of the apiserver, in Prometheus' text format.

Every request ends in ``end``, so it counts with plain integers; the text is put together when it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
#: Segments that name no thing; everything else becomes ``*``, so that callers cannot make up time series.
_KNOWN = frozenset(
    {
        "archive", "attach", "claim", "drain", "execs", "files", "fork", "images", "jobs", "list", "metrics", "mkdir",
        "move", "network", "nodes", "output", "pack_diff", "pause", "resolve", "resume", "sandboxes", "signal", "stat",
        "stdin", "stop", "tag", "undrain",
    }
)  # fmt: skip
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "WS"})
_MAX_SERIES = 2000


class ApiMetrics(Collector):
    """Counts requests by method, route and status."""

    def __init__(self) -> None:
        self._inflight = 0
        self._series: dict[tuple[str, str, int], list[float]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def begin(self) -> None:
        """Note the start of a request."""
        self._inflight += 1

    def end(self, method: str, path: str, status: int, seconds: float) -> None:
        """Note the end of a request; status 499 stands for a client that left."""
        self._inflight -= 1
        key = (method, route_of(path), status)
        series = self._series.get(key)
        if series is None:
            if method not in _METHODS or len(self._series) >= _MAX_SERIES:
                key = ("other", "other", status)
            series = self._series.setdefault(key, [0] * (len(_BOUNDS) + 1) + [0.0])
        series[bisect_left(_BOUNDS, seconds)] += 1
        series[-1] += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the text format."""
        yield GaugeMetricFamily("opendsec_api_requests_inflight", "Requests under way", value=self._inflight)
        family = HistogramMetricFamily(
            "opendsec_api_request_seconds",
            "Time from a request to the end of its answer",
            labels=("method", "route", "status"),
        )
        names = [*(str(bound) for bound in _BOUNDS), "+Inf"]
        for (method, route, status), series in sorted(self._series.items()):
            buckets = list(zip(names, accumulate(series[:-1]), strict=True))
            family.add_metric((method, route, str(status)), buckets, series[-1])
        yield family

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)


def route_of(path: str) -> str:
    """Return the route of a path: every segment that names a thing becomes ``*``."""
    parts = path.split("/", 8)
    if len(parts) < 3 or parts[1] != "v1":
        return path if path in {"/healthz", "/metrics", "/schema"} else "other"
    return "/v1/" + "/".join([part if part in _KNOWN else "*" for part in parts[2:8]])
