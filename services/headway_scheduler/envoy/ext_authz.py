"""The light picker as Envoy's external authorization service over gRPC (envoy.service.auth.v3.Authorization)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.service.auth.v3 import attribute_context_pb2, external_auth_pb2, external_auth_pb2_grpc
from google.rpc import code_pb2
from grpc.aio import ServicerContext
from headway_openai.errors import ApiError

from headway_scheduler.envoy.head import Head, head_of
from headway_scheduler.envoy.light import CHECK, OBSERVATION, RESERVATION, LightPicker, Pick
from headway_scheduler.envoy.plane import Plane, plane_of
from headway_scheduler.errors import HeadwayError
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.authorization import authorize
from headway_scheduler.rpc.http_refusals import api_error

__all__ = ["ExtAuthzService"]

_OVERWRITE: Final[int] = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

Context = ServicerContext[Any, Any]  # CheckRequest in, CheckResponse out; neither is typed


class ExtAuthzService(external_auth_pb2_grpc.AuthorizationServicer):  # type: ignore[misc]  # untyped package
    """Answers each Check. It admits its callers itself: what it refuses, the client must be told."""

    def __init__(self, picker: LightPicker, authenticator: Authenticator) -> None:
        self._picker, self._authenticator = picker, authenticator

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
            return _denied(api_error(unexpected(error, method=CHECK)))

    async def _check(
        self, attributes: attribute_context_pb2.AttributeContext, context: Context
    ) -> external_auth_pb2.CheckResponse:
        metadata = tuple(context.invocation_metadata() or ())
        principal = self._authenticator.identify_call(context).principal
        authorize(principal, CHECK)
        plane = _of_route(plane_of(metadata), attributes.context_extensions)
        http = attributes.request.http
        head = head_of({**http.headers, ":path": http.path})
        head.identify(plane, self._authenticator.user_tenant)
        raw: bytes = http.raw_body or http.body.encode()
        return _allowed(
            await self._picker.pick(principal, plane, head, http.method, raw, context.time_remaining()), head
        )


def _of_route(plane: Plane, extensions: Mapping[str, str]) -> Plane:
    """What the route's `context_extensions` say goes before what the whole plane says."""
    if not extensions:
        return plane
    tenant, model = extensions.get("tenant", plane.tenant), extensions.get("model", plane.model)
    return replace(plane, tenant=tenant, model=model)


def _allowed(pick: Pick, head: Head) -> external_auth_pb2.CheckResponse:
    response = external_auth_pb2.CheckResponse()
    ok = response.ok_response
    ok.headers.extend(_header(name, value) for name, value in pick.headers.items())
    ok.headers_to_remove.extend(name for name in head.strip if name not in pick.headers)
    ok.response_headers_to_add.extend(_header(name, value) for name, value in pick.answer_headers.items())
    if pick.decision is not None:
        response.dynamic_metadata.fields[RESERVATION].string_value = pick.decision.reservation_id
    if pick.observation:
        response.dynamic_metadata.fields[OBSERVATION].string_value = pick.observation
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
