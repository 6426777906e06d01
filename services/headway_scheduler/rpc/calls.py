"""Routes and reports of callers without a stream, whatever wire they come by: gRPC, HTTP, Envoy's filters."""

import asyncio
from collections.abc import Iterable
from typing import Final

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.admission.holds import Waiter
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Principal
from headway_scheduler.domain.report import Report, ReportStatus
from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.fleet.values import Owner
from headway_scheduler.rpc.convert.reports import report_from_proto, result_to_proto
from headway_scheduler.rpc.convert.routing import request_from_proto
from headway_scheduler.rpc.held import HeldCall
from headway_scheduler.rpc.spans import RouteSpan

__all__ = ["MAX_BATCH", "UnaryCalls"]

MAX_BATCH: Final = 10_000
"""Reports, or resumed reservations, in one call."""


class UnaryCalls:
    """One door's calls. What they reserve belongs to their principal and lives by TTL."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owners: dict[str, Owner] = {}

    async def route(
        self,
        message: pb.RouteRequest,
        principal: Principal,
        remaining_s: float | None = None,
        prompt_tokens: int | None = None,
    ) -> Decision:
        """Choose an endpoint and reserve a place on it, perhaps after a hold. Raises every refusal, and counts it.

        `remaining_s`: how long the caller will wait, None if it does not say; `prompt_tokens`: where it knows them.
        Cancelled, it leaves no trace.
        """
        scheduler = self._scheduler
        span = None if scheduler.tracing is None else RouteSpan(scheduler.tracing, message)
        try:
            await scheduler.opened()
            scheduler.check_takes()
            now = scheduler.clock()
            new_id = scheduler.ledger.new_id()
            wanted, tenant = request_from_proto(message, principal, scheduler.intake, new_id, prompt_tokens)
            deadline = None if remaining_s is None else now + remaining_s
            outcome = scheduler.dispatcher.submit(wanted, tenant, self.owner(principal), now, deadline)
            decision = await self.settled(outcome) if isinstance(outcome, Waiter) else outcome
        except HeadwayError as error:
            scheduler.count_refusal(error)
            if span is not None:
                span.answered(error)
            raise
        if span is not None:
            span.answered(decision)
        return decision

    def report(self, reports: Iterable[pb.Report], principal: Principal) -> list[pb.ReportResult]:
        """Apply each report; one bad report spoils none of the others. Raises InvalidField if there are too many."""
        reports = list(reports)
        if len(reports) > MAX_BATCH:
            raise InvalidField("reports", f"{len(reports)} are more than {MAX_BATCH}")
        results = []
        for message in reports:
            try:
                status, detail = self.apply(message.reservation_id, report_from_proto(message), principal)
            except InvalidField as error:
                status, detail = ReportStatus.INVALID, error.message
            results.append(result_to_proto(message.reservation_id, status, detail))
        return results

    def apply(self, reservation_id: str, report: Report, principal: Principal) -> tuple[ReportStatus, str]:
        """Apply one report."""
        now = self._scheduler.clock()
        return self._scheduler.reporting.apply(self.owner(principal), reservation_id, report, now)

    def give_back(self, reservation_id: str, principal: Principal) -> None:
        """The caller left before it had its answer: end what was reserved, unless a retry shares it."""
        scheduler = self._scheduler
        scheduler.dispatcher.give_back(reservation_id, self.owner(principal), scheduler.clock())

    def owner(self, principal: Principal) -> Owner:
        """Who holds what this principal's calls reserve."""
        owner = self._owners.get(principal.id)
        if owner is None:
            owner = self._owners[principal.id] = Owner(principal.id, stream=False)
        return owner

    async def settled(self, waiter: Waiter) -> Decision:
        """Wait for the hold; a cancelled call leaves it, or gives back what it was answered in the same moment."""
        held = HeldCall(self._scheduler, waiter)
        try:
            await asyncio.wait((held.settled,))
            await asyncio.sleep(0)  # a cancellation that has arrived by now is delivered here
        except asyncio.CancelledError:
            held.leave()
            raise
        return held.decision()
