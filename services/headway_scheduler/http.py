"""The HTTP port: liveness, readiness, metrics, and Route and Report as JSON."""

import ssl
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headway_scheduler.app import Scheduler
from headway_scheduler.rpc.json_api import JsonApi

__all__ = ["HttpServer"]


class _SchedulerCollector(Collector):
    """Reads the scheduler's counts when scraped: nothing is counted twice, nothing sits on the hot path."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> "list[CounterMetricFamily | GaugeMetricFamily]":
        scheduler = self._scheduler
        fleet = scheduler.fleet
        routes = CounterMetricFamily("headway_routes", "Routes answered with an endpoint.")
        routes.add_metric([], scheduler.dispatcher.routes)
        refusals = CounterMetricFamily("headway_refusals", "Routes refused.", labels=["reason"])
        for reason, count in scheduler.refusals.items():
            refusals.add_metric([reason], count)
        decisions = CounterMetricFamily("headway_strategy_decisions", "Pricings that counted.", labels=["strategy"])
        failures = CounterMetricFamily("headway_strategy_failures", "Pricings discarded.", labels=["strategy"])
        for installed in scheduler.registry.installed.values():
            decisions.add_metric([installed.config.id], installed.decisions)
            failures.add_metric([installed.config.id], installed.failures)
        inflight = GaugeMetricFamily("headway_endpoint_inflight", "Reservations held.", labels=["endpoint"])
        open_ = GaugeMetricFamily("headway_endpoint_open", "1: no hard guard stands.", labels=["endpoint"])
        for endpoint in fleet.endpoints.values():
            inflight.add_metric([endpoint.id], int(fleet.columns.inflight[endpoint.slot]))
            open_.add_metric([endpoint.id], int(fleet.columns.open[endpoint.slot]))
        return [
            routes,
            refusals,
            decisions,
            failures,
            inflight,
            open_,
            GaugeMetricFamily("headway_reservations", "Reservations held.", len(scheduler.ledger.reservations)),
            GaugeMetricFamily("headway_holds", "Routes held.", len(scheduler.dispatcher.holds)),
            GaugeMetricFamily("headway_nodes", "Nodes known.", len(fleet.nodes)),
            GaugeMetricFamily("headway_index_blocks", "Distinct blocks in the index.", len(scheduler.index)),
            GaugeMetricFamily("headway_envoys", "Envoys that follow the fleet.", scheduler.discovery.streams),
            CounterMetricFamily("headway_discovery_answers", "Answers sent to Envoys.", scheduler.discovery.answers),
            CounterMetricFamily(
                "headway_discovery_rejections", "Answers that an Envoy rejected.", scheduler.discovery.rejections
            ),
            GaugeMetricFamily("headway_kv_blocks", "Distinct blocks that engines say they hold.", len(scheduler.kv)),
            GaugeMetricFamily("headway_kv_feeds", "Endpoints with KV events.", scheduler.kv.feeds.bit_count()),
            GaugeMetricFamily("headway_store_available", "1: Postgres answers.", int(scheduler.store.available)),
            GaugeMetricFamily("headway_leader", "1: answers Route.", int(scheduler.leadership.leads())),
            GaugeMetricFamily("headway_draining", "1: going away.", int(scheduler.draining)),
        ]


class HttpServer:
    """Serves `/healthz`, `/readyz`, `/metrics` and `JsonApi`. `port` is the port it listens on, once started.

    `mount` adds what else is served there.
    """

    def __init__(self, scheduler: Scheduler, mount: Callable[[web.UrlDispatcher], None] = lambda _router: None) -> None:
        self.port = 0
        self._scheduler = scheduler
        self._metrics = CollectorRegistry()
        self._metrics.register(_SchedulerCollector(scheduler))
        app = web.Application(client_max_size=scheduler.config.max_message_bytes)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._scrape)
        JsonApi(scheduler).add_to(app.router)
        mount(app.router)
        # A call that its caller abandons is cancelled, as with gRPC: what it waits for or was given is let go.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)

    async def start(self, listen: str) -> None:
        """Listen on `HOST:PORT`. Raises OSError if the address is taken."""
        host, _, port = listen.rpartition(":")
        await self._runner.setup()
        site = web.TCPSite(self._runner, host.strip("[]"), int(port), ssl_context=self._tls())
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close."""
        await self._runner.cleanup()

    def _tls(self) -> ssl.SSLContext | None:
        config = self._scheduler.config
        if not config.http_tls or config.tls_certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.tls_certificate, config.tls_key)
        return context

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._scheduler.draining:
            return web.Response(status=503, text="draining\n")
        if not self._scheduler.leadership.leads():
            return web.Response(status=503, text=f"{self._scheduler.leadership.standing.value}\n")
        return web.Response(text="ok\n")

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})
