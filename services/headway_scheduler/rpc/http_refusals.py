"""Refusals as an HTTP data plane answers them: the table of docs/refusals.md, in OpenAI's shape."""

from typing import Final

import grpc
from headway_openai.errors import ApiError, of_refusal

from headway_scheduler.errors import HeadwayError

__all__ = ["api_error"]

_CODES: Final = {code.name: code for code in grpc.StatusCode}


def api_error(error: HeadwayError) -> ApiError:
    """The HTTP status, Retry-After, reason and error body of a refusal."""
    code = _CODES[error.status]
    return of_refusal(code, error.reason, error.message, error.facts, retry_after_s=error.retry_after_s)
