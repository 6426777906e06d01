"""One request: route, forward, fail over, relay, settle."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import structlog
from aiohttp import web
from google.protobuf.duration_pb2 import Duration
from headway.routing.v1 import routing_pb2 as pb
from headway_client import HeadwayClient, Reservation, RouteRefused
from headway_openai.body import Api, ParsedBody, forwarded_body
from headway_openai.errors import ApiError, error_event
from headway_openai.sse import EventStream, Usage, parse_usage
from headway_tracing.kinds import Kind

from headway_gateway.budget import RetryBudget
from headway_gateway.config import GatewaySettings
from headway_gateway.engines import Answer, EngineError, Engines, failure_of
from headway_gateway.metrics import GatewayMetrics

if TYPE_CHECKING:
    from headway_tracing.tracing import Tracing
    from opentelemetry.trace import Span

__all__ = ["Ask", "Proxy"]

log = structlog.get_logger(__name__)

_RETRY_BUDGET = "RETRY_BUDGET"
"""The scheduler's refusal of a retry beyond all data planes' budget: to the user it is the failure that it was."""
_LAST_BYTES_S = 1.0
"""How long to wait for a stream's end after `[DONE]`, to keep the connection."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One user's request."""

    api: Api
    body: ParsedBody
    tenant: str
    request_id: str
    session_id: str
    priority: pb.Priority.ValueType
    trace: dict[str, str]
    """Trace headers, forwarded as they came."""
    arrived: float


@dataclass(slots=True, eq=False)
class _Transfer:
    """A reservation in use, and when its endpoint was asked."""

    reservation: Reservation
    sent: float
    events: EventStream | None = None
    span: "Span | None" = None
    """Of the attempt that is being made, where that is traced."""

    def end_span(self, outcome: str) -> None:
        """The attempt is over; once."""
        span, self.span = self.span, None
        if span is not None:
            span.set_attribute("headway.outcome", outcome)
            span.end()

    def delivered(self) -> pb.Usage:
        """What the client got, as well as it can be told without the engine's own count."""
        count = self.events.events if self.events is not None else 0
        usage = self.events.usage if self.events is not None else None
        if usage is not None:
            return _to_wire(usage)
        return pb.Usage(prompt_tokens=self.reservation.decision.prompt_tokens or None, completion_tokens=count)


