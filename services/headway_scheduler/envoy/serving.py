"""Who served a request, and who ended it, as far as Envoy tells."""

from typing import Final

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

__all__ = ["response_details", "served_by"]

_NAMESPACE: Final = "envoy.lb"
_SERVED: Final = "x-gateway-destination-endpoint-served"
_ATTRIBUTES: Final = "envoy.filters.http.ext_proc"


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


def _attribute(message: pb.ProcessingRequest, name: str) -> str:
    if _ATTRIBUTES not in message.attributes:
        return ""
    value: str = message.attributes[_ATTRIBUTES].fields[name].string_value
    return value
