"""What became of requests: reports move reservations on and teach the models."""

from collections.abc import Callable
from dataclasses import dataclass

from headway_scheduler.admission.dispatcher import Dispatcher
from headway_scheduler.admission.observing import Observer
from headway_scheduler.admission.values import Work
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
from headway_scheduler.fleet.ledger import EndCause
from headway_scheduler.fleet.values import Owner, Reservation
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History

__all__ = ["Reporting", "UsageRecorder"]

UsageRecorder = Callable[[str, str, Usage], None]
"""Called with tenant, model and usage when a request ends well, or is cancelled after it used something."""


@dataclass(slots=True)
class Reporting:
    """Applies reports. Each is idempotent: what came before changes nothing."""

    dispatcher: Dispatcher
    costs: CostModel
    history: History
    record_usage: UsageRecorder
    on_failed: Callable[[str, str], None] = lambda _tenant, _model: None
    """Called with tenant and model when an endpoint failed a request."""
    first_tokens: int = 0
    ttft_ms_sum: float = 0.0
    predicted_ttft_ms_sum: float = 0.0
    observer: Observer | None = None

    def apply(self, owner: Owner, reservation_id: str, report: Report, now: float) -> tuple[ReportStatus, str]:
        """The status, and for INVALID what is wrong. A reservation of another principal is unknown to this one."""
        ledger = self.dispatcher.ledger
        reservation = ledger.find(reservation_id)
        if reservation is None or reservation.principal != owner.principal:
            ended = reservation is None and ledger.ended(reservation_id, owner.principal) is not None
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
        self.dispatcher.fleet.answered(reservation, now)
        work = reservation.attachment
        if first and isinstance(work, Work):
            self.dispatcher.retries.over(work)  # it went well: what may still be tried again is not this one
            work.ttft_ms = report.ttft_ms
            predicted_ms = reservation.predicted_ttft_ms
            if report.ttft_ms is not None and predicted_ms is not None:
                self.first_tokens += 1
                self.ttft_ms_sum += report.ttft_ms
                self.predicted_ttft_ms_sum += predicted_ms
            if work.flight is not None:
                self.costs.first_token(work.flight, report.ttft_ms, now)
        return (ReportStatus.APPLIED if first else ReportStatus.DUPLICATE), ""

    def _served_by(self, reservation: Reservation, report: ServedBy, now: float) -> tuple[ReportStatus, str]:
        fleet = self.dispatcher.fleet
        endpoint = fleet.find(report.endpoint)
        own, burst = fleet.candidates(reservation.tenant, reservation.model, "")
        if endpoint is None or endpoint.slot not in {*own.tolist(), *burst.tolist()}:
            return ReportStatus.INVALID, f"served_by.endpoint: {report.endpoint!r} is no endpoint of this request"
        before = fleet.by_slot[reservation.slot]
        if report.endpoint in (before.id, before.spec.address):
            return ReportStatus.DUPLICATE, ""
        fleet.record_outcome(before, True, now, reservation)
        if isinstance(reservation.attachment, Work):
            self.dispatcher.retries.count(reservation.attachment)
        self.dispatcher.move(reservation, endpoint, now)
        return ReportStatus.APPLIED, ""

    def _finished(self, reservation: Reservation, report: Finished, now: float) -> None:
        dispatcher, work, usage = self.dispatcher, reservation.attachment, report.usage
        endpoint = dispatcher.fleet.by_slot[reservation.slot]
        succeeded = report.outcome is Outcome.SUCCESS
        if self.observer is not None and isinstance(work, Work):
            self.observer.finished(reservation, work, report)
        if succeeded and isinstance(work, Work):
            self._learn(reservation, work, report, now)
        if isinstance(work, Work):
            dispatcher.fair.settle(work, self._service(work, reservation, report))
        # Before its end: what was a probe tells what it came to, and leaves no gap for another.
        if report.outcome.is_endpoints_fault or succeeded:
            dispatcher.fleet.record_outcome(endpoint, report.outcome.is_endpoints_fault, now, reservation)
        dispatcher.ledger.end(reservation, EndCause.REPORTED, now)
        if not isinstance(work, Work):
            return
        used = (usage.prompt_tokens or reservation.prompt_tokens) + (usage.completion_tokens or 0.0)
        failed = report.outcome.is_endpoints_fault
        actual = 0.0 if failed else used
        dispatcher.quotas.settle(reservation.tenant, reservation.model, work.estimated_tokens, actual)
        if failed:
            self.on_failed(reservation.tenant, reservation.model)
        if succeeded or (report.outcome is Outcome.CANCELLED and usage.completion_tokens):
            self.record_usage(reservation.tenant, reservation.model, usage)
        if usage.completion_tokens and not failed:
            dispatcher.answered(work, reservation.slot, usage.completion_tokens)

    def _service(self, work: Work, reservation: Reservation, report: Finished) -> float | None:
        """What the tenant got for fair share; nothing where the endpoint failed, None: as expected."""
        usage, outcome = report.usage, report.outcome
        if outcome.is_endpoints_fault or (outcome is not Outcome.SUCCESS and not usage.completion_tokens):
            return 0.0
        prompt = usage.prompt_tokens or reservation.prompt_tokens
        cached = work.cached if usage.cached_tokens is None else usage.cached_tokens
        output = work.expected_output if usage.completion_tokens is None else usage.completion_tokens
        return self.dispatcher.fair.weights.service(prompt, cached, output)

    def _learn(self, reservation: Reservation, work: Work, report: Finished, now: float) -> None:
        """What a request that ended well teaches: the endpoint's speed, lengths of prompts and answers, and costs."""
        usage, model, task_class = report.usage, reservation.model, reservation.task_class
        ttft_ms = report.ttft_ms if work.ttft_ms is None else work.ttft_ms
        if work.flight is not None:
            self.costs.finished(work.flight, usage, ttft_ms, report.duration_ms, now)
        if usage.prompt_tokens and work.text_bytes:
            self.history.prompt_measured(model, work.text_bytes, usage.prompt_tokens)
        if usage.completion_tokens is not None and report.duration_ms is not None:
            decode_ms = report.duration_ms - (ttft_ms or 0.0)
            self.history.finished(reservation.tenant, model, task_class, usage.completion_tokens, decode_ms / 1e3)
            if ttft_ms is not None and work.flight is not None:
                prefill_ms = self.costs.prefill_ms_at(reservation.slot, work.flight.uncached, work.flight.hit)
                self.history.served(model, task_class, prefill_ms + max(0.0, decode_ms))
