"""The scheduler's record of decisions, as the console reads it."""

from collections.abc import Sequence

from headway_scheduler.record.entry import IN_FLIGHT, Entry
from headway_scheduler.record.ring import Record

from headway_console.decisions import Candidate, DecisionRow

__all__ = ["SchedulerRecord"]


class SchedulerRecord:
    """A DecisionLog."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def newest(self, limit: int) -> Sequence[DecisionRow]:
        """The latest, without their candidates."""
        return [_row(entry) for entry in self._record.newest(limit)]

    def get(self, request_id: str) -> DecisionRow | None:
        """One of this request id or reservation id, with all that the record kept of it."""
        entry = self._record.find(request_id)
        return None if entry is None else _row(entry, whole=True)


def _row(entry: Entry, *, whole: bool = False) -> DecisionRow:
    request, decision, refusal = entry.request, entry.decision, entry.refusal
    why = None if decision is None else decision.why
    outcome = "" if entry.outcome is IN_FLIGHT else str(entry.outcome)
    return DecisionRow(
        request_id=request.request_id,
        time=entry.at,
        tenant=request.tenant,
        model=request.model,
        strategy="" if why is None else why.strategy,
        endpoint=entry.served_by or entry.endpoint,
        prompt_tokens=int(request.prompt_tokens),
        matched_tokens=0 if why is None else why.matched_tokens,
        held_ms=refusal.held_ms if refusal is not None else 0.0 if why is None else why.held_ms,
        predicted_ttft_ms=None if why is None else why.predicted_ttft_ms,
        actual_ttft_ms=entry.ttft_ms,
        outcome=outcome if refusal is None else refusal.reason,
        refused=refusal is not None,
        candidates=_candidates(entry) if whole else (),
        candidates_seen=0 if why is None else why.candidates,
        facts=_facts(entry) if whole else {},
    )


def _candidates(entry: Entry) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(each.endpoint, each.cost, each.predicted_ttft_ms, each.matched_tokens, each.soft_guards, each.chosen)
        for each in entry.candidates() or ()
    )


def _facts(entry: Entry) -> dict[str, str]:
    """What else there is to say of it, in words."""
    facts = {"reservation": entry.reservation_id, "adapter": entry.request.adapter}
    if entry.moved:
        facts["first sent to"] = entry.endpoint
    if entry.refusal is not None:
        facts["said"] = entry.refusal.message
    if entry.decision is not None:
        why = entry.decision.why
        facts["task"] = f"{why.task_class.value}, weight {why.task_weight:.3g}"
        if why.fell_back_from:
            facts["instead of"] = f"{why.fell_back_from}: {why.fallback_reason}"
    if entry.duration_ms is not None:
        facts["took"] = f"{entry.duration_ms:.0f} ms"
    if entry.usage.completion_tokens is not None:
        facts["answered"] = f"{entry.usage.completion_tokens} tokens"
    if entry.usage.cached_tokens is not None:
        facts["cached, by the engine"] = f"{entry.usage.cached_tokens} tokens"
    return {name: value for name, value in facts.items() if value}
