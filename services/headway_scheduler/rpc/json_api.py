"""Route and Report as HTTP/JSON: the protos' JSON mapping, for data planes that speak no gRPC (docs/clients.md)."""

import asyncio
import re
import time
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message
from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal
from headway_scheduler.errors import HeadwayError, InvalidField, NoCredential, NotPermitted
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.authorization import authorize
from headway_scheduler.rpc.calls import UnaryCalls
from headway_scheduler.rpc.convert.routing import decision_to_proto
from headway_scheduler.rpc.failures import Failures
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.interceptors import to_status
from headway_scheduler.tls import names_in

__all__ = ["TIMEOUT_HEADER", "JsonApi", "read_body", "timeout_s"]

TIMEOUT_HEADER: Final = "X-Headway-Timeout-S"
"""How long the caller waits for its answer, in seconds: what a deadline is to gRPC."""

_ROUTER: Final = f"/{pb.DESCRIPTOR.services_by_name['Router'].full_name}"
_TOO_DEEP: Final = 100
_BODY_S: Final = 30.0
"""How long a body may take to come in."""

M = TypeVar("M", bound=Message)


class JsonApi:
    """`POST /v1/route` and `POST /v1/report`. Callers, roles, refusals and reservations are as with unary gRPC."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self._scheduler = scheduler
        self._calls = UnaryCalls(scheduler)
        self._authenticator = Authenticator(
            lambda: scheduler.desired,
            required=config.credentials_required,
            clock=lambda: datetime.now(UTC),
            failures=Failures(config.authentication_failures_per_minute, time.monotonic, scheduler.authentication),
        )
        self._certificate_required = config.certificate_required
        self._private = config.http_is_private
        self._longest_body = config.max_message_bytes

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Serve it there."""
        router.add_post("/v1/route", self._route)
        router.add_post("/v1/report", self._report)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        try:
            principal = self.admit(request, f"{_ROUTER}/Route")
            remaining_s = timeout_s(request)
            message = await self._read(request, pb.RouteRequest())
            decision = await self._calls.route(message, principal, remaining_s)
        except Exception as error:
            return _refusal(error, "Route")
        response = _json(200, json_format.MessageToDict(decision_to_proto(decision)))
        try:
            await response.prepare(request)
            await response.write_eof()
        except BaseException:  # the caller left between decision and answer
            self._calls.give_back(decision, principal)
            raise
        return response

    async def _report(self, request: web.Request) -> web.StreamResponse:
        try:
            principal = self.admit(request, f"{_ROUTER}/Report")
            message = await self._read(request, pb.ReportRequest())
            await self._scheduler.opened()
            response = pb.ReportResponse(results=self._calls.report(message.reports, principal))
        except Exception as error:
            return _refusal(error, "Report")
        return _json(200, json_format.MessageToDict(response))

    def admit(self, request: web.Request, method: str) -> Principal:
        """Who calls, if he may call `method`, a gRPC path. Raises NoCredential, NotPermitted."""
        if not self._private:
            raise NotPermitted("beyond loopback, calls over HTTP need http_tls or insecure=true")
        certificate = request.get_extra_info("peercert")
        try:
            if self._certificate_required and not certificate:
                raise NoCredential("a client certificate is required")
            proof = request.headers.get("Authorization") or names_in(certificate) or None
            principal = self._authenticator.identify(proof).principal
        except NoCredential as error:
            raise self._authenticator.refusal(error, request.remote or "") from None
        authorize(principal, method)
        return principal

    async def _read(self, request: web.Request, message: M) -> M:
        """The body as this message. Raises InvalidField, and HTTPRequestEntityTooLarge while it still comes in."""
        if (request.content_length or 0) > self._longest_body:
            raise web.HTTPRequestEntityTooLarge(self._longest_body, request.content_length or 0)
        try:
            # Stricter than Python's own: it lets no half of a surrogate pair through, on which protobuf fails.
            fields = msgspec.json.decode(await read_body(request))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise InvalidField("body", "is no JSON") from None
        if not isinstance(fields, dict):
            raise InvalidField("body", "must be a JSON object")
        if isinstance(message, pb.RouteRequest):
            _take_ids(fields, message)
        try:
            json_format.ParseDict(fields, message, max_recursion_depth=_TOO_DEEP)
        except json_format.ParseError as error:
            raise _invalid(str(error)) from None
        return message


def _take_ids(fields: dict[str, Any], message: pb.RouteRequest) -> None:
    """Move a prompt's token ids over at once, where all are plain numbers: one by one, two million take seconds."""
    tokens = fields.get("tokens")
    if not isinstance(tokens, dict):
        return
    ids = tokens.get("ids")
    others = ("text", "chat", "blocks")  # json_format says what is wrong with two prompts
    if not isinstance(ids, list) or set(map(type, ids)) != {int} or any(name in fields for name in others):
        return
    try:
        message.tokens.ids.extend(ids)
    except (ValueError, OverflowError):
        message.ClearField("tokens")  # json_format says which
    else:
        fields["tokens"] = {name: value for name, value in tokens.items() if name != "ids"}


_UNKNOWN_FIELD: Final = re.compile(r'has no field named "(?P<name>.*?)" at "\w+\.?(?P<path>[\w.\[\]]*)"', re.DOTALL)
_WRONG_FIELD: Final = re.compile(r"Failed to parse (\w+) field: ")


def _invalid(problem: str) -> InvalidField:
    """What json_format found wrong, with the field's path as far as it tells."""
    unknown = _UNKNOWN_FIELD.search(problem)
    if unknown is not None:
        path = ".".join(part for part in (unknown["path"], unknown["name"]) if part)
        return InvalidField(path, "there is no such field")
    names = _WRONG_FIELD.findall(problem)
    rest = _WRONG_FIELD.sub("", problem).strip().rstrip(".")
    return InvalidField(".".join(names) or "body", rest)


async def read_body(request: web.Request) -> bytes:
    """All of it. Raises InvalidField where it does not come in, and HTTPRequestEntityTooLarge."""
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError:
        raise InvalidField("body", f"did not come within {_BODY_S:g} s") from None
    except web.RequestPayloadError:
        raise InvalidField("body", "broke off, or is not encoded as it says") from None


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
    return _json(status, {"error": json_format.MessageToDict(to_status(error))}, headers)


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json", headers=headers)
