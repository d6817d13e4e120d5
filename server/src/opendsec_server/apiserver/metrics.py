"""Metrics of the apiserver, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
#: Segments that may stand after a sandbox id, so that callers cannot make up time series.
_KNOWN = frozenset(
    {
        "archive", "attach", "claim", "drain", "execs", "files", "fork", "images", "jobs", "list", "metrics", "mkdir",
        "move", "network", "nodes", "output", "pack_diff", "pause", "resolve", "resume", "sandboxes", "signal", "stat",
        "stdin", "stop", "tag", "undrain",
    }
)  # fmt: skip


class ApiMetrics:
    """Counts requests; ``observe`` costs a few microseconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "opendsec_api_request_seconds",
            "Time from a request to the end of its answer",
            ("method", "route"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._answers = Counter(
            "opendsec_api_answers", "Answers by status", ("route", "status"), registry=self.registry
        )
        self.inflight = Gauge("opendsec_api_requests_inflight", "Requests under way", registry=self.registry)
        self._inflight = 0
        self.inflight.set_function(lambda: self._inflight)
        self._timers: dict[tuple[str, str], Histogram] = {}
        self._counters: dict[tuple[str, int], Counter] = {}

    def begin(self) -> None:
        """Note the start of a request."""
        self._inflight += 1

    def end(self, method: str, path: str, status: int, seconds: float) -> None:
        """Note the end of a request; status 499 stands for a client that left."""
        self._inflight -= 1
        route = route_of(path)
        timer = self._timers.get((method, route))
        if timer is None:
            if len(self._timers) > 500:
                method, route = "other", "other"
            timer = self._timers[method, route] = self._seconds.labels(method, route)
        timer.observe(seconds)
        counter = self._counters.get((route, status))
        if counter is None:
            counter = self._counters[route, status] = self._answers.labels(route, str(status))
        counter.inc()

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)


def route_of(path: str) -> str:
    """Return the route of a path: every segment that names a thing becomes ``*``."""
    parts = path.split("/")
    if len(parts) < 3 or parts[1] != "v1":
        return path if path in {"/healthz", "/metrics", "/schema"} else "other"
    return "/v1/" + "/".join([part if part in _KNOWN else "*" for part in parts[2:8]])
