"""Metrics of the edge, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from opendsec.api.models import Sandbox

if TYPE_CHECKING:
    from opendsec_server.edge.service import EdgeService

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
        self.execs = 0
        self._registry.register(self)

    def created(self, seconds: float) -> None:
        """Note a sandbox that runs."""
        self._creates.observe(seconds)

    def ended(self, record: Sandbox) -> None:
        """Note a sandbox that ended."""
        self._ended.labels(record.cause or "unknown").inc()

    def collect(self) -> Iterator[Metric]:
        """Yield what is now."""
        family = GaugeMetricFamily("opendsec_edge_sandboxes", "Sandboxes by state", labels=["state"])
        for state, count in Tally(life.record.state for life in self._service.lives.by_id.values()).items():
            family.add_metric([state], count)
        yield family
        running = sum(life.execs.running for life in self._service.lives.live())
        yield GaugeMetricFamily("opendsec_edge_execs_running", "Commands that run", value=running)
        load = self._service.load.refresh()
        yield GaugeMetricFamily("opendsec_edge_memory_available_bytes", "Memory", value=load.memory_available)
        yield GaugeMetricFamily("opendsec_edge_disk_free_bytes", "Disk", value=load.disk_free)

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)
