"""The light picker's choice: by a request's headers and the beginning of its body, whoever brings them.

It never sees the answer: Envoy's access log ends the reservation (`access_log`). Nor can it change the body (ADR 0018).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec
from headway.routing.v1 import routing_pb2
from headway_openai.body import Api, parse_body
from headway_openai.errors import ApiError
from headway_openai.prefix import parse_prefix

from headway_scheduler.admission.watching import is_routed
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import EVERYBODY, Principal
from headway_scheduler.envoy.destinations import any_endpoint, destinations
from headway_scheduler.envoy.fixed_bodies import FixedBodies
from headway_scheduler.envoy.head import DESTINATION, Head
from headway_scheduler.envoy.plane import Plane
from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.rpc.calls import UnaryCalls
from headway_scheduler.rpc.convert.routing import request_from_proto

__all__ = ["CHECK", "EXT_AUTHZ", "OBSERVATION", "RESERVATION", "LightPicker", "Pick"]

EXT_AUTHZ: Final = "envoy.service.auth.v3.Authorization"
CHECK: Final = f"/{EXT_AUTHZ}/Check"
"""What a caller must be allowed to call."""
RESERVATION: Final = "headway.reservation"
"""Where the dynamic metadata of an answer names the reservation. Clients cannot write it, engines never see it."""
OBSERVATION: Final = "headway.observation"
"""The same for a request that is only watched."""

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_PARTIAL: Final = "x-envoy-auth-partial-body"


class Pick(msgspec.Struct, frozen=True):
    """Headers to give to the request, those to add to its answer, and what was reserved: None for requests without a
    body, and for those that are not ours to place. `observation`: the id of one that is only watched.
    """

    headers: Mapping[str, str]
    answer_headers: Mapping[str, str] = _NONE
    decision: Decision | None = None
    observation: str = ""


class LightPicker:
    """Chooses an endpoint for each request. Raises ApiError and every refusal of errors.py."""

    def __init__(self, scheduler: Scheduler, calls: UnaryCalls) -> None:
        self._scheduler, self._calls = scheduler, calls
        self._fixed_bodies = FixedBodies(scheduler)

    async def pick(
        self, principal: Principal, plane: Plane, head: Head, method: str, raw: bytes, remaining_s: float | None
    ) -> Pick:
        """`raw`: the body, or its beginning. `remaining_s`: how long Envoy waits for this, None if it does not say."""
        if self._is_bypassed(principal, head, plane):
            return Pick(_NONE)
        if method in _BODILESS:
            if plane.observe:
                return Pick(_NONE)
            self._scheduler.check_serves()
            tenant = self._scheduler.intake.tenant(principal, head.tenant_in(plane))
            return Pick({DESTINATION: any_endpoint(self._scheduler, tenant.id, None)})
        route = _wanted(head.api, raw, head, plane)
        asked = route.model
        head.apply(route, plane)
        if self._scheduler.tracing is not None:
            head.carry_trace(route)
        if route.model != asked:
            raise InvalidField("x-gateway-model-name-rewrite", "this plane cannot change the body")
        prompt_tokens = self._prompt_tokens(route, raw, head)
        observation = self._observed(route, principal, prompt_tokens, head, plane)
        if observation:
            return Pick(_NONE, observation=observation)
        decision = await self._calls.route(route, principal, remaining_s, prompt_tokens)
        try:
            self._fixed_bodies.check(decision, asked, principal, route.tenant)
        except HeadwayError as error:
            self._calls.give_back(decision.reservation_id, principal)
            self._scheduler.count_refusal(error)
            raise
        return Pick(
            {DESTINATION: destinations(decision, self._scheduler.addresses), **decision.endpoint.headers},
            _NONE if decision.rate_limits is None else decision.rate_limits.headers(),
            decision,
        )

    def _is_bypassed(self, principal: Principal, head: Head, plane: Plane) -> bool:
        """Shall this request be left alone?"""
        desired = self._scheduler.desired
        if not desired.bypassed:
            return False
        if EVERYBODY in desired.bypassed:
            return True
        route = routing_pb2.RouteRequest()
        head.apply(route, plane)
        return desired.bypasses(self._scheduler.intake.tenant(principal, route.tenant).id)

    def _observed(
        self, route: routing_pb2.RouteRequest, principal: Principal, tokens: int | None, head: Head, plane: Plane
    ) -> str:
        """Watch a request that is not ours to place; the id under which the access log tells of it. Empty: it is."""
        scheduler = self._scheduler
        asked = scheduler.intake.tenant(principal, route.tenant)
        if not plane.observe and asked.routed_percent >= 100:
            return ""
        number = scheduler.ledger.new_id()
        request, tenant = request_from_proto(route, principal, scheduler.intake, number, tokens)
        if not plane.observe and is_routed(tenant, request.session_id, head.values.get("x-request-id", number)):
            return ""
        owner = self._calls.owner(principal)
        scheduler.observations.wait(number, scheduler.dispatcher.appraise(request, owner, scheduler.clock()))
        return number

    def _prompt_tokens(self, route: routing_pb2.RouteRequest, raw: bytes, head: Head) -> int | None:
        """The whole prompt's length, by the whole body's, where only the beginning is here."""
        if not _is_cut(head):
            return None
        length = head.values.get("content-length", "")
        size = int(length) if length.isdecimal() else len(raw)
        return max(1, round(size / self._scheduler.history.bytes_per_token(route.model)))


def _is_cut(head: Head) -> bool:
    return head.values.get(_PARTIAL) == "true"


def _wanted(api: Api, raw: bytes, head: Head, plane: Plane) -> routing_pb2.RouteRequest:
    """What the body asks for, as far as it is here; the model also from the route. Raises ApiError 400."""
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
