"""Refusals and faults as HTTP answers."""

from aiohttp import web
from headway_client import RouteRefused
from headway_openai.errors import ApiError, of_refusal

__all__ = ["from_refusal", "to_response"]


def from_refusal(refusal: RouteRefused) -> ApiError:
    """Translate what the scheduler refused."""
    return of_refusal(
        refusal.code,
        refusal.reason,
        refusal.message,
        refusal.metadata,
        retry_after_s=refusal.retry_after_s,
    )


def to_response(error: ApiError, request_id: str) -> web.Response:
    """Build the HTTP answer."""
    response = web.Response(status=error.status, body=error.body(), content_type="application/json")
    response.headers.update(error.headers())
    if request_id:
        response.headers["x-request-id"] = request_id
    return response
