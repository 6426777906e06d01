"""Resume: count again what data planes hold, after a restart of the scheduler or a lost stream."""

import asyncio
from typing import Final

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal
from headway_scheduler.domain.report import Resumed
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.fleet import Endpoint
from headway_scheduler.fleet.ledger import Owner
from headway_scheduler.rpc.convert.reports import resumed_from_proto
from headway_scheduler.rpc.convert.routing import request_from_proto

__all__ = ["Resumer"]

_PATIENCE_S: Final = 5.0
"""After a restart clients are often back before the agents: so long an endpoint may take to be announced."""


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
        scheduler = self._scheduler
        ledger, old_id = scheduler.ledger, resumed.reservation_id
        known = ledger.find(old_id)
        if known is not None and known.principal == principal.id:
            ledger.adopt(known, owner, scheduler.clock())
            if known.id == old_id:
                return pb.ResumeResult(reservation_id=old_id, status=pb.RESUME_STATUS_RESUMED)
            return _recreated(old_id, known.id)
        request, _ = request_from_proto(asked, principal, scheduler.intake, old_id, prompt_tokens)
        endpoint = await self._found(resumed.endpoint)
        if endpoint is None or ledger.has_ended(old_id):
            return pb.ResumeResult(reservation_id=old_id, status=pb.RESUME_STATUS_ENDPOINT_GONE)
        now = scheduler.clock()
        reservation = scheduler.dispatcher.restore(request, owner, endpoint, resumed.matched_tokens, now)
        if resumed.first_token_seen:
            ledger.first_token(reservation, now)
        ledger.succeed(old_id, reservation)
        return _recreated(old_id, reservation.id)

    async def _found(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint, waiting a little for its agent."""
        found = self._scheduler.fleet.find(endpoint_id)
        if found is not None:
            return found
        waiting: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(endpoint_id, []).append(waiting)
        try:
            return await asyncio.wait_for(waiting, _PATIENCE_S)
        except TimeoutError:
            return None

    def _announced(self, endpoint: Endpoint) -> None:
        for waiting in self._waiting.pop(endpoint.id, ()):
            if not waiting.done():
                waiting.set_result(endpoint)


def _recreated(old_id: str, new_id: str) -> pb.ResumeResult:
    return pb.ResumeResult(reservation_id=old_id, status=pb.RESUME_STATUS_RECREATED, new_reservation_id=new_id)
