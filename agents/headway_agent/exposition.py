"""What Prometheus sees of an agent, where `metrics_listen` is set. docs/metrics.md explains each name."""

from collections.abc import Iterable, Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway_agent.inventory import Collected
from headway_agent.stream import SchedulerStream

__all__ = ["AgentMetrics", "MetricsServer"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class AgentMetrics(Collector):
    """Reads the streams, and what the last round brought, when scraped."""

    def __init__(self, streams: Sequence[SchedulerStream]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.round_seconds = Histogram(
            "headway_agent_round_seconds", "Reading all devices and engines once.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.latest: Collected | None = None
        self._streams = streams

    def collect(self) -> Iterable[Metric]:
        """Every metric but the rounds'."""
        connected = GaugeMetricFamily("headway_agent_connected", "1: the scheduler listens.", labels=["scheduler"])
        samples = CounterMetricFamily(
            "headway_agent_samples_dropped", "Samples that a newer one replaced.", labels=["scheduler"]
        )
        events = CounterMetricFamily(
            "headway_agent_events_dropped", "Events that the outbox had no room for.", labels=["scheduler"]
        )
        for stream in self._streams:
            connected.add_metric([stream.scheduler], float(stream.connected))
            samples.add_metric([stream.scheduler], stream.outbox.dropped_samples)
            events.add_metric([stream.scheduler], stream.outbox.dropped_events)
        ready = GaugeMetricFamily("headway_agent_engine_ready", "1: the engine answers.", labels=["endpoint"])
        latest = self.latest
        for endpoint in () if latest is None else latest.inventory.endpoints:
            address, rank = endpoint.key
            ready.add_metric([f"{address}@{rank}"], float(endpoint.ready))
        readings = () if latest is None else latest.sample.devices
        devices = GaugeMetricFamily("headway_agent_devices", "Devices read.", len(readings))
        lost = GaugeMetricFamily("headway_agent_devices_lost", "Of those, lost.", sum(each.lost for each in readings))
        return (connected, samples, events, ready, devices, lost)


class MetricsServer:
    """Serves `/metrics`. `port` is the port it listens on, once started."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self.port = 0
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/metrics", self._scrape)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, listen: str) -> None:
        """Listen on `HOST:PORT`. Raises OSError if the address is taken."""
        host, _, port = listen.rpartition(":")
        await self._runner.setup()
        await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close."""
        await self._runner.cleanup()

    async def _scrape(self, _request: web.Request) -> web.Response:
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
