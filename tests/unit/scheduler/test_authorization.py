"""The table of methods and roles."""

import pytest
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
from headway_scheduler.rpc.authorization import ROLES, authorize, authorize_node

SERVICES: list[ServiceDescriptor] = [
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"],
    routing_pb2.DESCRIPTOR.services_by_name["Router"],
    telemetry_pb2.DESCRIPTOR.services_by_name["Telemetry"],
    external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"],
    external_auth_pb2.DESCRIPTOR.services_by_name["Authorization"],
    als_pb2.DESCRIPTOR.services_by_name["AccessLogService"],
    ads_pb2.DESCRIPTOR.services_by_name["AggregatedDiscoveryService"],
]
METHODS = [(service.name, method.name, f"/{service.full_name}/{method.name}") for service in SERVICES
           for method in service.methods]  # fmt: skip

# Written out, so that a change of the table is a change of this test. A verb of Admin is its first word.
EXPECTED = {
    ("Router", "*"): {"router", "admin"},
    **{(service, "*"): {"router", "admin"}
       for service in ("ExternalProcessor", "Authorization", "AccessLogService", "AggregatedDiscoveryService")},
    ("Telemetry", "*"): {"agent", "admin"},
    ("Fleet", "*"): {"viewer", "admin", "router"},
    ("Fleet", "WhoAmI"): {"agent", "router", "admin", "viewer", "tenant"},
    **{("Fleet", verb): {"viewer", "admin"} for verb in ("ListDecisions", "GetDecision", "WatchDecisions")},
    ("Admin", "Get"): {"viewer", "admin"},
    ("Admin", "List"): {"viewer", "admin"},
    **{("Admin", verb): {"admin"}
       for verb in ("Create", "Update", "Delete", "Enable", "Disable", "Rollback", "Revoke", "Rotate", "Set")},
}  # fmt: skip


def verb_of(method: str) -> str:
    return next(method[:end] for end in range(1, len(method)) if method[end].isupper())


def test_the_table_covers_every_method_and_no_other() -> None:
    assert set(ROLES) == {path for _, _, path in METHODS}


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(("service", "method", "path"), METHODS, ids=lambda value: str(value).rpartition("/")[2])
def test_who_may_call_what(service: str, method: str, path: str, role: Role) -> None:
    key = (service, verb_of(method) if service == "Admin" else method)
    key = key if key in EXPECTED else (service, "*")
    principal = Principal("someone", role, "gpu-1")
    if role.value in EXPECTED[key]:
        authorize(principal, path)
    else:
        with pytest.raises(NotPermitted) as refused:
            authorize(principal, path)
        assert refused.value.facts == {"principal": "someone", "role": role.value, "method": path}


def test_a_method_outside_the_table_is_refused() -> None:
    with pytest.raises(NotPermitted):
        authorize(Principal("root", Role.ADMIN), "/headway.admin.v1.Admin/Nonsense")


@pytest.mark.parametrize(
    ("role", "own", "node", "allowed"),
    [
        (Role.AGENT, "gpu-1", "gpu-1", True),
        (Role.AGENT, "gpu-1", "gpu-2", False),
        (Role.AGENT, "", "gpu-2", False),
        (Role.ADMIN, "", "gpu-2", True),
        (Role.ROUTER, "gpu-1", "gpu-1", False),
    ],
)
def test_an_agent_speaks_for_its_own_node(role: Role, own: str, node: str, allowed: bool) -> None:
    principal = Principal("someone", role, own)
    if allowed:
        authorize_node(principal, node)
    else:
        with pytest.raises(NotPermitted):
            authorize_node(principal, node)
