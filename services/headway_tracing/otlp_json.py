"""Spans to a collector as OTLP over HTTP, in its JSON encoding (opentelemetry.io, OTLP specification 1.3).

The exporters of OpenTelemetry bring generated protobuf modules that Envoy's protos (xds-protos) bring too, older and in
the same place: whichever is installed last breaks the other (ADR 48).
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

__all__ = ["OtlpJsonExporter"]

_PATH: Final = "/v1/traces"
_TIMEOUT_S: Final = 10.0
Json = dict[str, Any]  # as OTLP's JSON mapping has it


class OtlpJsonExporter(SpanExporter):
    """Posts batches to `endpoint`, `http://HOST:4318`. What cannot be sent is lost. Runs in the batches' own thread."""

    def __init__(self, endpoint: str) -> None:
        self._url = endpoint.rstrip("/") + _PATH

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them; blocks."""
        body = json.dumps({"resourceSpans": [_resource(span) for span in spans]}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers)  # noqa: S310 - the setting was checked: http or https
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310
                return SpanExportResult.SUCCESS
        except (OSError, urllib.error.URLError):
            return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing is kept."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept."""
        return True


def _resource(span: ReadableSpan) -> Json:
    scope = span.instrumentation_scope
    scoped = {"scope": {"name": scope.name if scope else ""}, "spans": [_span(span)]}
    return {"resource": {"attributes": _attributes(span.resource.attributes)}, "scopeSpans": [scoped]}


def _span(span: ReadableSpan) -> Json:
    context, parent = span.get_span_context(), span.parent
    found: Json = {
        **_ids(context),
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP's begin with "unspecified"
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes or {}),
        "events": [_event(event) for event in span.events],
        "status": {"code": span.status.status_code.value, "message": span.status.description or ""},
    }
    if parent is not None:
        found["parentSpanId"] = f"{parent.span_id:016x}"
    return found


def _event(event: Event) -> Json:
    time_ns, attributes = str(event.timestamp), _attributes(event.attributes or {})
    return {"timeUnixNano": time_ns, "name": event.name, "attributes": attributes}


def _ids(context: SpanContext | None) -> Json:
    if context is None:
        return {}
    found = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    state = context.trace_state.to_header()
    return found | ({"traceState": state} if state else {})


def _attributes(values: Mapping[str, Any]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> Json:  # what OpenTelemetry takes as an attribute
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [_value(each) for each in value]}}