class Proxy:
    """Serves requests through one client and one pool of connections."""

    def __init__(
        self,
        client: HeadwayClient,
        engines: Engines,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        tracing: "Tracing | None" = None,
    ) -> None:
        self._client = client
        self._engines = engines
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._tracing = tracing
        self._budget = RetryBudget(settings.retry_ratio, settings.retry_min)
        self._transfers: set[_Transfer] = set()
        max_wait = Duration()
        max_wait.FromNanoseconds(int(settings.max_wait_s * 1e9))
        self._max_wait = max_wait

    async def serve(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        """Answer one request. Raises ApiError or RouteRefused while nothing has been sent to the client."""
        transfer = _Transfer(await self._route(ask, []), self._clock())
        self._transfers.add(transfer)
        try:
            with self._budget.request():
                answer = await self._open(ask, transfer)
                try:
                    if answer.is_stream:
                        return await self._relay_stream(request, ask, transfer, answer)
                    return await self._relay_whole(ask, transfer, answer)
                finally:
                    # Keeps the connection if the answer was read to its end; else cuts it, and so the work.
                    answer.response.release()
        finally:
            self._transfers.discard(transfer)
            self._finish(transfer, pb.OUTCOME_CANCELLED, transfer.delivered())

    def report_progress(self) -> None:
        """Tell the scheduler that every request in flight is alive."""
        for transfer in self._transfers:
            transfer.reservation.progress(transfer.events.events if transfer.events is not None else None)

    # Routing and failing over

    async def _route(self, ask: Ask, excluded: list[str]) -> Reservation:
        request = pb.RouteRequest()
        request.CopyFrom(ask.body.route)
        # Users' ids may repeat; a reservation's must not.
        request.request_id = f"{ask.request_id}/{uuid.uuid4().hex[:12]}"
        request.tenant = ask.tenant
        request.session_id = ask.session_id
        request.priority = ask.priority
        request.excluded_endpoints.extend(excluded)
        request.max_wait.CopyFrom(self._max_wait)
        span = None if self._tracing is None else self._tracing.start("route", ask.trace, kind=Kind.CLIENT)
        trace = ask.trace if self._tracing is None or span is None else self._tracing.headers(span)
        request.traceparent, request.tracestate = trace.get("traceparent", ""), trace.get("tracestate", "")
        began = self._clock()
        try:
            reservation = await self._client.route(request, timeout_s=self._settings.route_timeout_s)
        finally:
            if span is not None:
                span.end()
        self._metrics.route_seconds.observe(self._clock() - began)
        return reservation

    async def _open(self, ask: Ask, transfer: _Transfer) -> Answer:
        """Ask endpoint after endpoint until one answers below 500."""
        failed: list[str] = []
        retrying = False
        try:
            while True:
                reservation = transfer.reservation
                body = forwarded_body(ask.body, reservation.model, reservation.cache_salt)
                headers = {"x-request-id": ask.request_id, **self._trace_upstream(ask, transfer)}
                transfer.sent = self._clock()
                try:
                    return await self._engines.open(reservation, f"/v1/{ask.api}", body, headers)
                except EngineError as failure:
                    failed.append(reservation.endpoint.name)
                    self._note_failure(ask, transfer, failure)
                    retrying = retrying or self._may_retry(failure)
                    if not (retrying and failure.retryable) or len(failed) >= self._settings.max_attempts:
                        self._finish(transfer, failure.outcome, http_status=failure.http_status)
                        raise _bad_gateway(failure) from failure
                    self._metrics.retries.inc()
                    await self._move_on(ask, transfer, failure, failed)
        finally:
            if retrying:
                self._budget.end_retry()

    def _trace_upstream(self, ask: Ask, transfer: _Transfer) -> dict[str, str]:
        """The context that goes on to the engine: as it came, or of a span for this attempt."""
        if self._tracing is None:
            return ask.trace
        attributes = {"headway.endpoint": transfer.reservation.endpoint.name}
        transfer.span = self._tracing.start("upstream", ask.trace, kind=Kind.CLIENT, attributes=attributes)
        return self._tracing.headers(transfer.span)

    def _may_retry(self, failure: EngineError) -> bool:
        if not failure.retryable:
            return False
        allowed = self._budget.begin_retry()
        if not allowed:
            self._metrics.retries_denied.inc()
        return allowed

    async def _move_on(self, ask: Ask, transfer: _Transfer, failure: EngineError, failed: list[str]) -> None:
        """Go to the next fallback; without one, give the reservation up and route anew."""
        untried = [e for e in transfer.reservation.fallbacks if e.name not in failed]
        if untried:
            transfer.reservation.served_by(untried[0])
            return
        self._finish(transfer, failure.outcome, http_status=failure.http_status)
        try:
            transfer.reservation = await self._route(ask, failed)
        except RouteRefused as refusal:
            if refusal.reason != _RETRY_BUDGET:
                raise
            self._metrics.retries_denied.inc()
            raise _bad_gateway(failure) from failure

    def _note_failure(self, ask: Ask, transfer: _Transfer, failure: EngineError) -> None:
        kind = pb.Outcome.Name(failure.outcome).removeprefix("OUTCOME_").lower()
        self._metrics.engine_failures.labels(kind).inc()
        transfer.end_span(kind)
        log.warning(
            "engine_failed",
            endpoint=transfer.reservation.endpoint.name,
            kind=kind,
            http_status=failure.http_status,
        )

    # Relaying

    async def _relay_whole(self, ask: Ask, transfer: _Transfer, answer: Answer) -> web.Response:
        status = answer.response.status
        try:
            body = await answer.response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            failure = failure_of(error)
            self._note_failure(ask, transfer, failure)
            self._finish(transfer, failure.outcome, http_status=status)
            raise _bad_gateway(failure) from error
        if status >= 400:
            self._finish(transfer, pb.OUTCOME_CLIENT_ERROR, http_status=status)
        else:
            usage = parse_usage(body)
            self._finish(transfer, pb.OUTCOME_SUCCESS, _to_wire(usage) if usage else None, http_status=status)
        return web.Response(status=status, body=body, headers=self._headers(ask, transfer, answer))

    async def _relay_stream(
        self, request: web.Request, ask: Ask, transfer: _Transfer, answer: Answer
    ) -> web.StreamResponse:
        events = transfer.events = EventStream(strip_usage=not ask.body.wants_usage)
        response = web.StreamResponse(status=200, headers=self._headers(ask, transfer, answer))
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        chunk, failure = answer.first, None
        waiting = True
        # A client that went away raises ConnectionResetError on write: `serve` settles it as cancelled.
        with suppress(ConnectionResetError):
            await response.prepare(request)
            while chunk:
                out = events.feed(chunk)
                if waiting and events.has_content:
                    waiting = False
                    self._note_first_token(ask, transfer)
                if events.done:
                    break
                if out:
                    await response.write(out)
                chunk, failure = await _next_chunk(answer)
            if events.done:
                await self._end_well(response, transfer, answer, out)
            else:
                await self._end_badly(response, ask, transfer, failure)
        return response

    async def _end_well(self, response: web.StreamResponse, transfer: _Transfer, answer: Answer, last: bytes) -> None:
        """Settle first: a client that leaves after `[DONE]` has been served."""
        failed = transfer.events is not None and transfer.events.failed
        outcome = pb.OUTCOME_SERVER_ERROR if failed else pb.OUTCOME_SUCCESS
        self._finish(transfer, outcome, transfer.delivered(), http_status=200)
        await response.write(last)
        await response.write_eof()
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(_LAST_BYTES_S):
                await answer.response.content.readany()

    async def _end_badly(
        self, response: web.StreamResponse, ask: Ask, transfer: _Transfer, failure: EngineError | None
    ) -> None:
        """End a stream that the engine left unfinished: an error event, and no `[DONE]`."""
        failure = failure or EngineError(pb.OUTCOME_SERVER_ERROR, "the engine broke off")
        self._note_failure(ask, transfer, failure)
        self._finish(transfer, failure.outcome, transfer.delivered(), http_status=200)
        await response.write(error_event(_bad_gateway(failure)))
        await response.write_eof()

    def _note_first_token(self, ask: Ask, transfer: _Transfer) -> None:
        now = self._clock()
        transfer.reservation.first_token((now - transfer.sent) * 1000.0)
        if transfer.span is not None:
            transfer.span.add_event("first_token")
        self._metrics.ttft_seconds.observe(now - ask.arrived)

    def _finish(
        self,
        transfer: _Transfer,
        outcome: pb.Outcome.ValueType,
        usage: pb.Usage | None = None,
        http_status: int = 0,
    ) -> None:
        duration_ms = (self._clock() - transfer.sent) * 1000.0
        transfer.end_span(pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower())
        if transfer.reservation.finished(outcome, usage, duration_ms=duration_ms, http_status=http_status):
            self._metrics.outcomes.labels(pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()).inc()

    def _headers(self, ask: Ask, transfer: _Transfer, answer: Answer) -> dict[str, str]:
        reservation = transfer.reservation
        headers = {
            "Content-Type": answer.response.headers.get("Content-Type", "application/json"),
            "x-request-id": ask.request_id,
            "x-headway-endpoint": reservation.endpoint.address,
            **reservation.answer_headers,
        }
        if self._settings.debug_headers:
            decision = reservation.decision
            headers["x-headway-strategy"] = decision.strategy
            headers["x-headway-reservation"] = reservation.id
            headers["x-headway-matched-tokens"] = str(decision.matched_tokens)
            headers["x-headway-predicted-ttft-ms"] = f"{decision.predicted_ttft_ms:.1f}"
            headers["x-headway-held-ms"] = f"{decision.held_ms:.1f}"
            headers["x-headway-fail-open"] = str(reservation.fail_open).lower()
        return headers


async def _next_chunk(answer: Answer) -> tuple[bytes, EngineError | None]:
    """Read on; empty at the end, with the failure if it was one."""
    try:
        return await answer.response.content.readany(), None
    except (aiohttp.ClientError, TimeoutError) as error:
        return b"", failure_of(error)


def _to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _bad_gateway(failure: EngineError) -> ApiError:
    if failure.outcome == pb.OUTCOME_TIMEOUT:
        return ApiError(504, "engine_timeout", failure.message, reason="ENGINE_TIMEOUT")
    return ApiError(502, "engine_failed", failure.message, reason="ENGINE_FAILED")
