"""The Router service: which endpoint serves a request, and what came of it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from google.rpc import status_pb2
from grpc.aio import ServicerContext
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

from headway_scheduler.admission.holds import Waiter
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Principal, Role
from headway_scheduler.domain.report import ReportStatus
from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.fleet.ledger import Owner
from headway_scheduler.rpc.authentication import current_principal
from headway_scheduler.rpc.convert.reports import report_from_proto, result_to_proto
from headway_scheduler.rpc.convert.routing import decision_to_proto, explanation_to_proto, request_from_proto
from headway_scheduler.rpc.interceptors import to_status
from headway_scheduler.rpc.resume import Resumer
from headway_scheduler.rpc.route_stream import RouteStreamSession

__all__ = ["RouterService"]

Context = ServicerContext[Any, Any]  # a context of any of the service's messages
_MAX_BATCH: Final = 10_000


class RouterService(routing_pb2_grpc.RouterServicer):
    """Answers data planes. A unary caller's reservations belong to its principal and live by TTL."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owners: dict[str, Owner] = {}
        self._resumer = Resumer(scheduler)

    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:  # noqa: N802
        """Choose an endpoint and reserve a place on it."""
        scheduler, principal = self._scheduler, current_principal()
        try:
            if scheduler.draining:
                raise scheduler.shutting_down()
            now = scheduler.clock()
            wanted, tenant = request_from_proto(request, principal, scheduler.intake, scheduler.ledger.new_id())
            remaining = context.time_remaining()
            deadline = None if remaining is None else now + remaining
            owner = self._owner(principal)
            outcome = scheduler.dispatcher.submit(wanted, tenant, owner, now, deadline)
            decision = await self._settled(outcome) if isinstance(outcome, Waiter) else outcome
        except HeadwayError as error:
            scheduler.count_refusal(error)
            raise
        context.add_done_callback(lambda call: self._on_done(call, decision, owner))  # type: ignore[arg-type]  # wrong in the stubs
        return decision_to_proto(decision)

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:  # noqa: N802
        """Apply a batch of reports."""
        if len(request.reports) > _MAX_BATCH:
            raise InvalidField("reports", f"{len(request.reports)} are more than {_MAX_BATCH}")
        owner = self._owner(current_principal())
        return pb.ReportResponse(results=apply_reports(self._scheduler, owner, request.reports))

    async def RouteStream(  # type: ignore[override]  # noqa: N802  the stubs know only generators
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], context: Context
    ) -> None:
        """Serve routes and reports on one stream until either side ends it."""
        session = RouteStreamSession(self._scheduler, current_principal(), self._resumer, context)
        await session.run(request_iterator)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:  # noqa: N802
        """Count again what the caller still holds."""
        if len(request.reservations) > _MAX_BATCH:
            raise InvalidField("reservations", f"{len(request.reservations)} are more than {_MAX_BATCH}")
        principal = current_principal()
        owner = self._owner(principal)
        results = [self._resumer.resume(each, principal, owner) for each in request.reservations]
        return pb.ResumeResponse(results=await asyncio.gather(*results))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        """The whole table for a request; nothing is reserved."""
        scheduler, principal = self._scheduler, current_principal()
        now = scheduler.clock()
        wanted, _ = request_from_proto(request.request, principal, scheduler.intake, "explain")
        owner = Owner(principal.id, stream=False)
        strategy = request.strategy.removeprefix("strategies/")
        whole = principal.role is Role.ADMIN
        explanation = scheduler.dispatcher.explain(wanted, strategy, owner, now, whole)
        refusal: status_pb2.Status | None = None
        if explanation.refusal is not None:
            refusal = to_status(explanation.refusal)
        return explanation_to_proto(explanation, scheduler.fleet.columns, refusal, now)

    def _owner(self, principal: Principal) -> Owner:
        owner = self._owners.get(principal.id)
        if owner is None:
            owner = self._owners[principal.id] = Owner(principal.id, stream=False)
        return owner

    async def _settled(self, waiter: Waiter) -> Decision:
        """Wait for the hold; a cancelled call leaves it, or gives back what it was answered in the same moment."""
        settled, answers = asyncio.Event(), list[Decision | HeadwayError]()

        def answer(outcome: Decision | HeadwayError) -> None:
            answers.append(outcome)
            settled.set()

        waiter.answer = answer
        try:
            await settled.wait()
        except asyncio.CancelledError:
            self._scheduler.dispatcher.give_up(waiter)
            for outcome in answers:
                if isinstance(outcome, Decision):
                    self._give_back(outcome, waiter.owner)
            raise
        outcome = answers[0]
        if isinstance(outcome, HeadwayError):
            raise outcome
        return outcome

    def _on_done(self, call: Context, decision: Decision, owner: Owner) -> None:
        """A call cancelled before its answer arrived gives back what it reserved."""
        if call.cancelled():
            self._give_back(decision, owner)

    def _give_back(self, decision: Decision, owner: Owner) -> None:
        self._scheduler.dispatcher.give_back(decision.reservation_id, owner, self._scheduler.clock())


def apply_reports(scheduler: Scheduler, owner: Owner, reports: Iterable[pb.Report]) -> list[pb.ReportResult]:
    """Apply each report; one bad report spoils none of the others."""
    now = scheduler.clock()
    results = []
    for message in reports:
        try:
            status, detail = scheduler.reporting.apply(owner, message.reservation_id, report_from_proto(message), now)
        except InvalidField as error:
            status, detail = ReportStatus.INVALID, error.message
        results.append(result_to_proto(message.reservation_id, status, detail))
    return results
