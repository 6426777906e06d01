"""Admin over a real gRPC server on a real Postgres."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from fakes.admin_server import AdminServer, admin_server, error_info, retry_delay_s
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from headway.admin.v1 import admin_pb2 as pb
from headway_scheduler.domain.fleet_view import EndpointView, NodeView
from headway_scheduler.store.postgres import PostgresStore


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[AdminServer]:
    async with admin_server(database_url) as running:
        yield running


@dataclass(frozen=True)
class Case:
    """One kind of resource, as its rpcs are called."""

    noun: str
    method: str
    plural: str
    message: Any
    change: tuple[str, Any]
    prepare: tuple[tuple[str, Any], ...] = ()
    parent: str = ""


def struct(**values: object) -> Struct:
    made = Struct()
    made.update(values)
    return made


GOLD = ("CreateGpuGroup", pb.CreateGpuGroupRequest(gpu_group=pb.GpuGroup(name="gpuGroups/gold")))
CASES = [
    Case("tenant", "Tenant", "Tenants", pb.Tenant(
        name="tenants/acme", display_name="Acme", weight=2, priority=1, models=["llama"],
        quotas=pb.Quotas(requests_per_minute=60, tokens_per_minute=10**12, max_inflight=8)), ("weight", 3.5)),
    Case("gpu_group", "GpuGroup", "GpuGroups", pb.GpuGroup(
        name="gpuGroups/gold", selector={"tier": "gold"}, nodes=["gpu-1"], endpoints=["10.0.0.1:8000@0"]),
        ("display_name", "Gold")),
    Case("binding", "Binding", "Bindings", pb.Binding(
        name="tenants/default/bindings/gold", gpu_group="gpuGroups/gold", mode=pb.BINDING_MODE_BURST, order=2,
        weight=1), ("order", 5), (GOLD,), "tenants/default"),
    Case("model", "Model", "Models", pb.Model(
        name="models/meta/llama-3.1:8b", aliases=["llama"], max_context_tokens=8192), ("tokenizer", "/t")),
    Case("strategy", "Strategy", "Strategies", pb.Strategy(
        name="strategies/mine", algorithm="adaptive", parameters=struct(alpha=2), enabled=True,
        fallback_algorithm="random", revision=1), ("time_budget_us", 900)),
    Case("strategy_binding", "StrategyBinding", "StrategyBindings", pb.StrategyBinding(
        name="strategyBindings/acme", strategy="strategies/random", tenant="tenants/default"), ("shadow", True)),
    Case("credential", "Credential", "Credentials", pb.Credential(
        name="credentials/gateway", role=pb.ROLE_ROUTER, tenants=["default"],
        expire_time=Timestamp(seconds=2_000_000_000)), ("tenants", ["default", "*"])),
]  # fmt: skip


def request(case: Case, verb: str, **fields: Any) -> Any:
    noun = case.plural if verb == "List" else case.method
    return getattr(pb, f"{verb}{noun}Request")(**fields)


async def call(server: AdminServer, case: Case, verb: str, **fields: Any) -> Any:
    noun = case.plural if verb == "List" else case.method
    return await getattr(server.admin, f"{verb}{noun}")(request(case, verb, **fields))


async def refused(awaitable: Any, code: grpc.StatusCode, reason: str, field: str | None = None) -> Any:
    """The error's info, checked."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await awaitable
    info = error_info(error.value)
    assert (error.value.code(), info.reason) == (code, reason), error.value.details()
    if field is not None:
        assert info.metadata["field"] == field
    return error.value


