"""Tracing as configured: where spans go, how many, or none at all."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway_tracing.tracing import Tracing

__all__ = ["TRACE_HEADERS", "problem_of", "trace_context", "tracing_to"]

TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C's names."""

_LONGEST = 512


def problem_of(endpoint: str) -> str:
    """What keeps spans from going there; empty: nothing."""
    if endpoint and not endpoint.startswith(("http://", "https://")):
        return f"{endpoint!r} must look like http://HOST:4318, or https:// for TLS"
    if endpoint and (find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None):
        return 'needs the extra `tracing`: pip install "headway[tracing]"'
    return ""


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a caller's headers those that tell whose work it is, as far as they can be passed on."""
    given = ((name, headers.get(name, "")) for name in TRACE_HEADERS)
    return {name: value for name, value in given if value and value.isascii() and len(value) <= _LONGEST}


def tracing_to(endpoint: str, service: str, share: float) -> "Tracing | None":
    """Spans by OTLP over HTTP to this collector; None where there is none: then nothing is imported, nothing is asked.

    `share` is of those that come without a decision of their own; others follow their parent.
    """
    if not endpoint:
        return None
    from headway_tracing.otlp_json import OtlpJsonExporter
    from headway_tracing.tracing import Tracing

    return Tracing(OtlpJsonExporter(endpoint), service, share)
