"""Errors in the shape that OpenAI's clients read."""

import math

import grpc
import msgspec
from aiohttp import web
from headway_client import RouteRefused

__all__ = ["ApiError", "error_event", "from_refusal", "to_response"]

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


class ApiError(Exception):
    """An answer other than success, made by the gateway itself."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        reason: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.reason = reason
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return `{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def from_refusal(refusal: RouteRefused) -> ApiError:
    """Translate what the scheduler refused by DESIGN.md's table."""
    status = _HTTP_STATUS.get(refusal.code, 500)
    retry_after_s = refusal.retry_after_s
    if status == 429 and retry_after_s is None:
        retry_after_s = _DEFAULT_RETRY_AFTER_S
    code = "model_not_found" if refusal.reason == "UNKNOWN_MODEL" else refusal.reason.lower()
    return ApiError(
        status,
        code,
        refusal.message or refusal.reason,
        param=refusal.metadata.get("field"),
        reason=refusal.reason,
        retry_after_s=retry_after_s,
    )


def to_response(error: ApiError, request_id: str) -> web.Response:
    """Build the HTTP answer; Retry-After is whole seconds, at least one."""
    response = web.Response(status=error.status, body=error.body(), content_type="application/json")
    if request_id:
        response.headers["x-request-id"] = request_id
    if error.reason:
        response.headers["x-headway-reason"] = error.reason
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return response


def error_event(error: ApiError) -> bytes:
    """Build the SSE event that ends a stream which can end no better."""
    return b"data: " + error.body() + b"\n\n"