def without_meta(message: Any) -> Any:
    bare = type(message)()
    bare.CopyFrom(message)
    for output in ("etag", "create_time", "update_time"):
        bare.ClearField(output)
    return bare


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
async def test_the_life_of_a_resource(server: AdminServer, case: Case) -> None:
    for method, first in case.prepare:
        await getattr(server.admin, method)(first)
    not_found = f"UNKNOWN_{case.noun.upper()}" if case.noun in {"tenant", "model"} else "UNKNOWN_RESOURCE"
    name = case.message.name
    await refused(call(server, case, "Get", name=name), grpc.StatusCode.NOT_FOUND, not_found, "name")

    only = await call(server, case, "Create", **{case.noun: case.message, "validate_only": True})
    assert getattr(only, case.noun).name == name
    await refused(call(server, case, "Get", name=name), grpc.StatusCode.NOT_FOUND, not_found)

    created = getattr(await call(server, case, "Create", **{case.noun: case.message}), case.noun)
    assert without_meta(created) == case.message
    assert created.etag
    assert created.create_time.seconds
    assert getattr(await call(server, case, "Get", name=name), case.noun) == created
    parent = {"parent": case.parent} if case.parent else {}
    listed = await call(server, case, "List", **parent)
    assert created in list(getattr(listed, f"{case.noun}s" if case.noun != "strategy" else "strategies"))
    again = call(server, case, "Create", **{case.noun: case.message})
    await refused(again, grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_NAME", "name")

    field, value = case.change
    patch = type(case.message)(name=name, etag=created.etag, **{field: value})
    mask = FieldMask(paths=[field])
    fields = {case.noun: patch, "update_mask": mask}
    changed = getattr(await call(server, case, "Update", **fields), case.noun)
    assert changed.etag != created.etag
    expected = without_meta(created)
    expected.ClearField(field)
    expected.MergeFrom(type(case.message)(**{field: value}))
    if case.noun == "strategy":
        expected.revision = 2
    assert without_meta(changed) == expected
    await refused(call(server, case, "Update", **fields), grpc.StatusCode.ABORTED, "STALE_ETAG", "etag")
    unmasked = type(case.message)(name=name, **{field: value})  # without a mask: what is set
    assert getattr(getattr(await call(server, case, "Update", **{case.noun: unmasked}), case.noun), field) == value
    for path in ("nonsense", "name", "etag", f"{field}.deeper"):
        fields = {case.noun: patch, "update_mask": FieldMask(paths=[path])}
        await refused(call(server, case, "Update", **fields), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD",
                      "update_mask")  # fmt: skip

    stale = call(server, case, "Delete", name=name, etag=created.etag)
    await refused(stale, grpc.StatusCode.ABORTED, "STALE_ETAG", "etag")
    await call(server, case, "Delete", name=name, request_id="delete-1")
    await call(server, case, "Delete", name=name, request_id="delete-1")
    await refused(call(server, case, "Delete", name=name), grpc.StatusCode.NOT_FOUND, not_found, "name")

    missing = call(server, case, "Update", **{case.noun: case.message})
    await refused(missing, grpc.StatusCode.NOT_FOUND, not_found, f"{case.noun}.name")
    if case.noun == "credential":
        upsert = call(server, case, "Update", credential=case.message, allow_missing=True)
        await refused(upsert, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "allow_missing")
    else:
        made = await call(server, case, "Update", **{case.noun: case.message, "allow_missing": True})
        assert without_meta(getattr(made, case.noun)) == case.message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
async def test_names_pages_and_ids_are_checked(server: AdminServer, case: Case) -> None:
    invalid = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    for name in ("", "acme", "wrong/acme", f"{case.message.name}/\n", "x" * 5_000_000):
        await refused(call(server, case, "Get", name=name), *invalid, "name")
        await refused(call(server, case, "Delete", name=name), *invalid, "name")
        renamed = type(case.message)()
        renamed.CopyFrom(case.message)
        renamed.name = name
        for verb in ("Create", "Update"):
            await refused(call(server, case, verb, **{case.noun: renamed}), *invalid, f"{case.noun}.name")
    parent = {"parent": case.parent} if case.parent else {}
    await refused(call(server, case, "List", page_size=-1, **parent), *invalid, "page_size")
    for token in ("nonsense", "bnVsbA==", "WyJ4IiwgInkiXQ=="):
        await refused(call(server, case, "List", page_token=token, **parent), *invalid, "page_token")
    for request_id in ("x" * 200, "a\0b"):
        fields = {case.noun: case.message, "request_id": request_id}
        await refused(call(server, case, "Create", **fields), *invalid, "request_id")


INVALID: list[tuple[str, str, Any, str]] = [
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", weight=-1), "tenant.weight"),
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", weight=float("nan")), "tenant.weight"),
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", weight=float("inf")), "tenant.weight"),
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", priority=7), "tenant.priority"),
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", display_name="a\0"), "tenant.display_name"),
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", display_name="a" * 300), "tenant.display_name"),
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", models=["ok", "not ok"]), "tenant.models[1]"),
    ("CreateTenant", "tenant", pb.Tenant(name="tenants/a", quotas=pb.Quotas(tokens_per_minute=2**64 - 1)),
     "tenant.quotas.tokens_per_minute"),
    ("CreateGpuGroup", "gpu_group", pb.GpuGroup(name="gpuGroups/a", nodes=["a", "a"]), "gpu_group.nodes[1]"),
    ("CreateGpuGroup", "gpu_group", pb.GpuGroup(name="gpuGroups/a", selector={"": "x"}), "gpu_group.selector"),
    ("CreateGpuGroup", "gpu_group", pb.GpuGroup(name="gpuGroups/a", selector={"k": "\0"}), "gpu_group.selector[k]"),
    ("CreateBinding", "binding", pb.Binding(name="tenants/default/bindings/x", gpu_group="y"), "binding.gpu_group"),
    ("CreateBinding", "binding", pb.Binding(name="tenants/default/bindings/all", mode=9), "binding.mode"),
    ("CreateModel", "model", pb.Model(name="models/a", aliases=["a"]), "model.aliases[0]"),
    ("CreateStrategy", "strategy", pb.Strategy(name="strategies/a"), "strategy.algorithm"),
    ("CreateStrategy", "strategy", pb.Strategy(name="strategies/a", algorithm="adaptive", parameters=struct(foo=1)),
     "strategy.parameters.foo"),
    ("CreateStrategy", "strategy", pb.Strategy(name="strategies/a", algorithm="adaptive",
     parameters=struct(alpha=float("nan"))), "strategy.parameters"),
    ("CreateStrategy", "strategy", pb.Strategy(name="strategies/a", algorithm="adaptive",
     parameters=struct(alpha=["\0"])), "strategy.parameters.alpha[0]"),
    ("CreateStrategyBinding", "strategy_binding", pb.StrategyBinding(name="strategyBindings/a"),
     "strategy_binding.strategy"),
    ("CreateStrategyBinding", "strategy_binding", pb.StrategyBinding(name="strategyBindings/a", strategy="random",
     tenant="default", gpu_group="all"), "strategy_binding.gpu_group"),
    ("CreateCredential", "credential", pb.Credential(name="credentials/a"), "credential.role"),
    ("CreateCredential", "credential", pb.Credential(name="credentials/a", role=99), "credential.role"),
    ("CreateCredential", "credential", pb.Credential(name="credentials/a", role=pb.ROLE_AGENT), "credential.node"),
    ("CreateCredential", "credential", pb.Credential(name="credentials/a", role=pb.ROLE_ADMIN, node="n"),
     "credential.node"),
    ("CreateCredential", "credential", pb.Credential(name="credentials/a", role=pb.ROLE_ROUTER), "credential.tenants"),
    ("CreateCredential", "credential", pb.Credential(name="credentials/a", role=pb.ROLE_VIEWER, tenants=["default"]),
     "credential.tenants"),
    ("CreateCredential", "credential", pb.Credential(name="credentials/a", role=pb.ROLE_VIEWER,
     expire_time=Timestamp(seconds=10**15)), "credential.expire_time"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "noun", "message", "field"), INVALID, ids=lambda value: str(value)[:30])
async def test_a_wrong_field_is_named(server: AdminServer, method: str, noun: str, message: Any, field: str) -> None:
    made = getattr(pb, f"{method}Request")(**{noun: message})
    await refused(
        getattr(server.admin, method)(made), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field
    )  # fmt: skip


async def test_nested_masks_maps_and_star(server: AdminServer) -> None:
    quotas = pb.Quotas(requests_per_minute=1, tokens_per_minute=2, max_inflight=3)
    tenant = pb.Tenant(name="tenants/acme", display_name="Acme", weight=2, quotas=quotas)
    await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=tenant))
    patch = pb.Tenant(name="tenants/acme", quotas=pb.Quotas(max_inflight=9))
    mask = FieldMask(paths=["quotas.max_inflight", "display_name"])
    answer = await server.admin.UpdateTenant(pb.UpdateTenantRequest(tenant=patch, update_mask=mask))
    assert answer.tenant.quotas == pb.Quotas(requests_per_minute=1, tokens_per_minute=2, max_inflight=9)
    assert answer.tenant.display_name == ""
    star = FieldMask(paths=["*"])
    answer = await server.admin.UpdateTenant(pb.UpdateTenantRequest(tenant=patch, update_mask=star))
    assert without_meta(answer.tenant) == pb.Tenant(
        name="tenants/acme", weight=1, quotas=pb.Quotas(max_inflight=9)
    )  # fmt: skip
    group = pb.GpuGroup(name="gpuGroups/gold", selector={"a": "1", "b": "2"}, nodes=["n1", "n2"])
    await server.admin.CreateGpuGroup(pb.CreateGpuGroupRequest(gpu_group=group))
    patch_group = pb.GpuGroup(name="gpuGroups/gold", selector={"c": "3"})
    for paths in (["selector", "nodes"], []):
        changed = await server.admin.UpdateGpuGroup(
            pb.UpdateGpuGroupRequest(gpu_group=patch_group, update_mask=FieldMask(paths=paths))
        )
        assert dict(changed.gpu_group.selector) == {"c": "3"}
        assert list(changed.gpu_group.nodes) == []


