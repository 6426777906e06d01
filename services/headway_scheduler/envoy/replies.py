"""What we answer Envoy, ready for the wire: most messages are the same every time, and made once."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from headway_openai.errors import ApiError

from headway_scheduler.envoy.head import DESTINATION

__all__ = [
    "CHUNK_BYTES",
    "GO_ON",
    "body_pieces",
    "extension",
    "immediate",
    "replaced_body",
    "response_headers",
    "routed",
]

_NONE: Final[Mapping[str, str]] = MappingProxyType({})

CHUNK_BYTES: Final = 62_000
"""As much of a body as one message may carry, by the endpoint-picker protocol."""

_OVERWRITE: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_NAMESPACE: Final = "envoy.lb"

GO_ON: Final[dict[str, bytes]] = {
    "request_headers": pb.ProcessingResponse(request_headers=pb.HeadersResponse()).SerializeToString(),
    "request_body": pb.ProcessingResponse(request_body=pb.BodyResponse()).SerializeToString(),
    "request_trailers": pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString(),
    "response_headers": pb.ProcessingResponse(response_headers=pb.HeadersResponse()).SerializeToString(),
    "response_body": pb.ProcessingResponse(response_body=pb.BodyResponse()).SerializeToString(),
    "response_trailers": pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString(),
}
"""Nothing to change, by the kind of message that it answers."""


def routed(
    kind: str,
    *,
    destination: str,
    headers: Mapping[str, str] = _NONE,
    strip: Sequence[str] = (),
    request_id: str = "",
    body: bytes | None = None,
    content_length: int | None = None,
) -> bytes:
    """The reply that says where the request goes; `kind` is the message it answers, headers or body.

    `destination` empty: wherever the cluster likes. `headers`: for the engine. `body`: what the body becomes, in a
    reply to the whole of it.
    """
    message = pb.ProcessingResponse()
    response = getattr(message, kind).response
    response.header_mutation.SetInParent()
    mutation = response.header_mutation
    mutation.remove_headers.extend(strip)
    if destination:
        response.clear_route_cache = True
        _set(mutation, DESTINATION, destination.encode())
        message.dynamic_metadata.fields[_NAMESPACE].struct_value.fields[DESTINATION].string_value = destination
    for name, value in headers.items():
        _set(mutation, name, value.encode())
    if request_id:
        _set(mutation, "x-request-id", request_id.encode())
    if content_length is not None:
        _set(mutation, "content-length", b"%d" % content_length)
    if body is not None:
        response.body_mutation.body = body
    reply: bytes = message.SerializeToString()
    return reply


def body_pieces(kind: str, body: bytes, *, end: bool) -> Iterator[bytes]:
    """A body, or a part of one, for a plane that takes bodies as streams; `end`: nothing follows it."""
    last = max(0, len(body) - 1) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, last + 1, CHUNK_BYTES):
        message = pb.ProcessingResponse()
        piece = getattr(message, kind).response.body_mutation.streamed_response
        piece.body = body if not last else body[start : start + CHUNK_BYTES]
        piece.end_of_stream = end and start == last
        yield message.SerializeToString()


def replaced_body(body: bytes, *, whole: bool) -> bytes:
    """One piece of an answer, or all of it, changed; whoever waits for a length is told the new one."""
    message = pb.ProcessingResponse()
    response = message.response_body.response
    if body:
        response.body_mutation.body = body
    else:
        response.body_mutation.clear_body = True
    if whole:
        _set(response.header_mutation, "content-length", b"%d" % len(body))
    reply: bytes = message.SerializeToString()
    return reply


def response_headers(remove: Sequence[str], add: Mapping[str, str] = _NONE) -> bytes:
    """The reply to an answer's headers: these go, and those come."""
    message = pb.ProcessingResponse()
    mutation = message.response_headers.response.header_mutation
    mutation.remove_headers.extend(remove)
    for name, value in add.items():
        _set(mutation, name, value.encode())
    reply: bytes = message.SerializeToString()
    return reply


def extension(seconds: float) -> bytes:
    """Ask for more time, counted from now."""
    message = pb.ProcessingResponse()
    message.override_message_timeout.FromNanoseconds(int(seconds * 1e9))
    reply: bytes = message.SerializeToString()
    return reply


def immediate(error: ApiError) -> bytes:
    """Answer the client ourselves."""
    message = pb.ProcessingResponse()
    answer = message.immediate_response
    answer.status.code = error.status
    answer.body = error.body()
    answer.details = f"headway_{error.reason.lower()}"
    _set(answer.headers, "content-type", b"application/json")
    for key, value in error.headers().items():
        _set(answer.headers, key, value.encode())
    reply: bytes = message.SerializeToString()
    return reply


def _set(mutation: pb.HeaderMutation, key: str, value: bytes) -> None:
    option = mutation.set_headers.add()
    option.append_action = _OVERWRITE
    option.header.key = key
    option.header.raw_value = value
