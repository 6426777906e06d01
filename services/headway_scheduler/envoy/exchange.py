"""One request on its way through a plane: one ext_proc stream, from its headers to the end of its answer.

The reservation belongs to the stream: however that ends, it ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import ServicerContext
from headway.routing.v1 import routing_pb2
from headway_openai.body import ParsedBody, forwarded_body, parse_body
from headway_openai.errors import ApiError
from headway_openai.prefix import parse_prefix

from headway_scheduler.admission.holds import Waiter
from headway_scheduler.admission.watching import is_routed
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import EVERYBODY, Principal
from headway_scheduler.domain.rate_limits import RateLimits
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, Report, ServedBy, Usage
from headway_scheduler.envoy import replies
from headway_scheduler.envoy.answer import Answer, Renaming
from headway_scheduler.envoy.destinations import any_endpoint, destinations
from headway_scheduler.envoy.fixed_bodies import FixedBodies
from headway_scheduler.envoy.head import Head, head_of, read_headers, subset_hint
from headway_scheduler.envoy.plane import Plane
from headway_scheduler.envoy.serving import response_details, served_by
from headway_scheduler.envoy.watching import Watched, common_salt, watch
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.values import Owner
from headway_scheduler.rpc.convert.routing import request_from_proto
from headway_scheduler.rpc.held import HeldCall
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.spans import RouteSpan, trace_upstream

if TYPE_CHECKING:
    from headway_tracing.tracing import Tracing

__all__ = ["Exchange"]

Context = ServicerContext[Any, Any]  # raw bytes out, ProcessingRequest in; neither is typed
_ENVOYS_MESSAGE_TIMEOUT_S: Final = 0.2
"""What Envoy waits for an answer where its configuration does not say."""


_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Mode(IntEnum):
    """How Envoy sends bodies (ProcessingMode.BodySendMode)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4
    GRPC = 5


_BUFFERED: Final = (Mode.BUFFERED, Mode.BUFFERED_PARTIAL)
_AS_IT_COMES: Final = (Mode.STREAMED, Mode.FULL_DUPLEX)


class _Gone(Exception):
    """Envoy wants nothing more of us, or has had everything."""