async def test_pages_cover_a_list_once(server: AdminServer) -> None:
    for number in range(7):
        tenant = pb.Tenant(name=f"tenants/t{number}")
        await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=tenant))
    seen, token = [], ""
    while True:
        page = await server.admin.ListTenants(pb.ListTenantsRequest(page_size=3, page_token=token))
        assert len(page.tenants) <= 3
        seen += [tenant.name for tenant in page.tenants]
        token = page.next_page_token
        if not token:
            break
    assert seen == ["tenants/default", *(f"tenants/t{number}" for number in range(7))]
    first = await server.admin.ListTenants(pb.ListTenantsRequest(page_size=3))
    elsewhere = server.admin.ListModels(pb.ListModelsRequest(page_token=first.next_page_token))
    await refused(elsewhere, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "page_token")
    seen_ids, token = [], ""
    while True:
        entries = await server.admin.ListAuditEntries(pb.ListAuditEntriesRequest(page_size=2, page_token=token))
        seen_ids += [entry.resource for entry in entries.audit_entries]
        token = entries.next_page_token
        if not token:
            break
    assert seen_ids == [f"tenants/t{number}" for number in reversed(range(7))]


async def test_bindings_of_one_tenant_or_of_all(server: AdminServer) -> None:
    await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/acme")))
    binding = pb.Binding(name="tenants/acme/bindings/all")
    await server.admin.CreateBinding(pb.CreateBindingRequest(binding=binding))

    async def names(parent: str) -> list[str]:
        listed = await server.admin.ListBindings(pb.ListBindingsRequest(parent=parent))
        return [found.name for found in listed.bindings]

    assert await names("tenants/acme") == ["tenants/acme/bindings/all"]
    assert await names("tenants/-") == ["tenants/acme/bindings/all", "tenants/default/bindings/all"]
    for parent, code, reason in (
        ("tenants/nobody", grpc.StatusCode.NOT_FOUND, "UNKNOWN_TENANT"),
        ("", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    ):
        await refused(server.admin.ListBindings(pb.ListBindingsRequest(parent=parent)), code, reason, "parent")


async def test_a_dedicated_group_is_refused_to_others(server: AdminServer) -> None:
    binding = pb.Binding(name="tenants/default/bindings/all", mode=pb.BINDING_MODE_DEDICATED)
    await server.admin.UpdateBinding(pb.UpdateBindingRequest(binding=binding))
    await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/acme")))
    wanted = pb.CreateBindingRequest(binding=pb.Binding(name="tenants/acme/bindings/all"))
    error = await refused(
        server.admin.CreateBinding(wanted), grpc.StatusCode.FAILED_PRECONDITION, "GROUP_NOT_FREE", "binding.gpu_group"
    )
    assert error_info(error).metadata["user"] == "tenants/default/bindings/all"


async def test_strategies_are_switched_and_rolled_back(server: AdminServer) -> None:
    name = "strategies/adaptive"
    off = await server.admin.DisableStrategy(pb.DisableStrategyRequest(name=name, request_id="off"))
    assert (off.strategy.enabled, off.strategy.revision) == (False, 2)
    on = await server.admin.EnableStrategy(pb.EnableStrategyRequest(name=name))
    assert (on.strategy.enabled, on.strategy.revision) == (True, 3)
    retried = await server.admin.DisableStrategy(pb.DisableStrategyRequest(name=name, request_id="off"))
    assert retried == off
    tuned = pb.Strategy(name=name, parameters=struct(alpha=0.25))
    await server.admin.UpdateStrategy(pb.UpdateStrategyRequest(strategy=tuned))
    back = await server.admin.RollbackStrategy(pb.RollbackStrategyRequest(name=name, revision=2, request_id="back"))
    assert (back.strategy.enabled, back.strategy.revision, dict(back.strategy.parameters)) == (False, 5, {})
    again = await server.admin.RollbackStrategy(pb.RollbackStrategyRequest(name=name, revision=2, request_id="back"))
    assert again == back
    page = await server.admin.ListStrategyRevisions(pb.ListStrategyRevisionsRequest(parent=name, page_size=3))
    assert [revision.revision for revision in page.revisions] == [5, 4, 3]
    assert page.revisions[1].strategy.parameters["alpha"] == 0.25
    assert page.revisions[0].author == "local"
    rest = await server.admin.ListStrategyRevisions(
        pb.ListStrategyRevisionsRequest(parent=name, page_size=3, page_token=page.next_page_token)
    )
    assert ([revision.revision for revision in rest.revisions], rest.next_page_token) == ([2, 1], "")

    not_found = grpc.StatusCode.NOT_FOUND
    missing = server.admin.RollbackStrategy(pb.RollbackStrategyRequest(name=name, revision=99))
    await refused(missing, not_found, "UNKNOWN_RESOURCE", "revision")
    nothing = "strategies/nothing"
    await refused(server.admin.EnableStrategy(pb.EnableStrategyRequest(name=nothing)), not_found, "UNKNOWN_RESOURCE")
    revisions = server.admin.ListStrategyRevisions(pb.ListStrategyRevisionsRequest(parent=nothing))
    await refused(revisions, not_found, "UNKNOWN_RESOURCE", "parent")
    unset = server.admin.RollbackStrategy(pb.RollbackStrategyRequest(name=name))
    await refused(unset, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "revision")
    stale = server.admin.RollbackStrategy(pb.RollbackStrategyRequest(name=name, revision=1, etag=on.strategy.etag))
    await refused(stale, grpc.StatusCode.ABORTED, "STALE_ETAG")


async def test_route_keeps_a_default_strategy(server: AdminServer) -> None:
    delete = pb.DeleteStrategyBindingRequest(name="strategyBindings/default")
    await refused(server.admin.DeleteStrategyBinding(delete), grpc.StatusCode.FAILED_PRECONDITION, "IN_USE")
    forced = pb.DeleteStrategyRequest(name="strategies/adaptive", force=True)
    await refused(server.admin.DeleteStrategy(forced), grpc.StatusCode.FAILED_PRECONDITION, "IN_USE")


async def test_updates_without_an_etag_never_lose_one_another(server: AdminServer) -> None:
    await server.admin.CreateTenant(pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/acme")))
    patches = {"weight": 2.0, "priority": 1, "display_name": "Acme"}

    async def update(field: str, value: Any) -> None:
        patch = pb.Tenant(name="tenants/acme", **{field: value})
        await server.admin.UpdateTenant(
            pb.UpdateTenantRequest(tenant=patch, update_mask=FieldMask(paths=[field]))
        )  # fmt: skip

    await asyncio.gather(*(update(field, value) for field, value in patches.items()))
    answer = await server.admin.GetTenant(pb.GetTenantRequest(name="tenants/acme"))
    assert {field: getattr(answer.tenant, field) for field in patches} == patches


async def test_a_retried_create_writes_once(server: AdminServer) -> None:
    create = pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/acme"), request_id="r1")
    first = await server.admin.CreateTenant(create)
    assert await server.admin.CreateTenant(create) == first
    other = pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/beta"), request_id="r1")
    await refused(
        server.admin.CreateTenant(other), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "request_id"
    )  # fmt: skip
    audit = await server.admin.ListAuditEntries(pb.ListAuditEntriesRequest())
    (entry,) = audit.audit_entries
    assert (entry.principal, entry.method, entry.resource, entry.request_id) == (
        "local", "CreateTenant", "tenants/acme", "r1"
    )  # fmt: skip
    assert entry.after["id"] == "acme"
    assert not entry.HasField("before")


async def test_a_token_is_shown_once(server: AdminServer) -> None:
    credential = pb.Credential(name="credentials/c", role=pb.ROLE_VIEWER)
    create = pb.CreateCredentialRequest(credential=credential, request_id="r1")
    made = await server.admin.CreateCredential(create)
    assert made.token.startswith("hw_")
    error = await refused(server.admin.CreateCredential(create), grpc.StatusCode.ALREADY_EXISTS, "TOKEN_SHOWN_ONCE")
    assert made.token not in (error.details() or "")
    only = pb.CreateCredentialRequest(
        credential=pb.Credential(name="credentials/d", role=pb.ROLE_VIEWER), validate_only=True
    )
    assert (await server.admin.CreateCredential(only)).token == ""
    revoked = await server.admin.RevokeCredential(pb.RevokeCredentialRequest(name="credentials/c"))
    assert revoked.credential.revoked
    update = pb.UpdateCredentialRequest(
        credential=pb.Credential(name="credentials/c"), update_mask=FieldMask(paths=["revoked"])
    )
    await refused(server.admin.UpdateCredential(update), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_nodes_and_endpoints(server: AdminServer) -> None:
    server.fleet.__init__(  # type: ignore[misc]  # the fleet comes up after the server
        [NodeView("gpu-1", {"zone": "a"}, connected=True, agent_version="1", devices=4, endpoints=1, inflight=7),
         NodeView("gpu-2")],
        [EndpointView("10.0.0.1:8000@0", "gpu-1", {"tier": "gold"}, ("llama",), healthy=True, inflight=7)],
    )  # fmt: skip
    listed = await server.admin.ListNodes(pb.ListNodesRequest())
    assert [node.name for node in listed.nodes] == ["nodes/gpu-1", "nodes/gpu-2"]
    assert listed.nodes[0].labels == {"zone": "a"}
    set_state = pb.SetNodeStateRequest(name="nodes/gpu-1", state=pb.SCHEDULING_STATE_CORDONED)
    answer = await server.admin.SetNodeState(set_state)
    assert (answer.node.state, answer.node.inflight) == (pb.SCHEDULING_STATE_CORDONED, 7)
    got = await server.admin.GetNode(pb.GetNodeRequest(name="nodes/gpu-1"))
    assert got.node == answer.node
    endpoint = "endpoints/10.0.0.1:8000@0"
    drained = await server.admin.SetEndpointState(
        pb.SetEndpointStateRequest(name=endpoint, state=pb.SCHEDULING_STATE_DRAINING)
    )
    assert drained.endpoint.state == pb.SCHEDULING_STATE_DRAINING
    assert (await server.admin.GetEndpoint(pb.GetEndpointRequest(name=endpoint))).endpoint == drained.endpoint
    assert [e.name for e in (await server.admin.ListEndpoints(pb.ListEndpointsRequest())).endpoints] == [endpoint]

    assert server.fleet.lifted == []
    for node in ("nodes/gpu-2", "nodes/gpu-1"):
        await server.admin.SetNodeState(pb.SetNodeStateRequest(name=node, state=pb.SCHEDULING_STATE_ACTIVE))
    assert server.fleet.lifted == ["10.0.0.1:8000@0"], "what is ejected of the node that is uncordoned"

    connected = server.admin.DeleteNode(pb.DeleteNodeRequest(name="nodes/gpu-1"))
    await refused(connected, grpc.StatusCode.FAILED_PRECONDITION, "IN_USE", "name")
    for _ in range(2):
        await server.admin.DeleteNode(pb.DeleteNodeRequest(name="nodes/gpu-2", request_id="forget"))
    assert server.fleet.forgotten == ["gpu-2"]
    unknown = server.admin.DeleteNode(pb.DeleteNodeRequest(name="nodes/gpu-2"))
    await refused(unknown, grpc.StatusCode.NOT_FOUND, "UNKNOWN_RESOURCE", "name")
    for call_ in (
        server.admin.GetNode(pb.GetNodeRequest(name="nodes/x")),
        server.admin.GetEndpoint(pb.GetEndpointRequest(name="endpoints/x")),
        server.admin.SetNodeState(pb.SetNodeStateRequest(name="nodes/x", state=pb.SCHEDULING_STATE_ACTIVE)),
    ):
        await refused(call_, grpc.StatusCode.NOT_FOUND, "UNKNOWN_RESOURCE", "name")
    unset = server.admin.SetNodeState(pb.SetNodeStateRequest(name="nodes/gpu-1"))
    await refused(unset, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "state")


async def test_a_cordoned_node_that_is_gone_is_still_listed_and_can_be_forgotten(server: AdminServer) -> None:
    server.fleet.__init__([NodeView("gpu-1")])  # type: ignore[misc]
    await server.admin.SetNodeState(
        pb.SetNodeStateRequest(name="nodes/gpu-1", state=pb.SCHEDULING_STATE_CORDONED)
    )  # fmt: skip
    server.fleet.__init__()  # type: ignore[misc]  # the scheduler restarted
    (node,) = (await server.admin.ListNodes(pb.ListNodesRequest())).nodes
    assert (node.name, node.state, node.connected) == ("nodes/gpu-1", pb.SCHEDULING_STATE_CORDONED, False)
    await server.admin.DeleteNode(pb.DeleteNodeRequest(name="nodes/gpu-1"))
    assert list((await server.admin.ListNodes(pb.ListNodesRequest())).nodes) == []


async def test_while_postgres_is_away_reads_answer_and_writes_say_so(server: AdminServer) -> None:
    nowhere = PostgresStore("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    server.store._database, mended = nowhere._database, server.store._database
    tenant = pb.CreateTenantRequest(tenant=pb.Tenant(name="tenants/acme"))
    error = await refused(server.admin.CreateTenant(tenant), grpc.StatusCode.UNAVAILABLE, "STORE_DOWN")
    assert retry_delay_s(error) == 1.0
    assert (await server.admin.GetTenant(pb.GetTenantRequest(name="tenants/default"))).tenant.name
    server.store._database = mended
    await nowhere.close()
    await server.admin.CreateTenant(tenant)
