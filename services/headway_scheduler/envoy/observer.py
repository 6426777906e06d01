"""Envoy's observability mode: another router picks, we are shown what goes by, and nothing waits for us.

Envoy sends copies and reads no replies, so none is written. What a request asks for is priced when its body has gone
by; where it went is known from its answer. docs/safe-way-in.md says how to configure it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from headway.routing.v1 import routing_pb2
from headway_openai.body import parse_body
from headway_openai.errors import ApiError

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, Report, Usage
from headway_scheduler.envoy.answer import Answer
from headway_scheduler.envoy.head import Head, head_of, read_headers
from headway_scheduler.envoy.plane import Plane
from headway_scheduler.envoy.serving import response_details, served_by
from headway_scheduler.envoy.watching import Watched, watch
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.values import Owner
from headway_scheduler.rpc.convert.routing import request_from_proto

__all__ = ["ObservedExchange"]


class ObservedExchange:
    """One stream. `run` reads it to its end; whatever it cannot make sense of, it leaves."""

    def __init__(
        self,
        scheduler: Scheduler,
        principal: Principal,
        plane: Plane,
        context: Any,  # a ServicerContext of bytes out and ProcessingRequest in; neither is typed
        *,
        longest_body: int,
        tenant_of: Callable[[str], str],
    ) -> None:
        self._scheduler, self._principal, self._plane, self._context = scheduler, principal, plane, context
        self._longest, self._tenant_of = longest_body, tenant_of
        self._owner = Owner(principal.id, stream=True)
        self._head = Head()
        self._body: list[bytes] = []
        self._size = 0
        self._watched: Watched | None = None
        self._reservation_id = ""
        self._prompt_tokens = 0
        self._sent = 0.0
        self._answer: Answer | None = None
        self._waits_for_token = True
        self.began = False

    async def run(self) -> None:
        """Read until Envoy ends the stream."""
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self.began = True
                handle = _HANDLERS.get(message.WhichOneof("request"))
                if handle is not None:
                    await handle(self, message)
        except (ApiError, HeadwayError) as error:
            self._scheduler.observations.count_unpriced(error.reason)  # the request goes its way
        finally:
            self._finish(Outcome.CANCELLED if self._answer is None else self._answer.outcome())

    async def _request_headers(self, message: pb.ProcessingRequest) -> None:
        self._head = head_of(read_headers(message.request_headers))
        self._head.identify(self._plane, self._tenant_of)

    async def _request_body(self, message: pb.ProcessingRequest) -> None:
        part = message.request_body
        self._size += len(part.body)
        if self._size > self._longest:
            return  # nobody would have taken it
        self._body.append(part.body)
        if part.end_of_stream:
            self._price()

    async def _request_trailers(self, _message: pb.ProcessingRequest) -> None:
        if self._watched is None:
            self._price()

    def _price(self) -> None:
        raw, self._body = b"".join(self._body), []
        if not raw:
            return
        scheduler = self._scheduler
        scheduler.check_serves()
        parsed = parse_body(self._head.api, raw)
        self._owner.sends_first_token = parsed.stream
        route: routing_pb2.RouteRequest = parsed.route
        self._head.apply(route, self._plane)
        request, _ = request_from_proto(route, self._principal, scheduler.intake, scheduler.ledger.new_id())
        self._prompt_tokens, self._sent = request.prompt_tokens, scheduler.clock()
        self._watched = watch(scheduler, request, self._owner)

    async def _response_headers(self, message: pb.ProcessingRequest) -> None:
        if self._watched is None:
            return
        self._reservation_id = self._watched.went_to(served_by(message), self._owner)
        headers = read_headers(message.response_headers)
        self._answer = Answer(headers, response_details(message), None, strip=False)
        if self._answer.status >= 400 or message.response_headers.end_of_stream:
            self._finish(self._answer.outcome())

    async def _response_body(self, message: pb.ProcessingRequest) -> None:
        answer, part = self._answer, message.response_body
        if answer is None or self._watched is None:
            return
        answer.feed(part.body, part.end_of_stream)
        if answer.has_content and self._waits_for_token:
            self._waits_for_token = False
            self._report(FirstToken(self._watched.first_token()))
        if answer.over or part.end_of_stream:
            self._finish(answer.outcome())

    def _finish(self, outcome: Outcome) -> None:
        usage = Usage() if self._answer is None else self._answer.usage(self._prompt_tokens)
        self._report(Finished(outcome, usage, (self._scheduler.clock() - self._sent) * 1e3))
        self._reservation_id = ""

    def _report(self, report: Report) -> None:
        if self._reservation_id:
            scheduler = self._scheduler
            scheduler.reporting.apply(self._owner, self._reservation_id, report, scheduler.clock())


_HANDLERS: Final[dict[str | None, Callable[[ObservedExchange, Any], Awaitable[None]]]] = {
    "request_headers": ObservedExchange._request_headers,
    "request_body": ObservedExchange._request_body,
    "request_trailers": ObservedExchange._request_trailers,
    "response_headers": ObservedExchange._response_headers,
    "response_body": ObservedExchange._response_body,
}
