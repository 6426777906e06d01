"""What ListUsage asks for and answers. A page token holds the whole question's last key: time, tenant, model."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from headway.admin.v1 import admin_pb2 as pb

from headway_scheduler.domain import names
from headway_scheduler.domain.usage import Interval, Usage
from headway_scheduler.errors import InvalidField
from headway_scheduler.rpc.paging import make_token, read_token

__all__ = ["UsageQuery", "usage_message", "usage_query", "usage_token"]

_DEFAULT_SPAN: Final = timedelta(days=1)
_INTERVALS: Final = {
    pb.USAGE_INTERVAL_UNSPECIFIED: Interval.MINUTE,
    pb.USAGE_INTERVAL_MINUTE: Interval.MINUTE,
    pb.USAGE_INTERVAL_HOUR: Interval.HOUR,
    pb.USAGE_INTERVAL_DAY: Interval.DAY,
    pb.USAGE_INTERVAL_TOTAL: Interval.TOTAL,
}


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """What is asked: `since` is inclusive, `until` not; `after` is the key of the last row of the page before."""

    since: datetime
    until: datetime
    model: str
    interval: Interval
    after: tuple[datetime, str, str] | None
    listing: str


def usage_query(request: pb.ListUsageRequest, now: datetime) -> UsageQuery:
    """The question. Later pages of one that named no times are of the times that the first page had."""
    if request.interval not in _INTERVALS:
        raise InvalidField("interval", f"{request.interval} is no UsageInterval")
    model = names.short(names.MODELS, request.model, "model") if request.model else ""
    asked = f"{request.parent} {model} {request.interval} {_shown(request, 'start_time')} {_shown(request, 'end_time')}"
    listing = f"ListUsage {asked}"
    until = _moment(request.end_time, "end_time") if request.HasField("end_time") else now
    since = _moment(request.start_time, "start_time") if request.HasField("start_time") else _day_before(until)
    after = None
    if seen := read_token(listing, request.page_token):
        try:
            first, last, minute, tenant, named = seen.split(" ")
            since, until = _read(first), _read(last)
            after = (_read(minute), tenant, named)
        except (ValueError, OverflowError):
            raise InvalidField("page_token", "is not one that this scheduler made") from None
    if since >= until:
        raise InvalidField("start_time", "must be before end_time")
    return UsageQuery(since, until, model, _INTERVALS[request.interval], after, listing)


def usage_token(query: UsageQuery, last: Usage) -> str:
    """The token of the page after this row."""
    times = (moment.isoformat() for moment in (query.since, query.until, last.minute))
    return make_token(query.listing, " ".join([*times, last.tenant, last.model]))


def usage_message(row: Usage) -> pb.Usage:
    """One row."""
    message = pb.Usage(
        tenant=f"{names.TENANTS}/{row.tenant}",
        model=f"{names.MODELS}/{row.model}",
        requests=row.requests,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        refusals=row.refusals,
        failures=row.failures,
        fail_open_requests=row.fail_open,
    )
    message.start_time.FromDatetime(row.minute)
    return message


def _shown(request: pb.ListUsageRequest, field: str) -> str:
    moment: Timestamp = getattr(request, field)
    return f"{moment.seconds}.{moment.nanos}" if request.HasField(field) else "-"  # type: ignore[arg-type]  # as named


def _day_before(until: datetime) -> datetime:
    try:
        return until - _DEFAULT_SPAN
    except OverflowError:
        raise InvalidField("end_time", "is no valid time") from None


def _read(moment: str) -> datetime:
    return datetime.fromisoformat(moment).astimezone(UTC)


def _moment(value: Timestamp, field: str) -> datetime:
    try:
        return value.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidField(field, "is no valid time") from None
