"""The HTTP port: liveness, readiness, metrics, our services by the Connect protocol, and Route and Report as JSON."""

import ssl
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from headway_scheduler.app import Scheduler
from headway_scheduler.envoy.light import LightPicker
from headway_scheduler.envoy.light_http import LightHttp
from headway_scheduler.exposition import SchedulerCollector
from headway_scheduler.rpc.calls import UnaryCalls
from headway_scheduler.rpc.connect import Connect
from headway_scheduler.rpc.http_door import HttpDoor
from headway_scheduler.rpc.http_methods import HttpMethods
from headway_scheduler.rpc.json_api import JsonApi
from headway_scheduler.tls import CertificateFiles, http_context

__all__ = ["HttpServer"]


class HttpServer:
    """Serves `/healthz`, `/readyz`, `/metrics`, `Connect`, `JsonApi` and `LightHttp`.

    `port` is the port it listens on, once started; `mount` adds what else is served there.
    """

    def __init__(self, scheduler: Scheduler, mount: Callable[[web.UrlDispatcher], None] = lambda _router: None) -> None:
        self.port = 0
        self._scheduler = scheduler
        self._metrics = CollectorRegistry()
        self._metrics.register(SchedulerCollector(scheduler))
        app = web.Application(client_max_size=scheduler.config.max_message_bytes)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._scrape)
        door, calls = HttpDoor(scheduler), UnaryCalls(scheduler)
        methods = HttpMethods(scheduler, door.authenticator.tenant_of)
        Connect(door, methods).add_to(app.router)
        JsonApi(door, methods).add_to(app.router)
        LightHttp(LightPicker(scheduler, calls), calls, door).add_to(app.router)
        mount(app.router)
        # A call that its caller abandons is cancelled, as with gRPC: what it waits for or was given is let go.
        # Bodies are decoded by `HttpDoor`: what aiohttp cannot decode it answers itself, in nobody's terms.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5, auto_decompress=False
        )

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
