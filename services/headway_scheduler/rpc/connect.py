"""The Connect protocol (connectrpc.com): our services' unary methods over HTTP/1.1, as protobuf or JSON.

The cheapest way in for a call of its own: aiohttp takes a third of what grpc.aio does (ADR 53).
"""

import asyncio
import base64
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.http_door import HttpDoor, UnknownEncoding
from headway_scheduler.rpc.http_methods import HttpContext, HttpMethod, HttpMethods
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.interceptors import to_status
from headway_scheduler.rpc.json_bodies import from_json, to_json

__all__ = ["Connect"]

_VERSION: Final = "Connect-Protocol-Version"
_TIMEOUT: Final = "Connect-Timeout-Ms"
_LONGEST_TIMEOUT: Final = 10
"""Digits."""

_JSON: Final = "application/json"
_STREAMS: Final = ("application/connect+proto", "application/connect+json")
_END_OF_STREAM: Final = 2
"""The flag of a stream's last envelope."""

_STATUS: Final[Mapping[str, int]] = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}
"""The protocol's HTTP status of each of its codes, which are gRPC's by other names."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _ProtocolError(Exception):
    """What the protocol itself refuses: gRPC's own answers to the same have no details either."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class _Codec:
    """How messages are written in bodies of one content type. `read` fills a message, and raises InvalidField."""

    content_type: str
    read: Callable[[bytes, Any], Message]
    write: Callable[[Any], bytes]


def _from_proto(body: bytes, message: Message) -> Message:
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidField("body", f"is no {message.DESCRIPTOR.full_name}") from None
    return message


def _to_proto(message: Message) -> bytes:
    return message.SerializeToString()


_CODECS: Final = {
    codec.content_type: codec
    for codec in (_Codec("application/proto", _from_proto, _to_proto), _Codec(_JSON, from_json, to_json))
}


class Connect:
    """`POST /package.Service/Method`. Callers, roles, refusals, deadlines and reservations are as with unary gRPC."""

    def __init__(self, door: HttpDoor, methods: HttpMethods) -> None:
        self._door, self._methods = door, methods

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Serve it there: each method by its whole path, which aiohttp finds by one look into a dictionary."""
        for method in self._methods.unary.values():
            router.add_post(method.path, self._unary(method))
        for path in self._methods.streaming:
            router.add_post(path, self._streaming(path))
        router.add_post(r"/{service:headway\.[\w.]+}/{method}", self._unknown)

    def _unary(self, method: HttpMethod) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._door.admit(request, method.path)
                codec = _codec(request)
                if codec is None:
                    return web.Response(status=415, headers={"Accept-Post": ", ".join(_CODECS)})
                _check_version(request)
                remaining_s = _remaining_s(request)
                if remaining_s is None:
                    answer = await self._call(request, method, codec, None)
                else:
                    answer = await self._call_within(request, method, codec, remaining_s)
            except Exception as error:
                return _refusal(error, method.path)
            return await method.deliver(
                request, web.Response(body=codec.write(answer), content_type=codec.content_type), answer
            )

        return handle

    async def _call(
        self, request: web.Request, method: HttpMethod, codec: _Codec, remaining_s: float | None
    ) -> Message:
        context = HttpContext(remaining_s)
        message = codec.read(await self._door.read(request), method.request())
        answer: Message = await method.handle(message, context)
        return answer

    async def _call_within(
        self, request: web.Request, method: HttpMethod, codec: _Codec, remaining_s: float
    ) -> Message:
        """Cancelled at the deadline, as gRPC cancels it."""
        try:
            async with asyncio.timeout(remaining_s) as deadline:
                return await self._call(request, method, codec, remaining_s)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise _ProtocolError("deadline_exceeded", "the deadline was exceeded") from None

    def _streaming(self, path: str) -> Handler:
        async def refuse(request: web.Request) -> web.StreamResponse:
            try:
                self._door.admit(request, path)
                raise _ProtocolError("unimplemented", f"{path[1:]} streams; streams are served by gRPC")
            except Exception as error:
                return _refusal(error, path, stream=_content_type(request))

        return refuse

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        error = _ProtocolError("unimplemented", f"{request.path[1:]} is no method of this scheduler")
        return _refusal(error, request.path, stream=_content_type(request))


def _content_type(request: web.Request) -> str:
    """Without parameters, of which `charset=utf-8` is the only one that anybody sends."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _codec(request: web.Request) -> _Codec | None:
    return _CODECS.get(request.headers.get("Content-Type", "")) or _CODECS.get(_content_type(request))


def _check_version(request: web.Request) -> None:
    """Raises _ProtocolError where it is not ours; who says none, as curl, is taken at his word."""
    version = request.headers.get(_VERSION, "1")
    if version != "1":
        raise _ProtocolError("invalid_argument", f'{_VERSION}: {version!r} is not "1"')


def _remaining_s(request: web.Request) -> float | None:
    """How long the caller waits, None if it does not say. Raises _ProtocolError."""
    value = request.headers.get(_TIMEOUT)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()):
        raise _ProtocolError("invalid_argument", f"{_TIMEOUT}: {value!r} is no number of milliseconds")
    if len(value) > _LONGEST_TIMEOUT:
        raise _ProtocolError("invalid_argument", f"{_TIMEOUT}: is too long, it has at most {_LONGEST_TIMEOUT} digits")
    if int(value) == 0:
        raise _ProtocolError("deadline_exceeded", "the deadline was exceeded")
    return int(value) / 1000.0


def _refusal(error: Exception, method: str, stream: str = "") -> web.Response:
    """The protocol's error, with the details that gRPC would carry. `stream`: the content type, if of a stream."""
    headers: dict[str, str] = {}
    if isinstance(error, UnknownEncoding):
        error = _ProtocolError("unimplemented", error.message)
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        error = _ProtocolError("resource_exhausted", "the message is larger than max_message_bytes")
    if isinstance(error, _ProtocolError):
        code, body = error.code, _error(error.code, error.message)
    else:
        if not isinstance(error, HeadwayError):
            error = unexpected(error, method=method)
        status = to_status(error)
        code = "canceled" if error.status == "CANCELLED" else error.status.lower()
        body, headers = _error(code, status.message, status.details), api_error(error).headers()
    if stream in _STREAMS:
        last = msgspec.json.encode({"error": body})
        envelope = struct.pack(">BI", _END_OF_STREAM, len(last)) + last
        return web.Response(body=envelope, content_type=stream, headers=headers)
    return web.Response(body=msgspec.json.encode(body), status=_STATUS[code], content_type=_JSON, headers=headers)


def _error(code: str, message: str, details: Sequence[Any] = ()) -> dict[str, Any]:
    """`debug` is for people: what `value` holds."""
    error: dict[str, Any] = {"code": code, "message": message}
    if details:
        error["details"] = [
            {
                "type": detail.TypeName(),
                "value": base64.b64encode(detail.value).decode().rstrip("="),
                "debug": {name: value for name, value in json_format.MessageToDict(detail).items() if name != "@type"},
            }
            for detail in details
        ]
    return error
