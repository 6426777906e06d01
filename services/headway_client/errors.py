"""What a refused Route raises, and how it is read from the wire."""

import grpc
from google.rpc import error_details_pb2, status_pb2

__all__ = ["RouteRefused", "refusal_from_rpc", "refusal_from_status"]

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class RouteRefused(Exception):  # the field's word: a refusal is an answer, not a fault
    """No endpoint was given.

    `code` is the gRPC status and `reason` the ErrorInfo reason (`SATURATED`, `UNKNOWN_MODEL`, …). Reasons
    made by the client itself: `NO_SCHEDULER` (nobody answered and it could not route by itself), `DEADLINE`
    (the call's own timeout ran out) and `CLIENT_CLOSED`. `retry_after_s` is the scheduler's advice, None
    where it gave none.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code.name} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}


def refusal_from_status(status: status_pb2.Status) -> RouteRefused:
    """Read a `google.rpc.Status` with its ErrorInfo and RetryInfo."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for detail in status.details:
        if not detail.Unpack(info) and detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return RouteRefused(code, info.reason or code.name, status.message, retry_after_s, dict(info.metadata))


def refusal_from_rpc(error: grpc.aio.AioRpcError) -> RouteRefused:
    """Read the status that ended a call."""
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            return refusal_from_status(status_pb2.Status.FromString(value))
    return RouteRefused(error.code(), error.code().name, error.details() or "")
