"""What Prometheus sees."""

import dataclasses
from collections.abc import Iterable

from headway_client import HeadwayClient
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["GatewayMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GatewayMetrics:
    """The gateway's own registry, with the client's counters in it."""

    def __init__(self, client: HeadwayClient) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headway_gateway_requests", "Requests answered.", ("api", "status"), registry=self.registry
        )
        self.outcomes = Counter(
            "headway_gateway_outcomes", "How reservations ended.", ("outcome",), registry=self.registry
        )
        self.active = Gauge("headway_gateway_active_requests", "Requests being served.", registry=self.registry)
        self.route_seconds = Histogram(
            "headway_gateway_route_seconds",
            "Time to be given an endpoint, holds included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.ttft_seconds = Histogram(
            "headway_gateway_ttft_seconds",
            "From the request's arrival to the first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.engine_failures = Counter(
            "headway_gateway_engine_failures",
            "Attempts that an engine failed.",
            ("kind",),
            registry=self.registry,
        )
        self.retries = Counter("headway_gateway_retries", "Further attempts made.", registry=self.registry)
        self.retries_denied = Counter(
            "headway_gateway_retries_denied",
            "Further attempts that the budget forbade.",
            registry=self.registry,
        )
        self.registry.register(_ClientCollector(client))


class _ClientCollector(Collector):
    def __init__(self, client: HeadwayClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        for field in dataclasses.fields(self._client.stats):
            value = getattr(self._client.stats, field.name)
            yield CounterMetricFamily(f"headway_client_{field.name}", f"headway_client's {field.name}.", value=value)
        yield GaugeMetricFamily(
            "headway_client_connected",
            "Whether a scheduler takes routes.",
            value=float(self._client.connected),
        )
        yield GaugeMetricFamily(
            "headway_client_live_reservations", "Reservations not yet ended.", value=float(self._client.live)
        )
