"""The Router service: which endpoint serves a request, and what came of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from google.rpc import status_pb2
from grpc.aio import ServicerContext
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Role
from headway_scheduler.errors import InvalidField
from headway_scheduler.fleet.ledger import Owner
from headway_scheduler.rpc.authentication import current_principal
from headway_scheduler.rpc.calls import MAX_BATCH, UnaryCalls
from headway_scheduler.rpc.convert.routing import decision_to_proto, explanation_to_proto, request_from_proto
from headway_scheduler.rpc.interceptors import to_status
from headway_scheduler.rpc.resume import Resumer
from headway_scheduler.rpc.route_stream import RouteStreamSession

__all__ = ["RouterService"]

Context = ServicerContext[Any, Any]  # a context of any of the service's messages


class RouterService(routing_pb2_grpc.RouterServicer):
    """Answers data planes. A unary caller's reservations belong to its principal and live by TTL."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._calls = UnaryCalls(scheduler)
        self._resumer = Resumer(scheduler)

    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:  # noqa: N802
        """Choose an endpoint and reserve a place on it."""
        remaining_s = context.time_remaining()
        return decision_to_proto(await self._calls.route(request, current_principal(), remaining_s))

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:  # noqa: N802
        """Apply a batch of reports."""
        await self._scheduler.opened()
        return pb.ReportResponse(results=self._calls.report(request.reports, current_principal()))

    async def RouteStream(  # type: ignore[override]  # noqa: N802  the stubs know only generators
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], context: Context
    ) -> None:
        """Serve routes and reports on one stream until either side ends it, or another scheduler leads."""
        await self._scheduler.opened()
        session = RouteStreamSession(self._scheduler, current_principal(), self._resumer, context)
        await session.run(request_iterator)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:  # noqa: N802
        """Count again what the caller still holds."""
        if len(request.reservations) > MAX_BATCH:
            raise InvalidField("reservations", f"{len(request.reservations)} are more than {MAX_BATCH}")
        await self._scheduler.opened()
        principal = current_principal()
        owner = self._calls.owner(principal)
        results = [self._resumer.resume(each, principal, owner) for each in request.reservations]
        return pb.ResumeResponse(results=await asyncio.gather(*results))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        """The whole table for a request; nothing is reserved."""
        scheduler, principal = self._scheduler, current_principal()
        await scheduler.opened()
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
