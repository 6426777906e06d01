"""Errors in the shape that OpenAI's clients read."""

import math
from collections.abc import Mapping

import grpc
import msgspec

__all__ = ["ApiError", "error_event", "of_refusal"]

_HTTP_STATUS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.CANCELLED: 503,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_DEFAULT_RETRY_AFTER_S = 1.0
_RATE_LIMIT = "x-ratelimit-"


class ApiError(Exception):
    """An answer other than success, made by whoever stands before the engines."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        reason: str = "",
        retry_after_s: float | None = None,
        rate_limits: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.rate_limits = rate_limits or {}

    def body(self) -> bytes:
        """Return `{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """The reason, what is left of the caller's quotas, and Retry-After in whole seconds, at least one."""
        headers = {"x-headway-reason": self.reason} if self.reason else {}
        headers.update(self.rate_limits)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


def of_refusal(
    code: grpc.StatusCode, reason: str, message: str, facts: Mapping[str, str], retry_after_s: float | None = None
) -> ApiError:
    """What the scheduler refused, as an HTTP data plane answers it (docs/refusals.md); `facts`: the ErrorInfo's."""
    status = _HTTP_STATUS.get(code, 500)
    if status == 429 and retry_after_s is None:
        retry_after_s = _DEFAULT_RETRY_AFTER_S
    name = "model_not_found" if reason == "UNKNOWN_MODEL" else reason.lower()
    return ApiError(
        status,
        name,
        message or reason,
        param=facts.get("field"),
        reason=reason,
        retry_after_s=retry_after_s,
        rate_limits={key: value for key, value in facts.items() if key.startswith(_RATE_LIMIT)},
    )


def error_event(error: ApiError) -> bytes:
    """Build the SSE event that ends a stream which can end no better."""
    return b"data: " + error.body() + b"\n\n"
