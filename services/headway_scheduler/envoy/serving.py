"""Who answered a request, and whose fault a failure is, as far as Envoy tells."""

from typing import Final

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from headway_scheduler.domain.report import Outcome

__all__ = ["outcome_of", "response_details", "served_by"]

_NAMESPACE: Final = "envoy.lb"
_SERVED: Final = "x-gateway-destination-endpoint-served"
_ATTRIBUTES: Final = "envoy.filters.http.ext_proc"
_VIA_UPSTREAM: Final = "via_upstream"
_RESET: Final = "upstream_reset_before_response_started"


def served_by(message: pb.ProcessingRequest) -> str:
    """`ip:port` of the endpoint that answered; empty: not told."""
    metadata = message.metadata_context.filter_metadata
    if _NAMESPACE in metadata:
        served: str = metadata[_NAMESPACE].fields[_SERVED].string_value
        if served:
            return served
    return _attribute(message, "upstream.address")


def response_details(message: pb.ProcessingRequest) -> str:
    """Why the answer is what it is: `via_upstream`, or Envoy's own reason to make it; empty: not told."""
    return _attribute(message, "response.code_details")


def outcome_of(status: int, details: str) -> Outcome:
    """What an answer's status says of the endpoint. A 4xx is the request's fault.

    Where Envoy made the answer itself for a reason that is not the endpoint's (no room in a circuit breaker, another
    filter), the request counts as given up. Without `details` a 5xx is taken to be the endpoint's.
    """
    if status < 400:
        return Outcome.SUCCESS
    if status < 500:
        return Outcome.CLIENT_ERROR
    if details in ("", _VIA_UPSTREAM):
        return Outcome.SERVER_ERROR
    if "timeout" in details:
        return Outcome.TIMEOUT
    return Outcome.CONNECT_ERROR if details.startswith(_RESET) else Outcome.CANCELLED


def _attribute(message: pb.ProcessingRequest, name: str) -> str:
    if _ATTRIBUTES not in message.attributes:
        return ""
    value: str = message.attributes[_ATTRIBUTES].fields[name].string_value
    return value
