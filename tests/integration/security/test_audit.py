"""Every write of the Admin service is in the audit trail: who, what, before, after, under which request id.

The writes are those of the service's descriptor: one without a row here fails the first test.
"""

from datetime import UTC, datetime, timedelta

import grpc
import pytest
from fakes.admin_server import admin_server
from fakes.fleet_view import FakeFleetView
from fakes.postgres import connect
from headway.admin.v1 import admin_pb2 as pb
from headway_scheduler.domain.fleet_view import EndpointView, NodeView

ADMIN = pb.DESCRIPTOR.services_by_name["Admin"]
WRITES = [method.name for method in ADMIN.methods if not method.name.startswith(("Get", "List"))]

MASKED = {
    "Tenant": ({"name": "tenants/t"}, {"weight": 2.0}),
    "GpuGroup": ({"name": "gpuGroups/g"}, {"display_name": "G"}),
    "Binding": ({"name": "tenants/t/bindings/g", "gpu_group": "gpuGroups/g", "mode": 2}, {"order": 3}),
    "Model": ({"name": "models/m"}, {"max_context_tokens": 10}),
    "Strategy": ({"name": "strategies/s", "algorithm": "random", "enabled": True}, {"display_name": "S"}),
    "StrategyBinding": (
        {"name": "strategyBindings/b", "strategy": "strategies/s", "tenant": "tenants/t"}, {"shadow": True},
    ),
    "Credential": ({"name": "credentials/c", "role": pb.ROLE_VIEWER}, {"certificate_identity": "c.test"}),
}  # fmt: skip
NOUNS = {"GpuGroup": "gpu_group", "StrategyBinding": "strategy_binding"}
VERBS = {
    "EnableStrategy": (pb.EnableStrategyRequest(name="strategies/s"), "strategies/s"),
    "DisableStrategy": (pb.DisableStrategyRequest(name="strategies/s"), "strategies/s"),
    "RollbackStrategy": (pb.RollbackStrategyRequest(name="strategies/s", revision=1), "strategies/s"),
    "RotateCredential": (pb.RotateCredentialRequest(name="credentials/c", overlap={"seconds": 60}), "credentials/c"),
    "RevokeCredential": (pb.RevokeCredentialRequest(name="credentials/c"), "credentials/c"),
    "SetNodeState": (pb.SetNodeStateRequest(name="nodes/n", state=pb.SCHEDULING_STATE_CORDONED), "nodes/n"),
    "SetEndpointState": (
        pb.SetEndpointStateRequest(name="endpoints/10.0.0.1:1@0", state=pb.SCHEDULING_STATE_DRAINING),
        "endpoints/10.0.0.1:1@0",
    ),
    "SetBypass": (pb.SetBypassRequest(tenant="tenants/t", bypass=True), "tenants/t"),
    "DeleteNode": (pb.DeleteNodeRequest(name="nodes/n"), "nodes/n"),
}


def calls():
    """Every write, in an order in which each finds what it needs: (method, request, resource)."""
    for kind, (fields, _) in MASKED.items():
        yield f"Create{kind}", _request("Create", kind, fields), fields["name"]
    for kind, (fields, change) in MASKED.items():
        fields = {"name": fields["name"], **change}
        request = _request("Update", kind, fields)
        request.update_mask.paths.extend(change)
        yield f"Update{kind}", request, fields["name"]
    for method, (request, resource) in VERBS.items():
        yield method, request, resource
    for kind, (fields, _) in reversed(MASKED.items()):
        yield f"Delete{kind}", getattr(pb, f"Delete{kind}Request")(name=fields["name"]), fields["name"]


def _request(verb, kind, fields):
    return getattr(pb, f"{verb}{kind}Request")(**{NOUNS.get(kind, kind.lower()): getattr(pb, kind)(**fields)})


@pytest.fixture
async def server(database_url):
    async with admin_server(database_url) as running:
        fleet = FakeFleetView([NodeView("n")], [EndpointView("10.0.0.1:1@0", node="n")])
        running.fleet.__dict__.update(fleet.__dict__)
        yield running


def test_every_write_of_the_service_is_tried_here():
    assert sorted(method for method, _, _ in calls()) == sorted(WRITES)


async def test_every_write_is_in_the_trail_with_before_and_after(server):
    for number, (method, request, resource) in enumerate(calls()):
        request.request_id = f"request-{number}"
        await getattr(server.admin, method)(request)
        (entry, *_) = await server.store.audit(before_id=None, limit=1)
        assert (entry.principal, entry.method, entry.resource) == ("local", method, resource)
        assert entry.request_id == f"request-{number}"
        if method.startswith("Create"):
            assert (entry.before, bool(entry.after)) == (None, True), method
        elif method.startswith("Delete") and method != "DeleteNode":
            assert (bool(entry.before), entry.after) == (True, None), method
        else:
            assert entry.before, method
            assert entry.after, method
            assert method in ("DeleteNode", "EnableStrategy") or entry.before != entry.after, method
        assert "token_sha256" not in str(entry)


async def test_what_is_refused_or_only_validated_leaves_no_entry(server):
    before = await server.store.audit(before_id=None, limit=1)
    with pytest.raises(grpc.aio.AioRpcError):
        await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/?")))
    await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/t"), validate_only=True))
    assert await server.store.audit(before_id=None, limit=1) == before


async def test_the_trail_is_filtered_by_who_what_and_when(server):
    for name in ("t", "tt"):
        await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=pb.Tenant(name=f"tenants/{name}")))
    binding = pb.Binding(name="tenants/t/bindings/all", gpu_group="gpuGroups/all", mode=pb.BINDING_MODE_SHARED)
    await server.admin.CreateBinding(pb.CreateBindingRequest(binding=binding))

    async def found(**filters):
        answer = await server.admin.ListAuditEntries(pb.ListAuditEntriesRequest(**filters))
        return [entry.resource for entry in answer.audit_entries]

    assert await found(resource="tenants/t") == ["tenants/t/bindings/all", "tenants/t"]
    assert await found(resource="tenants") == ["tenants/t/bindings/all", "tenants/tt", "tenants/t"]
    assert await found(principal="local", resource="tenants/tt") == ["tenants/tt"]
    assert await found(principal="nobody") == []
    hour = timedelta(hours=1)
    assert len(await found(since=datetime.now(UTC) - hour)) == 3
    assert await found(since=datetime.now(UTC) + hour) == []
    first = await server.admin.ListAuditEntries(pb.ListAuditEntriesRequest(resource="tenants", page_size=1))
    rest = await found(resource="tenants", page_token=first.next_page_token)
    assert rest == ["tenants/tt", "tenants/t"]


def test_nobody_changes_the_trail(database_url):
    with connect(database_url) as connection:
        for statement in ("UPDATE audit SET principal = 'x'", "DELETE FROM audit", "TRUNCATE audit"):
            with pytest.raises(Exception, match="append-only"):
                connection.execute(statement)
