"""Reports and resumes to domain values and back. Proto messages stop here."""

from typing import Final

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.domain.names import ENDPOINTS
from headway_scheduler.domain.report import (
    Finished,
    FirstToken,
    Outcome,
    Progress,
    Report,
    ReportStatus,
    Resumed,
    ServedBy,
    Usage,
)
from headway_scheduler.errors import InvalidField

__all__ = ["report_from_proto", "result_to_proto", "resumed_from_proto"]

_OUTCOMES: Final = {
    pb.OUTCOME_SUCCESS: Outcome.SUCCESS,
    pb.OUTCOME_CANCELLED: Outcome.CANCELLED,
    pb.OUTCOME_CLIENT_ERROR: Outcome.CLIENT_ERROR,
    pb.OUTCOME_SERVER_ERROR: Outcome.SERVER_ERROR,
    pb.OUTCOME_CONNECT_ERROR: Outcome.CONNECT_ERROR,
    pb.OUTCOME_TIMEOUT: Outcome.TIMEOUT,
}
_STATUSES: Final = {
    ReportStatus.APPLIED: pb.REPORT_STATUS_APPLIED,
    ReportStatus.DUPLICATE: pb.REPORT_STATUS_DUPLICATE,
    ReportStatus.UNKNOWN: pb.REPORT_STATUS_UNKNOWN,
    ReportStatus.INVALID: pb.REPORT_STATUS_INVALID,
}


def report_from_proto(message: pb.Report) -> Report:
    """What happened. Raises InvalidField."""
    kind = message.WhichOneof("event")
    if kind == "first_token":
        return FirstToken(_positive(message.first_token, "ttft_ms", "first_token"))
    if kind == "progress":
        return Progress()
    if kind == "served_by":
        if not message.served_by.endpoint:
            raise InvalidField("served_by.endpoint", "is required")
        return ServedBy(message.served_by.endpoint.removeprefix(f"{ENDPOINTS}/"))
    if kind != "finished":
        raise InvalidField("event", "is required: first_token, progress, finished or served_by")
    finished = message.finished
    if finished.outcome not in _OUTCOMES:
        raise InvalidField("finished.outcome", "is required")
    usage = finished.usage
    return Finished(
        outcome=_OUTCOMES[finished.outcome],
        usage=Usage(
            usage.prompt_tokens if usage.HasField("prompt_tokens") else None,
            usage.completion_tokens if usage.HasField("completion_tokens") else None,
            usage.cached_tokens if usage.HasField("cached_tokens") else None,
        ),
        duration_ms=_positive(finished, "duration_ms", "finished"),
        ttft_ms=_positive(finished, "ttft_ms", "finished"),
    )


def _positive(message: pb.FirstToken | pb.Finished, field: str, parent: str) -> float | None:
    if not message.HasField(field):  # type: ignore[arg-type]  # the names come from this module
        return None
    value: float = getattr(message, field)
    if not 0 <= value < float("inf"):
        raise InvalidField(f"{parent}.{field}", f"{value} is no duration")
    return value


def result_to_proto(reservation_id: str, status: ReportStatus, detail: str) -> pb.ReportResult:
    """What became of a report."""
    return pb.ReportResult(reservation_id=reservation_id, status=_STATUSES[status], detail=detail)


def resumed_from_proto(message: pb.ResumedReservation) -> tuple[Resumed, pb.RouteRequest]:
    """What the holder knows, and the request it stands for. Raises InvalidField."""
    if not message.reservation_id:
        raise InvalidField("reservation_id", "is required")
    if not message.endpoint:
        raise InvalidField("endpoint", "is required")
    request = pb.RouteRequest(
        request_id=message.request_id or message.reservation_id,
        tenant=message.tenant,
        model=message.model,
        adapter=message.adapter,
        task_hint=message.task_hint,
    )
    if message.HasField("max_tokens"):
        request.max_tokens = message.max_tokens
    if message.HasField("blocks"):
        request.blocks.CopyFrom(message.blocks)
    resumed = Resumed(
        reservation_id=message.reservation_id,
        endpoint=message.endpoint.removeprefix(f"{ENDPOINTS}/"),
        matched_tokens=message.matched_tokens,
        first_token_seen=message.first_token_seen,
        fail_open=message.fail_open,
    )
    return resumed, request
