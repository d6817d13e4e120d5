"""Metrics of the edge, in Prometheus' text format."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from opendsec.api.models import Sandbox

if TYPE_CHECKING:
    from opendsec_server.edge.service import EdgeService

_EXEC_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 600, 3600)
_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class EdgeMetrics(Collector):
    """Counts what happened; what is now, is counted when asked."""

    def __init__(self, service: EdgeService) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._creates = Histogram(
            "opendsec_edge_create_seconds", "Time to bring a sandbox up", buckets=_BOUNDS, registry=self._registry
        )
        self._ended = Counter("opendsec_edge_sandboxes_ended", "Ended sandboxes", ["cause"], registry=self._registry)
        #: Ended commands by duration, one more than there are bounds: this is on the way of every command.
        self._execs = [0] * (len(_EXEC_BOUNDS) + 1)
        self._exec_seconds = 0.0
        self._registry.register(self)

    def created(self, seconds: float) -> None:
        """Note a sandbox that runs."""
        self._creates.observe(seconds)

    def ended(self, record: Sandbox) -> None:
        """Note a sandbox that ended."""
        self._ended.labels(record.cause or "unknown").inc()

    def exec_ended(self, seconds: float) -> None:
        """Note a command that ended after this time."""
        self._execs[bisect_left(_EXEC_BOUNDS, seconds)] += 1
        self._exec_seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield what is now."""
        family = GaugeMetricFamily("opendsec_edge_sandboxes", "Sandboxes by state", labels=["state"])
        for state, count in Tally(life.record.state for life in self._service.lives.by_id.values()).items():
            family.add_metric([state], count)
        yield family
        running = sum(life.execs.running for life in self._service.lives.live())
        yield GaugeMetricFamily("opendsec_edge_execs_running", "Commands that run", value=running)
        buckets, total = [], 0
        for bound, count in zip((*_EXEC_BOUNDS, math.inf), self._execs, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else str(float(bound)), float(total)))
        yield HistogramMetricFamily(
            "opendsec_edge_exec_seconds", "Time that commands ran", buckets=buckets, sum_value=self._exec_seconds
        )
        yield GaugeMetricFamily("opendsec_edge_creating", "Creates under way", value=self._service.admission.creating)
        load = self._service.load.refresh()
        yield GaugeMetricFamily("opendsec_edge_memory_available_bytes", "Memory", value=load.memory_available)
        yield GaugeMetricFamily("opendsec_edge_disk_free_bytes", "Disk", value=load.disk_free)

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)
