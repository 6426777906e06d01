"""Route and its hold as spans: made when the answer is known, where tracing is on."""

import time
from typing import TYPE_CHECKING, Final

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.domain.decision import Decision
from headway_scheduler.errors import HeadwayError

if TYPE_CHECKING:
    from headway_tracing.tracing import Tracing

__all__ = ["RouteSpan", "trace_upstream"]

_MS_NS: Final = 1e6


class RouteSpan:
    """One Route that is being decided; its parent is what the caller said."""

    __slots__ = ("_began_ns", "_message", "_tracing")

    def __init__(self, tracing: "Tracing", message: pb.RouteRequest) -> None:
        self._tracing, self._message = tracing, message
        self._began_ns = time.time_ns()

    def answered(self, outcome: Decision | HeadwayError) -> None:
        """End it, and the hold within it if there was one."""
        tracing, message = self._tracing, self._message
        span = tracing.start(
            "headway.route",
            {"traceparent": message.traceparent, "tracestate": message.tracestate},
            began_ns=self._began_ns,
            attributes={"headway.tenant": message.tenant, "headway.model": message.model},
        )
        if isinstance(outcome, Decision):
            why = outcome.why
            span.set_attributes(
                {
                    "headway.request_id": outcome.request_id,
                    "headway.reservation_id": outcome.reservation_id,
                    "headway.endpoint": outcome.endpoint.spec.id,
                    "headway.strategy": why.strategy,
                    "headway.fallback_reason": why.fallback_reason,
                    "headway.candidates": why.candidates,
                    "headway.prompt_tokens": why.prompt_tokens,
                    "headway.matched_tokens": why.matched_tokens,
                    "headway.predicted_ttft_ms": why.predicted_ttft_ms or 0.0,
                }
            )
            if why.held_ms > 0.0:
                hold = tracing.start("headway.hold", span, began_ns=self._began_ns)
                hold.end(self._began_ns + int(why.held_ms * _MS_NS))
        else:
            span.set_attributes({"headway.request_id": message.request_id, "headway.refusal": outcome.reason})
        span.end()


def trace_upstream(
    tracing: "Tracing", parent: dict[str, str], endpoint: str, outcome: str, began_ns: int, first_ns: int | None
) -> None:
    """The engine's part of a request that went by, which has just ended. `first_ns`: its first token."""
    attributes = {"headway.endpoint": endpoint, "headway.outcome": outcome}
    span = tracing.start("headway.upstream", parent, began_ns=began_ns, attributes=attributes)
    if first_ns is not None:
        span.add_event("first_token", timestamp=first_ns)
    span.end()
