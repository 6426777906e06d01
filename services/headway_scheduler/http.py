"""The HTTP port: liveness, readiness, metrics, and Route and Report as JSON."""

import ssl
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headway_scheduler.app import Scheduler
from headway_scheduler.envoy.light import LightPicker
from headway_scheduler.envoy.light_http import LightHttp
from headway_scheduler.rpc.calls import UnaryCalls
from headway_scheduler.rpc.json_api import JsonApi
from headway_scheduler.tls import CertificateFiles, http_context

__all__ = ["HttpServer", "SchedulerCollector"]


_MOST_TENANTS: Final = 200


class SchedulerCollector(Collector):
    """Reads the scheduler's counts when scraped: nothing is counted twice, nothing sits on the hot path."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> "list[CounterMetricFamily | GaugeMetricFamily]":
        """Every metric, as of now."""
        scheduler = self._scheduler
        fleet = scheduler.fleet
        routes = CounterMetricFamily("headway_routes", "Routes answered with an endpoint.")
        routes.add_metric([], scheduler.dispatcher.routes)
        refusals = CounterMetricFamily("headway_refusals", "Routes refused.", labels=["reason"])
        for reason, count in scheduler.refusals.items():
            refusals.add_metric([reason], count)
        alone = CounterMetricFamily(
            "headway_fail_open_routes", "Routes that data planes made by themselves.", labels=["tenant"]
        )
        for tenant, count in scheduler.fail_open_routes.items():
            alone.add_metric([tenant], count)
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
        service = CounterMetricFamily(
            "headway_tenant_service", "Service got, as fair share counts tokens.", labels=["arena", "tenant"]
        )
        ahead = GaugeMetricFamily(
            "headway_tenant_ahead", "Its counter above the least, over its weight.", labels=["arena", "tenant"]
        )
        held = GaugeMetricFamily("headway_tenant_holds", "Routes held, by tenant.", labels=["arena", "tenant"])
        for share in scheduler.dispatcher.fair.shares(most=_MOST_TENANTS):
            labels = [share.arena, share.tenant]
            service.add_metric(labels, share.service)
            ahead.add_metric(labels, share.ahead)
            held.add_metric(labels, scheduler.dispatcher.holds.tenants.get(share.tenant, 0))
        return [
            service,
            ahead,
            held,
            *_health(scheduler),
            routes,
            refusals,
            alone,
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
            _authentication_failures(scheduler),
            GaugeMetricFamily("headway_store_available", "1: Postgres answers.", int(scheduler.store.available)),
            GaugeMetricFamily("headway_leader", "1: answers Route.", int(scheduler.leadership.leads())),
            GaugeMetricFamily("headway_draining", "1: going away.", int(scheduler.draining)),
        ]


def _health(scheduler: Scheduler) -> "list[CounterMetricFamily | GaugeMetricFamily]":
    """Ejections and retries."""
    fleet, retries = scheduler.fleet, scheduler.dispatcher.retries
    ejections = CounterMetricFamily("headway_ejections", "Endpoints ejected.", labels=["reason"])
    for reason, count in fleet.ejections.counts.items():
        ejections.add_metric([reason.value], count)
    ejected = GaugeMetricFamily("headway_endpoints_ejected", "Ejected or probed now.", labels=["model"])
    panic = GaugeMetricFamily("headway_panic", "1: a failing endpoint stays in, as too few are left.", labels=["model"])
    in_progress = GaugeMetricFamily("headway_retries", "Retries in progress.", labels=["model"])
    refused = CounterMetricFamily("headway_retries_refused", "Retries beyond the budget.", labels=["model"])
    for model, panics in fleet.in_panic().items():
        ejected.add_metric([model], fleet.ejected_of(model))
        panic.add_metric([model], int(panics))
        in_progress.add_metric([model], retries.now.get(model, 0))
    for model, count in retries.refused.items():
        refused.add_metric([model], count)
    spared = CounterMetricFamily("headway_ejections_spared", "Ejections not made.", fleet.ejections.spared)
    return [ejections, spared, ejected, panic, in_progress, refused]


def _authentication_failures(scheduler: Scheduler) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "headway_authentication_failures", "Calls whose credential did not count.", labels=["answer"]
    )
    family.add_metric(["refused"], scheduler.authentication.failed)
    family.add_metric(["too_many"], scheduler.authentication.limited)
    return family


class HttpServer:
    """Serves `/healthz`, `/readyz`, `/metrics` and `JsonApi`. `port` is the port it listens on, once started."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.port = 0
        self._scheduler = scheduler
        self._metrics = CollectorRegistry()
        self._metrics.register(SchedulerCollector(scheduler))
        app = web.Application(client_max_size=scheduler.config.max_message_bytes)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._scrape)
        json_api, calls = JsonApi(scheduler), UnaryCalls(scheduler)
        json_api.add_to(app.router)
        LightHttp(LightPicker(scheduler, calls), calls, json_api.admit).add_to(app.router)
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
        if not config.http_tls or config.tls_certificate is None or config.tls_key is None:
            return None
        return http_context(CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca))

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
