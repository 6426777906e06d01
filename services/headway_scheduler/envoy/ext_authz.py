"""The light picker: Envoy's external authorization service (envoy.service.auth.v3.Authorization).

It sees the headers and the beginning of the body, and answers where the request shall go. It never sees the answer:
Envoy's access log ends the reservation (`access_log`). Nor can it change the body (ADR 0018).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from envoy.config.core.v3 import base_pb2
from envoy.service.auth.v3 import attribute_context_pb2, external_auth_pb2, external_auth_pb2_grpc
from google.rpc import code_pb2
from grpc.aio import ServicerContext
from headway.routing.v1 import routing_pb2
from headway_openai.body import Api, parse_body
from headway_openai.errors import ApiError
from headway_openai.prefix import parse_prefix

from headway_scheduler.app import Scheduler
from headway_scheduler.envoy.destinations import any_endpoint, destinations
from headway_scheduler.envoy.fixed_bodies import FixedBodies
from headway_scheduler.envoy.head import DESTINATION, Head, head_of
from headway_scheduler.envoy.plane import Plane, plane_of
from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.authorization import authorize
from headway_scheduler.rpc.calls import UnaryCalls
from headway_scheduler.rpc.http_refusals import api_error

__all__ = ["EXT_AUTHZ", "RESERVATION", "ExtAuthzService"]

_NONE: Final[Mapping[str, str]] = MappingProxyType({})

EXT_AUTHZ: Final = "envoy.service.auth.v3.Authorization"
RESERVATION: Final = "headway.reservation"
"""Where the dynamic metadata of an answer names the reservation. Clients cannot write it, engines never see it."""

_METHOD: Final = f"/{EXT_AUTHZ}/Check"
_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_OVERWRITE: Final[int] = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_PARTIAL: Final = "x-envoy-auth-partial-body"

Context = ServicerContext[Any, Any]  # CheckRequest in, CheckResponse out; neither is typed
Http: TypeAlias = attribute_context_pb2.AttributeContext.HttpRequest


class ExtAuthzService(external_auth_pb2_grpc.AuthorizationServicer):  # type: ignore[misc]  # untyped package
    """Answers each Check. It admits its callers itself: what it refuses, the client must be told."""

    def __init__(self, scheduler: Scheduler, authenticator: Authenticator, calls: UnaryCalls) -> None:
        self._scheduler, self._authenticator, self._calls = scheduler, authenticator, calls
        self._fixed_bodies = FixedBodies(scheduler)

    async def Check(  # noqa: N802
        self, request: external_auth_pb2.CheckRequest, context: Context
    ) -> external_auth_pb2.CheckResponse:
        """Choose an endpoint for one request."""
        try:
            return await self._check(request.attributes, context)
        except ApiError as error:
            return _denied(error)
        except HeadwayError as error:
            return _denied(api_error(error))
        except Exception as error:
            return _denied(api_error(unexpected(error, method=_METHOD)))

    async def _check(
        self, attributes: attribute_context_pb2.AttributeContext, context: Context
    ) -> external_auth_pb2.CheckResponse:
        metadata = tuple(context.invocation_metadata() or ())
        principal = self._authenticator.identify_call(context).principal
        authorize(principal, _METHOD)
        plane = _of_route(plane_of(metadata), attributes.context_extensions)
        http = attributes.request.http
        head = head_of({**http.headers, ":path": http.path})
        head.identify(plane, self._authenticator.user_tenant)
        if http.method in _BODILESS:
            self._scheduler.check_serves()
            tenant = self._scheduler.intake.tenant(principal, head.tenant_in(plane))
            return _allowed(any_endpoint(self._scheduler, tenant.id, None), head)
        route = _wanted(head.api, http, head, plane)
        asked = route.model
        head.apply(route, plane)
        if route.model != asked:
            raise InvalidField("x-gateway-model-name-rewrite", "this plane cannot change the body")
        decision = await self._calls.route(
            route, principal, context.time_remaining(), self._prompt_tokens(route, http, head)
        )
        try:
            self._fixed_bodies.check(decision, asked, principal, route.tenant)
        except HeadwayError as error:
            self._calls.give_back(decision, principal)
            self._scheduler.count_refusal(error)
            raise
        return _allowed(
            destinations(decision, self._scheduler.addresses),
            head,
            decision.reservation_id,
            decision.endpoint.headers,
            _NONE if decision.rate_limits is None else decision.rate_limits.headers(),
        )

    def _prompt_tokens(self, route: routing_pb2.RouteRequest, http: Http, head: Head) -> int | None:
        """The whole prompt's length, by the whole body's, where only the beginning is here."""
        if not _is_cut(head):
            return None
        length = head.values.get("content-length", "")
        size = int(length) if length.isdecimal() else len(http.raw_body) or len(http.body)
        return max(1, round(size / self._scheduler.history.bytes_per_token(route.model)))


def _of_route(plane: Plane, extensions: Mapping[str, str]) -> Plane:
    """What the route's `context_extensions` say goes before what the whole plane says."""
    if not extensions:
        return plane
    tenant, model = extensions.get("tenant", plane.tenant), extensions.get("model", plane.model)
    return replace(plane, tenant=tenant, model=model)


def _is_cut(head: Head) -> bool:
    return head.values.get(_PARTIAL) == "true"


def _wanted(api: Api, http: Http, head: Head, plane: Plane) -> routing_pb2.RouteRequest:
    """What the body asks for, as far as it is here; the model also from the route. Raises ApiError 400."""
    raw: bytes = http.raw_body or http.body.encode()
    if plane.model and (api == "other" or not raw):
        return routing_pb2.RouteRequest(model=plane.model)
    if not _is_cut(head):
        return parse_body(api, raw).route
    route = parse_prefix(api, raw)
    route.model = route.model or plane.model
    if not route.model:
        message = f"model: not within the first {len(raw)} bytes of the body, and the route names none"
        raise ApiError(400, "model_not_seen", message, param="model", reason="MODEL_NOT_SEEN")
    return route


def _allowed(
    destination: str,
    head: Head,
    reservation_id: str = "",
    headers: Mapping[str, str] = _NONE,
    answer_headers: Mapping[str, str] = _NONE,
) -> external_auth_pb2.CheckResponse:
    response = external_auth_pb2.CheckResponse()
    ok = response.ok_response
    given = {DESTINATION: destination, **headers}
    ok.headers.extend(_header(name, value) for name, value in given.items())
    ok.headers_to_remove.extend(name for name in head.strip if name not in given)
    ok.response_headers_to_add.extend(_header(name, value) for name, value in answer_headers.items())
    if reservation_id:
        response.dynamic_metadata.fields[RESERVATION].string_value = reservation_id
    return response


def _denied(error: ApiError) -> external_auth_pb2.CheckResponse:
    """Never a 500: what refuses a request is no broken server behind it."""
    response = external_auth_pb2.CheckResponse()
    response.status.code = code_pb2.PERMISSION_DENIED
    denied = response.denied_response
    denied.status.code = 503 if error.status == 500 else error.status
    for name, value in {"content-type": "application/json", **error.headers()}.items():
        denied.headers.append(_header(name, value))
    denied.body = error.body().decode()
    return response


def _header(name: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(header=base_pb2.HeaderValue(key=name, value=value), append_action=_OVERWRITE)