class Exchange:
    """One stream. `run` serves it to its end."""

    def __init__(
        self,
        scheduler: Scheduler,
        principal: Principal,
        plane: Plane,
        context: Context,
        *,
        longest_body: int,
        fixed_bodies: FixedBodies,
        tenant_of: Callable[[str], str],
    ) -> None:
        self._scheduler, self._principal, self._plane, self._context = scheduler, principal, plane, context
        self._longest, self._fixed_bodies, self._tenant_of = longest_body, fixed_bodies, tenant_of
        self._owner = Owner(principal.id, stream=True)
        self._ahead: asyncio.Future[Any] | None = None
        self._request_mode = self._response_mode = Mode.FULL_DUPLEX
        self._head = Head()
        self._subset: list[str] | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._collecting = False
        self._received = 0.0
        self._asked = ""
        self._strips_usage = False
        self._bypassed = False
        self._watched: Watched | None = None
        self._model = ""
        self._salt = ""
        self._reservation_id = ""
        self._endpoint = self._endpoint_id = ""
        self._prompt_tokens = 0
        self._limits: RateLimits | None = None
        self._open = False
        self._waiting_for_token = True
        self._sent = 0.0
        self._answer: Answer | None = None
        self._held = b""
        self._trace: dict[str, str] = {}
        self._first_token_at: float | None = None

    async def run(self) -> None:
        """Serve until Envoy ends the stream, or we have refused the request."""
        try:
            while True:
                message = await self._next()
                await _HANDLERS[message.WhichOneof("request")](self, message)
        except _Gone:
            return
        except HeadwayError as error:
            self._scheduler.count_refusal(error)
            await self._context.write(replies.immediate(api_error(error)))
        except ApiError as error:
            await self._context.write(replies.immediate(error))
        finally:
            self._close()

    @property
    def began(self) -> bool:
        """Has Envoy said anything?"""
        return self._received > 0.0

    async def _next(self) -> Any:
        """Envoy's next message. Raises _Gone at the end."""
        ahead, self._ahead = self._ahead, None
        message = await (self._context.read() if ahead is None else ahead)
        if message is grpc.aio.EOF:
            raise _Gone
        self._received = self._scheduler.clock()
        return message

    # The request

    async def _request_headers(self, message: pb.ProcessingRequest) -> None:
        self._head = head_of(read_headers(message.request_headers))
        self._head.identify(self._plane, self._tenant_of)
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._request_mode, self._response_mode = Mode(config.request_body_mode), Mode(config.response_body_mode)
        self._bypassed = self._is_bypassed()
        self._subset = None if self._bypassed else subset_hint(message.metadata_context)
        if self._bypassed:
            await self._context.write(replies.routed("request_headers", destination="", strip=self._head.strip))
        elif message.request_headers.end_of_stream:
            await self._context.write(self._anywhere("request_headers"))
        elif self._request_mode is Mode.FULL_DUPLEX:
            self._collecting = True
        elif self._request_mode in _BUFFERED:
            await self._context.write(replies.routed("request_headers", destination="", strip=self._head.strip))
        else:
            decision = await self._decide_unseen(routing_pb2.RouteRequest(model=self._plane.model))
            await self._context.write(self._routed("request_headers", decision))

    async def _request_body(self, message: pb.ProcessingRequest) -> None:
        part = message.request_body
        if self._bypassed:
            await self._pass_on("request_body", part)
        elif self._request_mode in _BUFFERED:
            await self._route_buffered(part.body, part.end_of_stream)
        elif not self._collecting:
            await self._context.write(replies.GO_ON["request_body"])
        else:
            self._size += len(part.body)
            if self._size > self._longest:
                raise ApiError(413, "body_too_large", "the body is too large", reason="BODY_TOO_LARGE")
            self._body.append(part.body)
            if part.end_of_stream:
                await self._route_duplex(trailers=False)

    async def _request_trailers(self, _: pb.ProcessingRequest) -> None:
        if self._collecting:
            await self._route_duplex(trailers=True)
        await self._context.write(replies.GO_ON["request_trailers"])

    def _is_bypassed(self) -> bool:
        """Shall this request be left alone? Then nothing of it is read."""
        desired = self._scheduler.desired
        if not desired.bypassed:
            return False
        if EVERYBODY in desired.bypassed:
            return True
        route = routing_pb2.RouteRequest()
        self._head.apply(route, self._plane)
        return desired.bypasses(self._scheduler.intake.tenant(self._principal, route.tenant).id)

    async def _pass_on(self, kind: str, part: Any) -> None:  # an HttpBody
        """A body that we do not look at."""
        mode = self._request_mode if kind == "request_body" else self._response_mode
        if mode is not Mode.FULL_DUPLEX:
            await self._context.write(replies.GO_ON[kind])
        else:
            for piece in replies.body_pieces(kind, part.body, end=part.end_of_stream):
                await self._context.write(piece)

    async def _route_duplex(self, *, trailers: bool) -> None:
        """The whole body is here: answer the headers, then send the body on."""
        raw = b"".join(self._body)
        self._collecting, self._body = False, []
        body = raw
        if not raw:
            await self._context.write(self._anywhere("request_headers"))
        else:
            decision, body = await self._decide_by(raw)
            await self._context.write(self._routed("request_headers", decision, body, len(raw)))
        for piece in replies.body_pieces("request_body", body, end=not trailers):
            await self._context.write(piece)

    async def _route_buffered(self, raw: bytes, end: bool) -> None:
        if not raw:
            await self._context.write(self._anywhere("request_body"))
            return
        try:
            decision, body = await self._decide_by(raw)
        except ApiError:
            if end or self._request_mode is not Mode.BUFFERED_PARTIAL:
                raise
            route = parse_prefix(self._head.api, raw)
            route.model = route.model or self._plane.model
            decision, body = await self._decide_unseen(route), raw
        await self._context.write(self._routed("request_body", decision, body, len(raw), replace=body is not raw))

    async def _decide_by(self, raw: bytes) -> tuple[Decision | None, bytes]:
        """Route by a body; the decision (None: the plane's own), and the body to send on."""
        parsed = parse_body(self._head.api, raw)
        # Of the body only this is kept: an answer may take an hour, and thousands are on their way at once.
        self._asked, self._owner.sends_first_token = parsed.model, parsed.stream
        self._strips_usage = parsed.stream and self._wants_usage(parsed)
        decision = await self._decide(parsed.route)
        salt = self._salt if decision is None else decision.cache_salt
        return decision, forwarded_body(parsed, self._model, salt, include_usage=self._strips_usage)

    def _wants_usage(self, parsed: ParsedBody) -> bool:
        """Whether a stream shall end with its usage, which only we want: it must go by us to be taken out again."""
        return self._plane.include_usage and not parsed.wants_usage and self._response_mode is not Mode.NONE

    async def _decide_unseen(self, route: routing_pb2.RouteRequest) -> Decision | None:
        """Route a request of whose body no more is seen: its length tells that of the prompt."""
        length = self._head.values.get("content-length", "")
        bytes_per_token = self._scheduler.history.bytes_per_token(route.model)
        tokens = max(1, round(int(length) / bytes_per_token)) if length.isdecimal() else None
        asked = route.model
        decision = await self._decide(route, tokens)
        if decision is not None:
            self._fixed_bodies.check(decision, asked, self._principal, route.tenant)
        return decision

    async def _decide(self, route: routing_pb2.RouteRequest, prompt_tokens: int | None = None) -> Decision | None:
        """Choose an endpoint and reserve a place there, perhaps after a hold; None: it is the plane's to place."""
        scheduler = self._scheduler
        span = None if scheduler.tracing is None else self._span(scheduler.tracing, route)
        try:
            decision = await self._decided(route, prompt_tokens)
        except HeadwayError as error:
            if span is not None:
                span.answered(error)
            raise
        if span is not None and decision is not None:
            span.answered(decision)
        return decision

    def _span(self, tracing: "Tracing", route: routing_pb2.RouteRequest) -> RouteSpan:
        """What Envoy, or its client, said of its trace goes on to the engine by itself."""
        self._trace = self._head.carry_trace(route)
        return RouteSpan(tracing, route)

    async def _decided(self, route: routing_pb2.RouteRequest, prompt_tokens: int | None) -> Decision | None:
        scheduler = self._scheduler
        await scheduler.opened()
        scheduler.check_takes()
        self._head.apply(route, self._plane)
        if self._subset is not None:
            route.subset.endpoints.extend(scheduler.addresses.named(each) for each in self._subset)
        new_id = scheduler.ledger.new_id()
        request, tenant = request_from_proto(route, self._principal, scheduler.intake, new_id, prompt_tokens)
        self._model, self._prompt_tokens = request.model, request.prompt_tokens
        if not is_routed(tenant, request.session_id, self._head.values.get("x-request-id", request.request_id)):
            self._salt = common_salt(scheduler, request)
            self._watched, self._sent = watch(scheduler, request, self._owner), scheduler.clock()
            return None
        outcome = scheduler.dispatcher.submit(request, tenant, self._owner, scheduler.clock(), self._deadline())
        decision = await self._settled(HeldCall(scheduler, outcome)) if isinstance(outcome, Waiter) else outcome
        self._reservation_id, self._endpoint = decision.reservation_id, decision.endpoint.spec.address
        self._endpoint_id = decision.endpoint.spec.id
        self._prompt_tokens, self._limits = decision.why.prompt_tokens, decision.rate_limits
        self._open, self._sent = True, scheduler.clock()
        return decision

    @property
    def _answer_headers(self) -> Mapping[str, str]:
        """What the client is told of its quotas."""
        return {} if self._limits is None else self._limits.headers()

    def _deadline(self) -> float | None:
        """When Envoy gives up waiting for our answer; None: it does not."""
        plane = self._plane
        timeout_s = plane.max_message_timeout_s or plane.message_timeout_s
        if timeout_s is None:
            if self._request_mode is Mode.FULL_DUPLEX:
                return None
            timeout_s = _ENVOYS_MESSAGE_TIMEOUT_S
        return self._received + timeout_s

    async def _settled(self, held: HeldCall) -> Decision:
        """Wait for a hold, and leave it when Envoy ends the stream meanwhile."""
        extension_s = self._plane.max_message_timeout_s
        reading = self._ahead = asyncio.ensure_future(self._context.read())
        try:
            if extension_s is not None and self._request_mode is not Mode.FULL_DUPLEX:
                await self._context.write(replies.extension(extension_s))
            await asyncio.wait((held.settled, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and reading.result() is grpc.aio.EOF:
                raise _Gone
            await asyncio.wait((held.settled,))
        except BaseException:
            held.leave()
            raise
        return held.decision()

    def _routed(
        self, kind: str, decision: Decision | None, body: bytes = b"", original: int = 0, *, replace: bool = False
    ) -> bytes:
        head = self._head
        made_up = "" if decision is None or "x-request-id" in head.values else decision.request_id
        return replies.routed(
            kind,
            destination="" if decision is None else destinations(decision, self._scheduler.addresses),
            headers=_NO_HEADERS if decision is None else decision.endpoint.headers,
            strip=head.strip,
            request_id=made_up,
            body=body if replace else None,
            content_length=None if len(body) == original else len(body),
        )

    def _anywhere(self, kind: str) -> bytes:
        """A request without a body asks for no model: any endpoint of its tenant's will do. Nothing is reserved."""
        scheduler = self._scheduler
        scheduler.check_serves()
        route = routing_pb2.RouteRequest()
        self._head.apply(route, self._plane)
        tenant = scheduler.intake.tenant(self._principal, route.tenant)
        return replies.routed(
            kind,
            destination=any_endpoint(scheduler, tenant.id, self._subset),
            strip=self._head.strip,
            request_id="" if "x-request-id" in self._head.values else scheduler.ledger.new_id(),
        )

    # The answer

    async def _response_headers(self, message: pb.ProcessingRequest) -> None:
        if self._bypassed:
            await self._context.write(replies.GO_ON["response_headers"])
            return
        headers = read_headers(message.response_headers)
        self._note_server(message)
        details = response_details(message)
        answer = self._answer = Answer(headers, details, self._renaming(), strip=self._strips_usage)
        if answer.status >= 400 or message.response_headers.end_of_stream:
            self._finish(answer.outcome())
        if answer.changes and self._response_mode in _AS_IT_COMES and "content-length" in headers:
            await self._context.write(replies.response_headers(["content-length"], self._answer_headers))
        elif self._answer_headers:
            await self._context.write(replies.response_headers([], self._answer_headers))
        else:
            await self._context.write(replies.GO_ON["response_headers"])

    async def _response_body(self, message: pb.ProcessingRequest) -> None:
        part = message.response_body
        data, end = part.body, part.end_of_stream
        out = data
        answer = self._answer
        if answer is not None:
            out = answer.feed(data, end)
            if self._open:
                self._follow(answer)
        if self._response_mode is Mode.FULL_DUPLEX:
            await self._send_on(out, end)
        elif out == data:
            await self._context.write(replies.GO_ON["response_body"])
        else:
            await self._context.write(replies.replaced_body(out, whole=self._response_mode in _BUFFERED))
        if end:
            raise _Gone

    async def _send_on(self, data: bytes, end: bool) -> None:
        """Send a part of an answer. Of one that only counts as a whole, as many parts as fit make one message."""
        held, self._held = self._held, b""
        data = held + data if held else data
        whole = self._answer is not None and self._answer.is_whole
        if not end and whole and len(data) <= replies.CHUNK_BYTES:
            self._held = data
        elif data or end:
            for piece in replies.body_pieces("response_body", data, end=end):
                await self._context.write(piece)

    async def _response_trailers(self, _: pb.ProcessingRequest) -> None:
        if self._answer is not None:
            rest = self._held + self._answer.feed(b"", end=True)
            if rest and self._response_mode is Mode.FULL_DUPLEX:
                for piece in replies.body_pieces("response_body", rest, end=False):
                    await self._context.write(piece)
            self._finish(self._answer.outcome())
        await self._context.write(replies.GO_ON["response_trailers"])
        raise _Gone

    def _follow(self, answer: Answer) -> None:
        """Report what went by."""
        if answer.has_content and self._waiting_for_token and self._response_mode not in _BUFFERED:
            self._waiting_for_token = False
            self._first_token_at = self._scheduler.clock()
            watched, waited_ms = self._watched, (self._scheduler.clock() - self._sent) * 1e3
            self._report(FirstToken(waited_ms if watched is None else watched.first_token()))
        if answer.over:
            self._finish(answer.outcome())

    def _renaming(self) -> Renaming | None:
        """Clients that asked by an alias are answered by it."""
        if not self._model or self._asked in ("", self._model):
            return None
        return Renaming(self._model, self._asked)

    def _note_server(self, message: pb.ProcessingRequest) -> None:
        """The plane may have gone elsewhere: the reservation moves to whoever served."""
        if self._watched is not None:
            self._reservation_id = self._watched.went_to(served_by(message), self._owner)
            self._open = bool(self._reservation_id)
            return
        served = self._scheduler.addresses.named(served_by(message))
        if self._open and served and served != self._endpoint:
            self._report(ServedBy(served))

    # The reservation

    def _report(self, report: Report) -> None:
        scheduler = self._scheduler
        scheduler.reporting.apply(self._owner, self._reservation_id, report, scheduler.clock())

    def _finish(self, outcome: Outcome) -> None:
        """The request is over, once."""
        if not self._open:
            return
        self._open = False
        usage = Usage() if self._answer is None else self._answer.usage(self._prompt_tokens)
        now, tracing = self._scheduler.clock(), self._scheduler.tracing
        self._report(Finished(outcome, usage, (now - self._sent) * 1e3))
        if tracing is not None and self._watched is None:
            ended_ns = time.time_ns()
            first = self._first_token_at
            trace_upstream(
                tracing,
                self._trace,
                self._endpoint_id,
                outcome.value,
                ended_ns - int((now - self._sent) * 1e9),
                None if first is None else ended_ns - int((now - first) * 1e9),
            )

    def _close(self) -> None:
        """The stream is over: so is the request, if it was not before."""
        if self._ahead is not None:
            self._ahead.cancel()
        unwatched = self._answer is not None and self._response_mode is Mode.NONE
        self._finish(self._answer.outcome() if unwatched and self._answer is not None else Outcome.CANCELLED)


_HANDLERS: Final[dict[str | None, Callable[[Exchange, Any], Awaitable[None]]]] = {
    "request_headers": Exchange._request_headers,
    "request_body": Exchange._request_body,
    "request_trailers": Exchange._request_trailers,
    "response_headers": Exchange._response_headers,
    "response_body": Exchange._response_body,
    "response_trailers": Exchange._response_trailers,
}
