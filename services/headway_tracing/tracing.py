"""Spans, batched and sent by a thread of their own."""

import threading
from collections.abc import Mapping
from typing import Final

import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headway_tracing.kinds import Kind

__all__ = ["Tracing"]

_KINDS = {Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT, Kind.INTERNAL: SpanKind.INTERNAL}
Value = str | int | float | bool
_W3C = TraceContextTextMapPropagator()
_PATIENCE_S: Final = 2.0

log = structlog.get_logger()


class Tracing:
    """One process's tracer. No global of OpenTelemetry's is set: several may live in one process."""

    def __init__(self, exporter: SpanExporter, service: str, share: float, patience_s: float = _PATIENCE_S) -> None:
        """`service` names the process; `share` of the traces that begin here are sampled.

        `patience_s`: how long `close` waits for a collector.
        """
        self._exporter, self._patience_s = exporter, patience_s
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ParentBased(TraceIdRatioBased(share)),
            shutdown_on_exit=False,  # it would wait for the collector once more
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headway")

    def start(
        self,
        name: str,
        parent: Mapping[str, str] | Span,
        *,
        kind: Kind = Kind.INTERNAL,
        began_ns: int | None = None,
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        """A span that is to be ended. `parent` is one, or headers with `traceparent`; without one it begins a trace."""
        context = trace.set_span_in_context(parent) if isinstance(parent, Span) else _W3C.extract(parent)
        return self._tracer.start_span(name, context, _KINDS[kind], attributes, start_time=began_ns)

    def headers(self, span: Span) -> dict[str, str]:
        """`traceparent`, and `tracestate` where there is one: what goes on to whoever works for this span."""
        found: dict[str, str] = {}
        _W3C.inject(found, trace.set_span_in_context(span))
        return found

    def flush(self) -> None:
        """Send what waits. Blocks."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what waits and end the thread. Blocks, but not for a collector that does not answer: spans are lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="headway-tracing-close", daemon=True)
        closing.start()
        closing.join(self._patience_s)
        if closing.is_alive():
            log.warning("spans_lost", reason=f"the collector did not answer within {self._patience_s:g} s")
            self._exporter.shutdown()
