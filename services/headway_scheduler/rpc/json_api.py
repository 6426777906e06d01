"""Route and Report as HTTP/JSON: the protos' JSON mapping, for data planes that speak no gRPC (docs/clients.md)."""

from typing import Final

import msgspec
from aiohttp import web
from google.protobuf import json_format

from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.http_door import HttpDoor
from headway_scheduler.rpc.http_methods import REPORT, ROUTE, HttpContext, HttpMethod, HttpMethods
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.interceptors import to_status
from headway_scheduler.rpc.json_bodies import from_json, to_json

__all__ = ["TIMEOUT_HEADER", "JsonApi", "timeout_s"]

TIMEOUT_HEADER: Final = "X-Headway-Timeout-S"
"""How long the caller waits for its answer, in seconds: what a deadline is to gRPC."""


class JsonApi:
    """`POST /v1/route` and `POST /v1/report`. Callers, roles, refusals and reservations are as with unary gRPC."""

    def __init__(self, door: HttpDoor, methods: HttpMethods) -> None:
        self._door, self._methods = door, methods.unary

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Serve it there."""
        router.add_post("/v1/route", self._route)
        router.add_post("/v1/report", self._report)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._methods[ROUTE])

    async def _report(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._methods[REPORT])

    async def _answer(self, request: web.Request, method: HttpMethod) -> web.StreamResponse:
        try:
            self._door.admit(request, method.path)
            remaining_s = timeout_s(request)
            message = from_json(await self._door.read(request), method.request())
            answer = await method.handle(message, HttpContext(remaining_s))
        except Exception as error:
            return _refusal(error, method.path)
        return await method.deliver(request, _json(200, to_json(answer)), answer)


def timeout_s(request: web.Request) -> float | None:
    """How long the caller waits, None if it does not say. Raises InvalidField."""
    value = request.headers.get(TIMEOUT_HEADER)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InvalidField(TIMEOUT_HEADER, f"{value!r} is no number of seconds")
    return seconds


def _refusal(error: Exception, method: str) -> web.Response:
    """`{"error": …}` with the google.rpc.Status of the same refusal in gRPC, and the HTTP status it maps to."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        status, error = 413, InvalidField("body", "is larger than max_message_bytes")
        headers = api_error(error).headers()
    else:
        if not isinstance(error, HeadwayError):
            error = unexpected(error, method=method)
        answer = api_error(error)
        status, headers = answer.status, answer.headers()
    return _json(status, msgspec.json.encode({"error": json_format.MessageToDict(to_status(error))}), headers)


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
