"""The gateway's composition: HTTP server, client, engines, metrics."""

import asyncio
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import grpc
import msgspec
import structlog
from aiohttp import web
from headway.routing.v1 import routing_pb2 as pb
from headway_client import ClientOptions, HeadwayClient, RouteRefused
from headway_openai.body import Api, parse_body
from headway_openai.errors import ApiError
from headway_tracing.build import trace_context, tracing_to
from headway_tracing.kinds import Kind
from prometheus_client import generate_latest

from headway_gateway.config import SYSTEM_ROOTS, GatewaySettings
from headway_gateway.engines import Engines
from headway_gateway.errors import from_refusal, to_response
from headway_gateway.identity import Identities
from headway_gateway.keys import UserKeys
from headway_gateway.metrics import GatewayMetrics
from headway_gateway.proxy import Ask, Proxy

if TYPE_CHECKING:
    from headway_tracing.tracing import Tracing

__all__ = ["Gateway", "serve"]

log = structlog.get_logger(__name__)

_APIS: tuple[Api, ...] = ("chat/completions", "completions", "embeddings")
_PRIORITIES = {
    "best-effort": pb.PRIORITY_BEST_EFFORT,
    "standard": pb.PRIORITY_STANDARD,
    "critical": pb.PRIORITY_CRITICAL,
}
_MAX_ID = 128
_TRACEPARENT_PARTS = 4
_TRACE_ID_LENGTH = 32
_REQUEST_ID = web.RequestKey("request_id", str)
_NO_VIEW = ApiError(503, "not_ready", "no scheduler has answered yet", reason="NO_SCHEDULER")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """One gateway, from `start` to `close`; also an async context manager."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> None:
        options = ClientOptions(fail_open=settings.fail_open, fail_open_after_s=settings.fail_open_after_s)
        self.client = HeadwayClient(
            settings.schedulers,
            token=settings.current_token,
            options=options,
            credentials=None if settings.scheduler_ca is None else partial(_credentials, settings),
            clock=clock,
        )
        self._settings = settings
        self._clock = clock
        self._metrics = GatewayMetrics(self.client)
        keys = UserKeys(self.client.identify_keys, clock, fail_open=settings.fail_open) if settings.user_keys else None
        self._identities = Identities(settings, keys)
        self._tracing = tracing_to(settings.trace_endpoint, "headway-gateway", settings.trace_share)
        self._draining = False

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except OSError:  # the port is taken
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen, and begin to connect to the scheduler."""
        self.client.start()
        self._engines = Engines(self._settings)
        self._proxy = Proxy(self.client, self._engines, self._settings, self._metrics, self._clock, self._tracing)
        self._progress = asyncio.create_task(self._report_progress())
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=self._settings.drain_timeout_s,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port)
        await site.start()
        log.info("gateway_listening", host=self._settings.host, port=self.port)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def close(self) -> None:
        """Accept no more, let what is in flight finish within `drain_timeout_s`, then close."""
        self._draining = True
        log.info("gateway_draining")
        await self._runner.cleanup()
        self._progress.cancel()
        await asyncio.gather(self._progress, return_exceptions=True)
        await self._identities.close()
        await self.client.close()
        await self._engines.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[self._answer_errors])
        for api in _APIS:
            app.router.add_post(f"/v1/{api}", self._serve(api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    def _serve(self, api: Api) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            arrived = self._clock()
            if self._draining:
                raise ApiError(503, "shutting_down", "the gateway is going away", reason="SHUTTING_DOWN")
            tenant = await self._identities.tenant_of(request.headers)
            ask = Ask(
                api=api,
                body=parse_body(api, await request.read()),
                tenant=tenant,
                request_id=request[_REQUEST_ID],
                session_id=_session_id(request),
                priority=self._priority(request),
                trace=trace_context(request.headers),
                arrived=arrived,
            )
            with self._metrics.active.track_inprogress():
                if self._tracing is None:
                    return await self._proxy.serve(request, ask)
                return await self._traced(self._tracing, request, ask)

        return handle

    async def _traced(self, tracing: "Tracing", request: web.Request, ask: Ask) -> web.StreamResponse:
        """Serve it within a span of its own, below the caller's if it named one."""
        attributes = {"headway.request_id": ask.request_id, "headway.tenant": ask.tenant}
        span = tracing.start(f"POST /v1/{ask.api}", ask.trace, kind=Kind.SERVER, attributes=attributes)
        structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")
        try:
            response = await self._proxy.serve(request, replace(ask, trace=tracing.headers(span)))
            span.set_attribute("http.response.status_code", response.status)
        except (ApiError, RouteRefused) as refusal:
            span.set_attribute("headway.refusal", getattr(refusal, "reason", "") or "")
            raise
        finally:
            span.end()
        return response

    def _priority(self, request: web.Request) -> pb.Priority.ValueType:
        named = request.headers.get("x-headway-priority", "")
        if not named or not self._settings.allow_priority_header:
            return pb.PRIORITY_UNSPECIFIED
        if named not in _PRIORITIES:
            message = f"x-headway-priority: one of {', '.join(_PRIORITIES)} is wanted"
            raise ApiError(400, "invalid_value", message, param="x-headway-priority")
        return _PRIORITIES[named]

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Give the request its id, and give every failure OpenAI's shape."""
        request[_REQUEST_ID] = _request_id(request)
        _bind(request)
        try:
            response = await handler(request)
        except ApiError as error:
            response = to_response(error, request[_REQUEST_ID])
        except RouteRefused as refusal:
            response = to_response(from_refusal(refusal), request[_REQUEST_ID])
            if self._settings.log_requests:
                log.info("route_refused", reason=refusal.reason, status=response.status)
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is larger than {self._settings.max_body_bytes} bytes"
            response = to_response(ApiError(413, "body_too_large", message), request[_REQUEST_ID])
        except web.RequestPayloadError:
            message = "the body broke off, or is not encoded as it says"
            response = to_response(ApiError(400, "incomplete_body", message), request[_REQUEST_ID])
        except web.HTTPException as error:
            response = to_response(
                ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason),
                request[_REQUEST_ID],
            )
        except Exception:
            log.exception("request_failed")
            response = to_response(ApiError(500, "internal", "the gateway failed"), request[_REQUEST_ID])
        api = request.path.removeprefix("/v1/")
        if api in _APIS:
            self._metrics.requests.labels(api, str(response.status)).inc()
            if self._settings.log_requests:
                log.info("request_answered", api=api, status=response.status)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        tenant = await self._identities.tenant_of(request.headers)
        if self.client.view is None:
            raise _NO_VIEW
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "headway"} for name in self.client.models(tenant)
        ]
        body = msgspec.json.encode({"object": "list", "data": models})
        return web.Response(body=body, content_type="application/json")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        """Ready: a scheduler answers, or there is a view to go on by without one."""
        can_route = self.client.connected or (self._settings.fail_open and self.client.view is not None)
        if self._draining or not can_route:
            return web.Response(status=503, text="not ready\n")
        return web.Response(text="ok\n")

    async def _show_metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(self._settings.progress_interval_s)
            self._proxy.report_progress()


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until SIGTERM or SIGINT, then drain it."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Gateway(settings) as gateway:
        if settings.port_file is not None:
            unfinished = settings.port_file.with_suffix(".partial")
            unfinished.write_text(str(gateway.port))
            unfinished.rename(settings.port_file)
        await stopped.wait()


def _credentials(settings: GatewaySettings) -> grpc.ChannelCredentials:
    """How the schedulers prove who they are, and how the gateway does. Raises OSError."""
    pem = (
        None if settings.scheduler_ca == SYSTEM_ROOTS else settings.scheduler_ca,
        settings.scheduler_key,
        settings.scheduler_certificate,
    )
    return grpc.ssl_channel_credentials(*(None if path is None else path.read_bytes() for path in pem))


def _session_id(request: web.Request) -> str:
    """What aiohttp could not decode in the header stands as surrogates, which no message can carry."""
    return request.headers.get("x-headway-session", "").encode("utf-8", "replace").decode()[:_MAX_ID]


def _bind(request: web.Request) -> None:
    """Every line that is logged for this request says which it is, and of which trace."""
    names = {"request_id": request[_REQUEST_ID]}
    parent = trace_context(request.headers).get("traceparent", "").split("-")
    if len(parent) == _TRACEPARENT_PARTS and len(parent[1]) == _TRACE_ID_LENGTH:
        names["trace_id"] = parent[1]
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**names)


def _request_id(request: web.Request) -> str:
    given = request.headers.get("x-request-id", "")
    fit = 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()
    return given if fit else uuid.uuid4().hex
