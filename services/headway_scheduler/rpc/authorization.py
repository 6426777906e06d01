"""THE table: which roles may call which method. A method that is not in it is refused."""

from collections.abc import Mapping
from typing import Final

from envoy.service.accesslog.v3 import als_pb2
from envoy.service.auth.v3 import external_auth_pb2
from envoy.service.discovery.v3 import ads_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from google.protobuf.descriptor import ServiceDescriptor
from headway.admin.v1 import admin_pb2
from headway.fleet.v1 import fleet_pb2
from headway.routing.v1 import routing_pb2
from headway.telemetry.v1 import telemetry_pb2

from headway_scheduler.domain.desired import Principal, Role
from headway_scheduler.errors import NotPermitted

__all__ = ["OPEN", "ROLES", "WHO_AM_I", "authorize", "authorize_node"]

Roles = frozenset[Role]

_ROUTERS: Final[Roles] = frozenset({Role.ROUTER, Role.ADMIN})
_AGENTS: Final[Roles] = frozenset({Role.AGENT, Role.ADMIN})
_READERS: Final[Roles] = frozenset({Role.VIEWER, Role.ADMIN})
_WATCHERS: Final[Roles] = frozenset({Role.VIEWER, Role.ADMIN, Role.ROUTER})
_WRITERS: Final[Roles] = frozenset({Role.ADMIN})
_EVERYONE: Final[Roles] = frozenset(Role)

WHO_AM_I: Final = "/headway.fleet.v1.Fleet/WhoAmI"
"""Whoever has a credential may ask what it is good for."""

OPEN: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.v1.", "/grpc.reflection.v1alpha.")
"""Services that anyone may call: is it alive, and what does it speak."""


def _each(service: ServiceDescriptor, roles: Roles) -> dict[str, Roles]:
    return {f"/{service.full_name}/{method.name}": roles for method in service.methods}


def _admin() -> dict[str, Roles]:
    """Reads are called Get or List, as AIPs 131 and 132 have it; all else writes."""
    table = _each(admin_pb2.DESCRIPTOR.services_by_name["Admin"], _WRITERS)
    return {
        method: _READERS if method.rpartition("/")[2].startswith(("Get", "List")) else roles
        for method, roles in table.items()
    }


ROLES: Final[Mapping[str, Roles]] = {
    **_each(routing_pb2.DESCRIPTOR.services_by_name["Router"], _ROUTERS),
    **_each(telemetry_pb2.DESCRIPTOR.services_by_name["Telemetry"], _AGENTS),
    **_each(fleet_pb2.DESCRIPTOR.services_by_name["Fleet"], _WATCHERS),
    **{f"/headway.fleet.v1.Fleet/{verb}": _READERS for verb in ("ListDecisions", "GetDecision", "WatchDecisions")},
    WHO_AM_I: _EVERYONE,
    **_each(external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"], _ROUTERS),
    **_each(ads_pb2.DESCRIPTOR.services_by_name["AggregatedDiscoveryService"], _ROUTERS),
    **_each(external_auth_pb2.DESCRIPTOR.services_by_name["Authorization"], _ROUTERS),
    **_each(als_pb2.DESCRIPTOR.services_by_name["AccessLogService"], _ROUTERS),
    **_admin(),
}


def authorize(principal: Principal, method: str, roles: Mapping[str, Roles] = ROLES) -> None:
    """Raise NotPermitted unless the principal's role may call `method` (`/package.Service/Method`)."""
    if principal.role not in roles.get(method, ()):
        message = f"{principal.id!r} has the role {principal.role.value}, which may not call {method}"
        raise NotPermitted(message, principal=principal.id, role=principal.role.value, method=method)


def authorize_node(principal: Principal, node: str) -> None:
    """Raise NotPermitted unless the principal may speak for `node`: an agent only for its own, an admin for any."""
    if principal.role is Role.ADMIN or (principal.role is Role.AGENT and principal.node == node):
        return
    message = f"hello.node: {principal.id!r} may speak only for {principal.node!r}"
    raise NotPermitted(message, field="hello.node", principal=principal.id, node=node)
