"""The Router service: which endpoint serves a request, and what came of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from google.rpc import status_pb2
from grpc.aio import ServicerContext
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Role
from headway_scheduler.errors import InvalidField
from headway_scheduler.fleet.values import Owner
from headway_scheduler.rpc.authentication import current_principal
from headway_scheduler.rpc.calls import MAX_BATCH, UnaryCalls
from headway_scheduler.rpc.convert.routing import decision_to_proto, explanation_to_proto, request_from_proto
from headway_scheduler.rpc.interceptors import to_status
from headway_scheduler.rpc.resume import Resumer
from headway_scheduler.rpc.route_stream import RouteStreamSession

__all__ = ["RouterService"]

_MAX_KEYS: Final = 1000
_KEYS_VALID_S: Final = 2.0
"""So long a revoked key may still be taken by a data plane that remembers it."""

Context = ServicerContext[Any, Any]  # a context of any of the service's messages


class RouterService(routing_pb2_grpc.RouterServicer):
    """Answers data planes. A unary caller's reservations belong to its principal and live by TTL.

    `tenant_of`: the tenant of an end user's key, by the key's SHA-256; empty: none.
    """

    def __init__(self, scheduler: Scheduler, tenant_of: Callable[[bytes], str]) -> None:
        self._scheduler = scheduler
        self._tenant_of = tenant_of
        self._calls = UnaryCalls(scheduler)
        self._resumer = Resumer(scheduler)

    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:  # noqa: N802
        """Choose an endpoint and reserve a place on it."""
        remaining_s = context.time_remaining()
        return decision_to_proto(await self._calls.route(request, current_principal(), remaining_s))

    def take_back(self, answer: pb.RouteResponse) -> None:
        """End what this answer reserved: its caller, whose call this task handles, left before it had it."""
        self._calls.give_back(answer.reservation_id, current_principal())

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

    async def IdentifyKeys(  # noqa: N802
        self, request: pb.IdentifyKeysRequest, context: Context
    ) -> pb.IdentifyKeysResponse:
        """Say which tenants end users' keys are of, as far as the caller may name them."""
        if len(request.key_sha256) > _MAX_KEYS:
            raise InvalidField("key_sha256", f"{len(request.key_sha256)} are more than {_MAX_KEYS}")
        principal = current_principal()
        response = pb.IdentifyKeysResponse()
        response.valid_for.FromNanoseconds(int(_KEYS_VALID_S * 1e9))
        for key_sha256 in request.key_sha256:
            tenant = self._tenant_of(key_sha256)
            response.identities.add(tenant=tenant if principal.may_name(tenant) else "")
        return response

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
