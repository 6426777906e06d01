"""What became of requests: reports move reservations on and teach the models."""

from collections.abc import Callable
from dataclasses import dataclass

from headway_scheduler.admission.dispatcher import Dispatcher
from headway_scheduler.admission.holds import Work
from headway_scheduler.domain.report import (
    Finished,
    FirstToken,
    Outcome,
    Progress,
    Report,
    ReportStatus,
    ServedBy,
    Usage,
)
from headway_scheduler.domain.request import TextPrompt
from headway_scheduler.fleet.ledger import EndCause, Owner, Reservation
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History

__all__ = ["Reporting", "UsageRecorder"]

UsageRecorder = Callable[[str, str, Usage], None]
"""Called with tenant, model and usage when a request ends well."""


@dataclass(slots=True)
class Reporting:
    """Applies reports. Each is idempotent: what came before changes nothing."""

    dispatcher: Dispatcher
    costs: CostModel
    history: History
    record_usage: UsageRecorder

    def apply(self, owner: Owner, reservation_id: str, report: Report, now: float) -> tuple[ReportStatus, str]:
        """The status, and for INVALID what is wrong. A reservation of another principal is unknown to this one."""
        ledger = self.dispatcher.ledger
        reservation = ledger.find(reservation_id)
        if reservation is None or reservation.principal != owner.principal:
            ended = reservation is None and ledger.has_ended(reservation_id)
            return (ReportStatus.DUPLICATE if ended else ReportStatus.UNKNOWN), ""
        if reservation.owner is None:
            ledger.adopt(reservation, owner, now)  # an orphan whose holder speaks up again
        if isinstance(report, FirstToken):
            return self._first_token(reservation, owner, report, now)
        if isinstance(report, Progress):
            ledger.progress(reservation, now)
        elif isinstance(report, ServedBy):
            return self._served_by(reservation, report, now)
        else:
            self._finished(reservation, report, now)
        return ReportStatus.APPLIED, ""

    def _first_token(
        self, reservation: Reservation, owner: Owner, report: FirstToken, now: float
    ) -> tuple[ReportStatus, str]:
        owner.sends_first_token = True
        first = self.dispatcher.ledger.first_token(reservation, now)
        work = reservation.attachment
        if report.ttft_ms is not None and isinstance(work, Work) and work.queue_was_empty:
            work.queue_was_empty = False  # teaches once
            self.costs.observe(reservation.slot, reservation.predicted_ttft_ms or 0.0, report.ttft_ms)
        return (ReportStatus.APPLIED if first else ReportStatus.DUPLICATE), ""

    def _served_by(self, reservation: Reservation, report: ServedBy, now: float) -> tuple[ReportStatus, str]:
        fleet = self.dispatcher.fleet
        endpoint = fleet.find(report.endpoint)
        own, burst = fleet.candidates(reservation.tenant, reservation.model, "")
        if endpoint is None or endpoint.slot not in {*own.tolist(), *burst.tolist()}:
            return ReportStatus.INVALID, f"served_by.endpoint: {report.endpoint!r} is no endpoint of this request"
        if endpoint.slot == reservation.slot:
            return ReportStatus.DUPLICATE, ""
        fleet.record_outcome(fleet.by_slot[reservation.slot], True, now)
        self.dispatcher.move(reservation, endpoint, now)
        return ReportStatus.APPLIED, ""

    def _finished(self, reservation: Reservation, report: Finished, now: float) -> None:
        dispatcher, work, usage = self.dispatcher, reservation.attachment, report.usage
        endpoint = dispatcher.fleet.by_slot[reservation.slot]
        dispatcher.ledger.end(reservation, EndCause.REPORTED, now)
        if report.outcome.is_endpoints_fault or report.outcome is Outcome.SUCCESS:
            dispatcher.fleet.record_outcome(endpoint, report.outcome.is_endpoints_fault, now)
        if not isinstance(work, Work):
            return
        used = (usage.prompt_tokens or reservation.prompt_tokens) + (usage.completion_tokens or 0)
        failed = report.outcome.is_endpoints_fault
        dispatcher.quotas.settle(reservation.tenant, work.estimated_tokens, 0.0 if failed else used)
        if report.outcome is not Outcome.SUCCESS:
            return
        self.record_usage(reservation.tenant, reservation.model, usage)
        prompt = work.request.prompt
        if usage.prompt_tokens and isinstance(prompt, TextPrompt):
            self.history.prompt_measured(reservation.model, len(prompt.data), usage.prompt_tokens)
        if usage.completion_tokens is not None and report.duration_ms is not None:
            self.history.finished(
                reservation.tenant,
                reservation.model,
                reservation.task_class,
                usage.completion_tokens,
                (report.duration_ms - (report.ttft_ms or 0.0)) / 1e3,
            )
