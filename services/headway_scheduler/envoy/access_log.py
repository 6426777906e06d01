"""Envoy's access log (envoy.service.accesslog.v3.AccessLogService): what became of the requests that ext_authz routed.

An entry ends its reservation. Envoy may drop entries: those reservations end by expiry, and nothing is billed by them.
"""

from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import structlog
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from google.protobuf.duration_pb2 import Duration
from grpc.aio import ServicerContext

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal
from headway_scheduler.domain.report import Finished, Outcome, ReportStatus, ServedBy, Usage
from headway_scheduler.envoy.light import OBSERVATION, RESERVATION
from headway_scheduler.envoy.watching import Watched
from headway_scheduler.rpc.authentication import current_principal
from headway_scheduler.rpc.calls import UnaryCalls

__all__ = ["AccessLogService", "outcome_of"]

log = structlog.get_logger()

_NAMESPACE: Final = "envoy.filters.http.ext_authz"
_UNREACHED: Final = (
    "upstream_connection_failure", "no_healthy_upstream", "upstream_overflow", "dns_resolution_failure",
    "no_cluster_found",
)  # fmt: skip
_TOO_LATE: Final = (
    "upstream_request_timeout", "stream_idle_timeout", "duration_timeout", "upstream_max_stream_duration_reached",
)  # fmt: skip
_CLIENT_LEFT: Final = ("downstream_connection_termination", "downstream_remote_reset", "downstream_protocol_error")
_BROKEN: Final = ("upstream_remote_reset", "upstream_connection_termination", "upstream_protocol_error", "local_reset")

Context = ServicerContext[Any, Any]  # StreamAccessLogsMessage in, StreamAccessLogsResponse out; neither is typed
Entry: TypeAlias = accesslog_pb2.HTTPAccessLogEntry
Common: TypeAlias = accesslog_pb2.AccessLogCommon


class AccessLogService(als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]  # untyped package
    """Reads every Envoy's stream. `calls` are those of the ext_authz service."""

    def __init__(self, scheduler: Scheduler, calls: UnaryCalls) -> None:
        self._scheduler, self._calls = scheduler, calls
        self._prompt_engines = scheduler.config.engines_with_prompt_headers

    async def StreamAccessLogs(  # noqa: N802
        self, request_iterator: AsyncIterator[als_pb2.StreamAccessLogsMessage], context: Context
    ) -> als_pb2.StreamAccessLogsResponse:
        """Take entries until Envoy leaves."""
        principal = current_principal()
        await self._scheduler.opened()
        async for message in request_iterator:
            self._scheduler.check_serves()
            for entry in message.http_logs.log_entry:
                self._end(entry, principal)
        return als_pb2.StreamAccessLogsResponse()

    def _end(self, entry: Entry, principal: Principal) -> None:
        common = entry.common_properties
        if common.intermediate_log_entry:
            return
        if observation := _named(common, OBSERVATION):
            self._observe(entry, observation, principal)
            return
        reservation_id = _named(common, RESERVATION)
        if not reservation_id:
            return
        reservation = self._scheduler.ledger.find(reservation_id)
        if reservation is None:
            return  # it has expired, or was another scheduler's
        served = self._served_by(common)
        if served:
            self._calls.apply(reservation_id, ServedBy(served), principal)
        finished = Finished(
            outcome=outcome_of(entry),
            usage=Usage(),
            duration_ms=_milliseconds(common, "duration"),
            ttft_ms=self._ttft_ms(entry, reservation.slot),
        )
        status, detail = self._calls.apply(reservation_id, finished, principal)
        if status is not ReportStatus.APPLIED:
            log.warning("access_log_entry_not_applied", reservation=reservation_id, status=status.value, detail=detail)

    def _observe(self, entry: Entry, observation: str, principal: Principal) -> None:
        """A request that was only watched: where it went, and how long its first token took."""
        scheduler, common = self._scheduler, entry.common_properties
        verdict = scheduler.observations.take(observation)
        if verdict is None:
            return
        address = common.upstream_remote_address.socket_address
        served = f"{address.address}:{address.port_value}" if address.address else ""
        reservation_id = Watched(scheduler, verdict).went_to(served, self._calls.owner(principal))
        reservation = scheduler.ledger.find(reservation_id)
        if reservation is None:
            return
        ttft_ms = self._ttft_ms(entry, reservation.slot)
        if ttft_ms is not None:
            scheduler.observations.first_token(verdict, ttft_ms)
        finished = Finished(outcome_of(entry), Usage(), _milliseconds(common, "duration"), ttft_ms)
        self._calls.apply(reservation_id, finished, principal)

    def _served_by(self, common: Common) -> str:
        """The endpoint's own address; empty where none was reached."""
        address = common.upstream_remote_address.socket_address
        return self._scheduler.addresses.named(f"{address.address}:{address.port_value}") if address.address else ""

    def _ttft_ms(self, entry: Entry, slot: int) -> float | None:
        """The time to the answer's first byte, where that is a token's: in a stream, from such an engine."""
        endpoint = self._scheduler.fleet.by_slot.get(slot)
        if endpoint is None or endpoint.spec.engine not in self._prompt_engines:
            return None
        if not entry.response.response_headers.get("content-type", "").startswith("text/event-stream"):
            return None
        sent = _milliseconds(entry.common_properties, "time_to_first_upstream_tx_byte")
        answered = _milliseconds(entry.common_properties, "time_to_first_upstream_rx_byte")
        return None if sent is None or answered is None else max(0.0, answered - sent)


def outcome_of(entry: Entry) -> Outcome:
    """How a request ended, by Envoy's flags first and the status then.

    A client that leaves when the engine had answered all (after `[DONE]`) ends it well.
    """
    flags, status = entry.common_properties.response_flags, entry.response.response_code.value
    complete = entry.common_properties.HasField("time_to_last_upstream_rx_byte")
    if _any(flags, _CLIENT_LEFT) and not complete:
        return Outcome.CANCELLED
    if _any(flags, _TOO_LATE):
        return Outcome.TIMEOUT
    if _any(flags, _UNREACHED):
        return Outcome.CONNECT_ERROR
    if _any(flags, _BROKEN) and not complete:
        return Outcome.SERVER_ERROR
    if status >= 500:
        return Outcome.SERVER_ERROR
    if status >= 400:
        return Outcome.CLIENT_ERROR
    return Outcome.SUCCESS if status else Outcome.CANCELLED


def _any(flags: accesslog_pb2.ResponseFlags, names: tuple[str, ...]) -> bool:
    return any(getattr(flags, name) for name in names)


def _named(common: Common, key: str) -> str:
    """What the dynamic metadata of our answer says under `key`."""
    metadata = common.metadata.filter_metadata
    if _NAMESPACE not in metadata:
        return ""
    fields = metadata[_NAMESPACE].fields
    return str(fields[key].string_value) if key in fields else ""


def _milliseconds(common: Common, field: str) -> float | None:
    if not common.HasField(field):
        return None
    duration: Duration = getattr(common, field)
    return duration.seconds * 1e3 + duration.nanos / 1e6
