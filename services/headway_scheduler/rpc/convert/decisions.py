"""Remembered decisions as Fleet's messages."""

from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from headway.fleet.v1 import fleet_pb2 as pb
from headway.routing.v1 import routing_pb2

from headway_scheduler.domain.desired import Principal
from headway_scheduler.domain.names import ENDPOINTS, TENANTS
from headway_scheduler.record.entry import Candidate, Entry
from headway_scheduler.record.ring import Filter
from headway_scheduler.rpc.convert.numbers import uint32
from headway_scheduler.rpc.convert.routing import why_to_proto

__all__ = ["entry_to_proto", "filter_from_proto"]

_PRIORITIES: Final = {
    -1: routing_pb2.PRIORITY_BEST_EFFORT,
    0: routing_pb2.PRIORITY_STANDARD,
    1: routing_pb2.PRIORITY_CRITICAL,
}


def filter_from_proto(message: pb.DecisionFilter, principal: Principal) -> Filter:
    """What is asked for, of what this principal may see."""
    return Filter(
        tenant=message.tenant.removeprefix(f"{TENANTS}/"),
        model=message.model.removeprefix("models/"),
        endpoint=message.endpoint.removeprefix(f"{ENDPOINTS}/"),
        outcome=message.outcome,
        refused=message.refused if message.HasField("refused") else None,
        since=message.since.ToNanoseconds() / 1e9 if message.HasField("since") else 0.0,
        tenants=None if principal.may_name("*") else frozenset(principal.tenants),
    )


def entry_to_proto(entry: Entry, *, whole: bool = False) -> pb.DecisionRecord:
    """A decision or refusal; `whole`: with its candidates."""
    request, decision, refusal, usage = entry.request, entry.decision, entry.refusal, entry.usage
    message = pb.DecisionRecord(
        number=entry.number,
        time=_timestamp(entry.at),
        request_id=request.request_id,
        reservation_id=entry.reservation_id,
        tenant=f"{TENANTS}/{request.tenant}",
        model=request.model,
        adapter=request.adapter,
        session_id=request.session_id,
        priority=_PRIORITIES.get(request.priority, routing_pb2.PRIORITY_UNSPECIFIED),
        max_tokens=request.max_tokens,
        outcome=entry.outcome,
        ttft_ms=entry.ttft_ms,
        duration_ms=entry.duration_ms,
        usage=routing_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        moved=entry.moved,
    )
    if decision is not None:
        message.decision.CopyFrom(why_to_proto(decision.why))
        message.endpoint = f"{ENDPOINTS}/{decision.endpoint.spec.id}"
        message.fallbacks.extend(f"{ENDPOINTS}/{each.spec.id}" for each in decision.fallbacks)
    if entry.ended_at is not None:
        message.ended.CopyFrom(_timestamp(entry.ended_at))
    if entry.served_by:
        message.served_by = f"{ENDPOINTS}/{entry.served_by}"
    if refusal is not None:
        message.refusal.CopyFrom(
            pb.Refusal(
                reason=refusal.reason,
                message=refusal.message,
                retry_after_s=refusal.retry_after_s,
                held_ms=refusal.held_ms,
            )
        )
    if whole and decision is not None:
        candidates = entry.candidates()
        message.candidates_dropped = candidates is None
        message.candidates.extend(_candidate(each) for each in candidates or ())
    return message


def _candidate(candidate: Candidate) -> pb.Candidate:
    return pb.Candidate(
        endpoint=f"{ENDPOINTS}/{candidate.endpoint}",
        chosen=candidate.chosen,
        cost=candidate.cost,
        predicted_ttft_ms=candidate.predicted_ttft_ms,
        matched_tokens=uint32(candidate.matched_tokens),
        soft_guards=candidate.soft_guards,
    )


def _timestamp(seconds: float) -> Timestamp:
    found = Timestamp()
    found.FromNanoseconds(int(seconds * 1e9))
    return found
