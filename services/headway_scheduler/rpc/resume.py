"""Resume: count again what data planes hold, after a restart of the scheduler or a lost stream."""

import asyncio
from typing import Final

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal, Tenant
from headway_scheduler.domain.report import Resumed
from headway_scheduler.domain.request import Request
from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.fleet.ledger import EndCause
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.fleet.values import Owner, Reservation
from headway_scheduler.rpc.convert.reports import resumed_from_proto
from headway_scheduler.rpc.convert.routing import request_from_proto

__all__ = ["Resumer"]

_PATIENCE_S: Final = 5.0
"""After a restart clients are often back before the agents: so long an endpoint may take to be announced."""
_OVER: Final = frozenset({EndCause.REPORTED, EndCause.CANCELLED})
"""Ends that the holder knows of; the others were this scheduler's guess that it would not come back."""


class Resumer:
    """Answers resumes, for unary callers and for streams alike."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, list[asyncio.Future[Endpoint]]] = {}
        scheduler.fleet.on_announced.append(self._announced)

    async def resume(self, message: pb.ResumedReservation, principal: Principal, owner: Owner) -> pb.ResumeResult:
        """Take one reservation back, or say why not."""
        try:
            resumed, asked = resumed_from_proto(message)
            return await self._resume(resumed, asked, message.prompt_tokens, principal, owner)
        except HeadwayError as error:
            return pb.ResumeResult(
                reservation_id=message.reservation_id, status=pb.RESUME_STATUS_INVALID, detail=error.message
            )

    async def _resume(
        self, resumed: Resumed, asked: pb.RouteRequest, prompt_tokens: int, principal: Principal, owner: Owner
    ) -> pb.ResumeResult:
        scheduler, old_id = self._scheduler, resumed.reservation_id
        if (known := self._known(resumed, principal, owner)) is not None:
            return _taken_back(old_id, known)
        scheduler.intake.tenant(principal, asked.tenant)  # whoever may not name it need not wait to hear so
        endpoint = await self._found(resumed.endpoint)
        # Another try may have been faster, and the agent may just have brought the model.
        if (known := self._known(resumed, principal, owner)) is not None:
            return _taken_back(old_id, known)
        request, tenant = request_from_proto(asked, principal, scheduler.intake, old_id, prompt_tokens)
        if endpoint is None or scheduler.ledger.ended(old_id, principal.id) in _OVER:
            return pb.ResumeResult(reservation_id=old_id, status=pb.RESUME_STATUS_ENDPOINT_GONE)
        usable = scheduler.fleet.candidates(request.tenant, request.model, "")
        if not any(endpoint.slot in slots for slots in usable):
            raise InvalidField("endpoint", f"{endpoint.id!r} is none that {request.tenant!r} may use for the model")
        return _recreated(old_id, self._restored(request, tenant, owner, endpoint, resumed).id)

    def _known(self, resumed: Resumed, principal: Principal, owner: Owner) -> Reservation | None:
        """The live reservation of this id, taken over by `owner`. Raises InvalidField if it is another principal's."""
        ledger, now = self._scheduler.ledger, self._scheduler.clock()
        known = ledger.find(resumed.reservation_id)
        if known is None:
            return None
        if known.principal != principal.id:
            raise InvalidField("reservation_id", f"{resumed.reservation_id!r} is not yours")
        ledger.adopt(known, owner, now)
        if resumed.first_token_seen:
            ledger.first_token(known, now)
        return known

    def _restored(
        self, request: Request, tenant: Tenant, owner: Owner, endpoint: Endpoint, resumed: Resumed
    ) -> Reservation:
        """Count it again; a retry of its request that came before it is the same request."""
        scheduler, now = self._scheduler, self._scheduler.clock()
        reservation = scheduler.ledger.by_request.get((owner.principal, request.tenant, request.request_id))
        if reservation is None:
            matched, alone = resumed.matched_tokens, resumed.fail_open
            reservation = scheduler.dispatcher.restore(request, tenant, owner, endpoint, matched, now, fail_open=alone)
            if alone:
                scheduler.count_fail_open(request)
        else:
            scheduler.ledger.adopt(reservation, owner, now)
        if resumed.first_token_seen:
            scheduler.ledger.first_token(reservation, now)
        scheduler.ledger.succeed(resumed.reservation_id, reservation)
        return reservation

    async def _found(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint, waiting a little for its agent."""
        found = self._scheduler.fleet.find(endpoint_id)
        if found is not None:
            return found
        waiting: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(endpoint_id, [])
        queue.append(waiting)
        try:
            return await asyncio.wait_for(waiting, _PATIENCE_S)
        except TimeoutError:
            return None
        finally:
            queue.remove(waiting)
            if not queue and self._waiting.get(endpoint_id) is queue:
                del self._waiting[endpoint_id]

    def _announced(self, endpoint: Endpoint) -> None:
        for waiting in self._waiting.get(endpoint.id, ()):
            if not waiting.done():
                waiting.set_result(endpoint)


def _taken_back(old_id: str, known: Reservation) -> pb.ResumeResult:
    if known.id == old_id:
        return pb.ResumeResult(reservation_id=old_id, status=pb.RESUME_STATUS_RESUMED)
    return _recreated(old_id, known.id)


def _recreated(old_id: str, new_id: str) -> pb.ResumeResult:
    return pb.ResumeResult(reservation_id=old_id, status=pb.RESUME_STATUS_RECREATED, new_reservation_id=new_id)
