# ruff: noqa: N802, D102 -- gRPC's method names, documented in admin.proto
"""Admin: one line per method; what they have in common is in `admin_resources`, the messages in `convert.admin`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from google.protobuf.duration_pb2 import Duration
from headway.admin.v1 import admin_pb2 as pb
from headway.admin.v1.admin_pb2_grpc import AdminServicer

from headway_scheduler.domain import names
from headway_scheduler.domain.desired import (
    EVERYBODY,
    Binding,
    Credential,
    DesiredState,
    GpuGroup,
    Model,
    StrategyConfig,
    StrategyRevision,
)
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.fleet_view import EndpointView, NodeView
from headway_scheduler.domain.tokens import new_token, token_sha256
from headway_scheduler.errors import InUse, InvalidField, TokenShownOnce, UnknownResource, UnknownTenant
from headway_scheduler.rpc.admin_resources import Resources, write_of
from headway_scheduler.rpc.convert.admin import (
    BINDINGS,
    CREDENTIALS,
    GPU_GROUPS,
    MODELS,
    STRATEGIES,
    STRATEGY_BINDINGS,
    TENANTS,
    audit_message,
    bypassed_names,
    endpoint_message,
    moment,
    node_message,
    revision_message,
    scheduling_state,
)
from headway_scheduler.rpc.convert.usage import usage_message, usage_query, usage_token
from headway_scheduler.rpc.paging import check_size, make_token, page_of, read_number, read_token
from headway_scheduler.store.base import AdminStore, Write

__all__ = ["AdminService", "FleetView"]

_LONGEST_OVERLAP: Final = timedelta(days=30)

_EVERY_TENANT: Final = f"{names.TENANTS}/-"

Context = Any  # the generated stubs' context, which is both grpc's and grpc.aio's


class FleetView(Protocol):
    """The live side of nodes and endpoints."""

    def nodes(self) -> Sequence[NodeView]:
        """Every node known, connected or not."""
        ...

    def endpoints(self) -> Sequence[EndpointView]:
        """Every endpoint known."""
        ...

    def check_exclusive(self, resource: GpuGroup | Binding) -> None:
        """Raise GroupNotFree if, with this written, an endpoint were in dedicated groups of two tenants."""
        ...

    def check_disruption(self, name: str) -> None:
        """Raise DisruptionBudgetBroken if a model had too few endpoints without this node or endpoint."""

    def lift_ejection(self, endpoint: str) -> None:
        """Let an endpoint back in that is ejected; nothing else changes."""
        ...

    def forget_node(self, name: str) -> None:
        """Drop a node that is not connected. Raises InUse if it is, UnknownResource if there is none."""
        ...


def _overlap(value: Duration) -> timedelta:
    if not 0 <= value.ToMicroseconds() <= _LONGEST_OVERLAP // timedelta(microseconds=1):
        raise InvalidField("overlap", f"must be 0 to {_LONGEST_OVERLAP.days} days")
    return timedelta(microseconds=value.ToMicroseconds())


class AdminService(AdminServicer):
    """The Admin service. Needs an interceptor that sets the current principal."""

    def __init__(
        self,
        *,
        store: AdminStore,
        state: Callable[[], DesiredState],
        refresh: Callable[[], Awaitable[None]],
        check_strategy: Callable[[StrategyConfig], None],
        fleet: FleetView,
        check_model: Callable[[Model], None] = lambda _: None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._clock = clock
        self._closing = asyncio.Lock()
        self._state = state
        self._fleet = fleet
        self._resources = Resources(store, state, refresh, check_strategy, check_model, fleet.check_exclusive)

    # tenants

    async def GetTenant(self, request: pb.GetTenantRequest, context: Context) -> pb.GetTenantResponse:
        return pb.GetTenantResponse(tenant=self._resources.get(TENANTS, request))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> pb.ListTenantsResponse:
        page, token = self._resources.list(TENANTS, request, "ListTenants")
        return pb.ListTenantsResponse(tenants=page, next_page_token=token)

    async def CreateTenant(self, request: pb.CreateTenantRequest, context: Context) -> pb.CreateTenantResponse:
        stored = await self._resources.create(TENANTS, request, "CreateTenant")
        return pb.CreateTenantResponse(tenant=TENANTS.to_message(stored))

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, context: Context) -> pb.UpdateTenantResponse:
        stored = await self._resources.update(TENANTS, request, "UpdateTenant")
        return pb.UpdateTenantResponse(tenant=TENANTS.to_message(stored))

    async def DeleteTenant(self, request: pb.DeleteTenantRequest, context: Context) -> pb.DeleteTenantResponse:
        await self._resources.delete(TENANTS, request, "DeleteTenant")
        return pb.DeleteTenantResponse()

    # gpu groups

    async def GetGpuGroup(self, request: pb.GetGpuGroupRequest, context: Context) -> pb.GetGpuGroupResponse:
        return pb.GetGpuGroupResponse(gpu_group=self._resources.get(GPU_GROUPS, request))

    async def ListGpuGroups(self, request: pb.ListGpuGroupsRequest, context: Context) -> pb.ListGpuGroupsResponse:
        page, token = self._resources.list(GPU_GROUPS, request, "ListGpuGroups")
        return pb.ListGpuGroupsResponse(gpu_groups=page, next_page_token=token)

    async def CreateGpuGroup(self, request: pb.CreateGpuGroupRequest, context: Context) -> pb.CreateGpuGroupResponse:
        stored = await self._resources.create(GPU_GROUPS, request, "CreateGpuGroup")
        return pb.CreateGpuGroupResponse(gpu_group=GPU_GROUPS.to_message(stored))

    async def UpdateGpuGroup(self, request: pb.UpdateGpuGroupRequest, context: Context) -> pb.UpdateGpuGroupResponse:
        stored = await self._resources.update(GPU_GROUPS, request, "UpdateGpuGroup")
        return pb.UpdateGpuGroupResponse(gpu_group=GPU_GROUPS.to_message(stored))

    async def DeleteGpuGroup(self, request: pb.DeleteGpuGroupRequest, context: Context) -> pb.DeleteGpuGroupResponse:
        await self._resources.delete(GPU_GROUPS, request, "DeleteGpuGroup")
        return pb.DeleteGpuGroupResponse()

    # bindings

    async def GetBinding(self, request: pb.GetBindingRequest, context: Context) -> pb.GetBindingResponse:
        return pb.GetBindingResponse(binding=self._resources.get(BINDINGS, request))

    async def ListBindings(self, request: pb.ListBindingsRequest, context: Context) -> pb.ListBindingsResponse:
        tenant = self._parent_tenant(request.parent)
        listing = f"ListBindings {request.parent}"
        page, token = self._resources.list(BINDINGS, request, listing, prefix=f"{tenant}/" if tenant else "")
        return pb.ListBindingsResponse(bindings=page, next_page_token=token)

    async def CreateBinding(self, request: pb.CreateBindingRequest, context: Context) -> pb.CreateBindingResponse:
        stored = await self._resources.create(BINDINGS, request, "CreateBinding")
        return pb.CreateBindingResponse(binding=BINDINGS.to_message(stored))

    async def UpdateBinding(self, request: pb.UpdateBindingRequest, context: Context) -> pb.UpdateBindingResponse:
        stored = await self._resources.update(BINDINGS, request, "UpdateBinding")
        return pb.UpdateBindingResponse(binding=BINDINGS.to_message(stored))

    async def DeleteBinding(self, request: pb.DeleteBindingRequest, context: Context) -> pb.DeleteBindingResponse:
        await self._resources.delete(BINDINGS, request, "DeleteBinding")
        return pb.DeleteBindingResponse()

    # models

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=self._resources.get(MODELS, request))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        page, token = self._resources.list(MODELS, request, "ListModels")
        return pb.ListModelsResponse(models=page, next_page_token=token)

    async def CreateModel(self, request: pb.CreateModelRequest, context: Context) -> pb.CreateModelResponse:
        stored = await self._resources.create(MODELS, request, "CreateModel")
        return pb.CreateModelResponse(model=MODELS.to_message(stored))

    async def UpdateModel(self, request: pb.UpdateModelRequest, context: Context) -> pb.UpdateModelResponse:
        stored = await self._resources.update(MODELS, request, "UpdateModel")
        return pb.UpdateModelResponse(model=MODELS.to_message(stored))

    async def DeleteModel(self, request: pb.DeleteModelRequest, context: Context) -> pb.DeleteModelResponse:
        await self._resources.delete(MODELS, request, "DeleteModel")
        return pb.DeleteModelResponse()

    # strategies

    async def GetStrategy(self, request: pb.GetStrategyRequest, context: Context) -> pb.GetStrategyResponse:
        return pb.GetStrategyResponse(strategy=self._resources.get(STRATEGIES, request))

    async def ListStrategies(self, request: pb.ListStrategiesRequest, context: Context) -> pb.ListStrategiesResponse:
        page, token = self._resources.list(STRATEGIES, request, "ListStrategies")
        return pb.ListStrategiesResponse(strategies=page, next_page_token=token)

    async def CreateStrategy(self, request: pb.CreateStrategyRequest, context: Context) -> pb.CreateStrategyResponse:
        stored = await self._resources.create(STRATEGIES, request, "CreateStrategy")
        return pb.CreateStrategyResponse(strategy=STRATEGIES.to_message(stored))

    async def UpdateStrategy(self, request: pb.UpdateStrategyRequest, context: Context) -> pb.UpdateStrategyResponse:
        stored = await self._resources.update(STRATEGIES, request, "UpdateStrategy")
        return pb.UpdateStrategyResponse(strategy=STRATEGIES.to_message(stored))

    async def DeleteStrategy(self, request: pb.DeleteStrategyRequest, context: Context) -> pb.DeleteStrategyResponse:
        await self._resources.delete(STRATEGIES, request, "DeleteStrategy")
        return pb.DeleteStrategyResponse()

    # strategy bindings

    async def GetStrategyBinding(
        self, request: pb.GetStrategyBindingRequest, context: Context
    ) -> pb.GetStrategyBindingResponse:
        return pb.GetStrategyBindingResponse(strategy_binding=self._resources.get(STRATEGY_BINDINGS, request))

    async def ListStrategyBindings(
        self, request: pb.ListStrategyBindingsRequest, context: Context
    ) -> pb.ListStrategyBindingsResponse:
        page, token = self._resources.list(STRATEGY_BINDINGS, request, "ListStrategyBindings")
        return pb.ListStrategyBindingsResponse(strategy_bindings=page, next_page_token=token)

    async def CreateStrategyBinding(
        self, request: pb.CreateStrategyBindingRequest, context: Context
    ) -> pb.CreateStrategyBindingResponse:
        stored = await self._resources.create(STRATEGY_BINDINGS, request, "CreateStrategyBinding")
        return pb.CreateStrategyBindingResponse(strategy_binding=STRATEGY_BINDINGS.to_message(stored))

    async def UpdateStrategyBinding(
        self, request: pb.UpdateStrategyBindingRequest, context: Context
    ) -> pb.UpdateStrategyBindingResponse:
        stored = await self._resources.update(STRATEGY_BINDINGS, request, "UpdateStrategyBinding")
        return pb.UpdateStrategyBindingResponse(strategy_binding=STRATEGY_BINDINGS.to_message(stored))

    async def DeleteStrategyBinding(
        self, request: pb.DeleteStrategyBindingRequest, context: Context
    ) -> pb.DeleteStrategyBindingResponse:
        await self._resources.delete(STRATEGY_BINDINGS, request, "DeleteStrategyBinding")
        return pb.DeleteStrategyBindingResponse()

    # credentials

    async def GetCredential(self, request: pb.GetCredentialRequest, context: Context) -> pb.GetCredentialResponse:
        return pb.GetCredentialResponse(credential=self._resources.get(CREDENTIALS, request))

    async def ListCredentials(self, request: pb.ListCredentialsRequest, context: Context) -> pb.ListCredentialsResponse:
        page, token = self._resources.list(CREDENTIALS, request, "ListCredentials")
        return pb.ListCredentialsResponse(credentials=page, next_page_token=token)

    async def CreateCredential(
        self, request: pb.CreateCredentialRequest, context: Context
    ) -> pb.CreateCredentialResponse:
        token = new_token()
        digest = token_sha256(token)

        def with_token(credential: Credential) -> Credential:
            return replace(credential, token_sha256=digest)

        stored = await self._resources.create(CREDENTIALS, request, "CreateCredential", with_token)
        if stored.token_sha256 != digest:  # what an earlier try made: its token was answered then and is not kept
            raise TokenShownOnce(f"{names.CREDENTIALS}/{stored.id}")
        shown = "" if request.validate_only else token
        return pb.CreateCredentialResponse(credential=CREDENTIALS.to_message(stored), token=shown)

    async def UpdateCredential(
        self, request: pb.UpdateCredentialRequest, context: Context
    ) -> pb.UpdateCredentialResponse:
        if request.allow_missing:
            raise InvalidField("allow_missing", "a credential is made by CreateCredential, which answers its token")
        stored = await self._resources.update(CREDENTIALS, request, "UpdateCredential")
        return pb.UpdateCredentialResponse(credential=CREDENTIALS.to_message(stored))

    async def DeleteCredential(
        self, request: pb.DeleteCredentialRequest, context: Context
    ) -> pb.DeleteCredentialResponse:
        await self._resources.delete(CREDENTIALS, request, "DeleteCredential")
        return pb.DeleteCredentialResponse()

    # Verbs

    async def EnableStrategy(self, request: pb.EnableStrategyRequest, context: Context) -> pb.EnableStrategyResponse:
        return pb.EnableStrategyResponse(strategy=await self._switch(request, "EnableStrategy", enabled=True))

    async def DisableStrategy(self, request: pb.DisableStrategyRequest, context: Context) -> pb.DisableStrategyResponse:
        return pb.DisableStrategyResponse(strategy=await self._switch(request, "DisableStrategy", enabled=False))

    async def _switch(
        self, request: pb.EnableStrategyRequest | pb.DisableStrategyRequest, method: str, *, enabled: bool
    ) -> pb.Strategy:
        key = STRATEGIES.key(request.name, "name")
        stored = await self._resources.modify(
            StrategyConfig, key, write_of(method, request), lambda strategy: replace(strategy, enabled=enabled)
        )
        return STRATEGIES.to_message(stored)

    async def ListStrategyRevisions(
        self, request: pb.ListStrategyRevisionsRequest, context: Context
    ) -> pb.ListStrategyRevisionsResponse:
        strategy = STRATEGIES.key(request.parent, "parent")
        listing = f"ListStrategyRevisions {strategy}"
        check_size(request.page_size)
        read_token(listing, request.page_token)
        try:
            revisions = await self._store.strategy_revisions(strategy)
        except UnknownResource:
            raise UnknownResource(request.parent, "parent") from None

        def newest_first(revision: StrategyRevision) -> str:
            return f"{2**32 - revision.config.revision:010}"

        page, token = page_of(listing, revisions, newest_first, request.page_size, request.page_token)
        return pb.ListStrategyRevisionsResponse(
            revisions=[revision_message(revision) for revision in page], next_page_token=token
        )

    async def RollbackStrategy(
        self, request: pb.RollbackStrategyRequest, context: Context
    ) -> pb.RollbackStrategyResponse:
        key = STRATEGIES.key(request.name, "name")
        if not request.revision:
            raise InvalidField("revision", "is required")
        past = await self._revision(key, request.revision)
        stored = await self._resources.modify(
            StrategyConfig, key, write_of("RollbackStrategy", request), lambda _: past, etag=request.etag
        )
        return pb.RollbackStrategyResponse(strategy=STRATEGIES.to_message(stored))

    async def _revision(self, strategy: str, number: int) -> StrategyConfig:
        for revision in await self._store.strategy_revisions(strategy):
            if revision.config.revision == number:
                return revision.config
        raise UnknownResource(f"{names.STRATEGIES}/{strategy} revision {number}", "revision")

    async def RevokeCredential(
        self, request: pb.RevokeCredentialRequest, context: Context
    ) -> pb.RevokeCredentialResponse:
        key = CREDENTIALS.key(request.name, "name")
        stored = await self._resources.modify(
            Credential,
            key,
            write_of("RevokeCredential", request),
            lambda credential: replace(credential, revoked=True),
        )
        return pb.RevokeCredentialResponse(credential=CREDENTIALS.to_message(stored))

    async def RotateCredential(
        self, request: pb.RotateCredentialRequest, context: Context
    ) -> pb.RotateCredentialResponse:
        key = CREDENTIALS.key(request.name, "name")
        overlap = _overlap(request.overlap)
        token = new_token()
        digest = token_sha256(token)

        def change(credential: Credential) -> Credential:
            if credential.revoked:
                raise InvalidField("name", "is revoked, and stays so; create another")
            return credential.rotated(digest, self._clock(), overlap)

        stored = await self._resources.modify(Credential, key, write_of("RotateCredential", request), change)
        if stored.token_sha256 != digest:
            raise TokenShownOnce(request.name)
        return pb.RotateCredentialResponse(credential=CREDENTIALS.to_message(stored), token=token)

    # nodes and endpoints

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.GetNodeResponse:
        return pb.GetNodeResponse(node=self._node(request.name))

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        nodes = list(self._nodes().values())
        page, token = page_of("ListNodes", nodes, lambda node: node.name, request.page_size, request.page_token)
        return pb.ListNodesResponse(nodes=[self._node_message(node) for node in page], next_page_token=token)

    async def SetNodeState(self, request: pb.SetNodeStateRequest, context: Context) -> pb.SetNodeStateResponse:
        self._node(request.name)
        node = names.parse_name(names.NODES, request.name)
        state = scheduling_state(request.state, "state")
        write = write_of("SetNodeState", request)
        await self._set_state(request, state, write, lambda: self._store.set_node_state(node, state, write))
        if state is SchedulingState.ACTIVE:
            for endpoint in self._fleet.endpoints():
                if endpoint.node == node:
                    self._fleet.lift_ejection(endpoint.id)
        return pb.SetNodeStateResponse(node=self._node(request.name, state))

    async def DeleteNode(self, request: pb.DeleteNodeRequest, context: Context) -> pb.DeleteNodeResponse:
        name = names.parse_name(names.NODES, request.name)
        write = write_of("DeleteNode", request)
        if await self._resources.wrote_before(write):
            return pb.DeleteNodeResponse()
        node = self._nodes().get(name)
        if node is None:
            raise UnknownResource(request.name)
        if node.connected:
            raise InUse(request.name, "its agent, which is connected")
        await self._store.set_node_state(name, SchedulingState.ACTIVE, write)
        if any(live.name == name for live in self._fleet.nodes()):
            self._fleet.forget_node(name)
        await self._resources.wrote(write)
        return pb.DeleteNodeResponse()

    async def GetEndpoint(self, request: pb.GetEndpointRequest, context: Context) -> pb.GetEndpointResponse:
        return pb.GetEndpointResponse(endpoint=self._endpoint(request.name))

    async def ListEndpoints(self, request: pb.ListEndpointsRequest, context: Context) -> pb.ListEndpointsResponse:
        endpoints = list(self._endpoints().values())
        page, token = page_of(
            "ListEndpoints", endpoints, lambda endpoint: endpoint.id, request.page_size, request.page_token
        )
        messages = [self._endpoint_message(endpoint) for endpoint in page]
        return pb.ListEndpointsResponse(endpoints=messages, next_page_token=token)

    async def SetEndpointState(
        self, request: pb.SetEndpointStateRequest, context: Context
    ) -> pb.SetEndpointStateResponse:
        self._endpoint(request.name)
        endpoint = names.parse_name(names.ENDPOINTS, request.name)
        state = scheduling_state(request.state, "state")
        write = write_of("SetEndpointState", request)
        await self._set_state(request, state, write, lambda: self._store.set_endpoint_state(endpoint, state, write))
        if state is SchedulingState.ACTIVE:
            self._fleet.lift_ejection(endpoint)
        return pb.SetEndpointStateResponse(endpoint=self._endpoint(request.name, state))

    async def _set_state(
        self,
        request: pb.SetNodeStateRequest | pb.SetEndpointStateRequest,
        state: SchedulingState,
        write: Write,
        store: Callable[[], Awaitable[None]],
    ) -> None:
        """One after the other: each meets what the one before left of the disruption budgets."""
        async with self._closing:
            if state is not SchedulingState.ACTIVE and not request.force:
                self._fleet.check_disruption(request.name)
            await store()
            await self._resources.wrote(write)

    # bypass

    async def SetBypass(self, request: pb.SetBypassRequest, context: Context) -> pb.SetBypassResponse:
        tenant = self._parent_tenant(request.tenant, "tenant") if request.tenant else EVERYBODY
        write = write_of("SetBypass", request)
        await self._store.set_bypass(tenant, request.bypass, write)
        await self._resources.wrote(write)
        return pb.SetBypassResponse(bypassed=bypassed_names(self._state()))

    # usage

    async def ListUsage(self, request: pb.ListUsageRequest, context: Context) -> pb.ListUsageResponse:
        query = usage_query(request, self._clock())
        tenant = "" if request.parent == _EVERY_TENANT else names.parse_name(names.TENANTS, request.parent, "parent")
        size = check_size(request.page_size)
        rows = await self._store.usage(
            since=query.since,
            until=query.until,
            tenant=tenant,
            model=query.model,
            interval=query.interval,
            after=query.after,
            limit=size + 1,
        )
        token = usage_token(query, rows[size - 1]) if len(rows) > size else ""
        return pb.ListUsageResponse(usage=[usage_message(row) for row in rows[:size]], next_page_token=token)

    # the audit trail

    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: Context
    ) -> pb.ListAuditEntriesResponse:
        size = check_size(request.page_size)
        before_id = read_number("ListAuditEntries", request.page_token)
        entries = await self._store.audit(
            before_id=before_id,
            limit=size + 1,
            principal=request.principal,
            resource=request.resource,
            since=moment(request.since, "since") if request.HasField("since") else None,
        )
        token = make_token("ListAuditEntries", str(entries[size - 1].id)) if len(entries) > size else ""
        messages = [audit_message(entry) for entry in entries[:size]]
        return pb.ListAuditEntriesResponse(audit_entries=messages, next_page_token=token)

    # what is live, joined with what is desired

    def _parent_tenant(self, parent: str, field: str = "parent") -> str:
        """The tenant in `tenants/acme`, empty for `tenants/-`: every tenant."""
        if parent == _EVERY_TENANT and field == "parent":
            return ""
        tenant = names.parse_name(names.TENANTS, parent, field)
        if tenant not in self._state().tenants:
            raise UnknownTenant(parent, field)
        return tenant

    def _nodes(self) -> dict[str, NodeView]:
        """By name: those seen, and those that were cordoned and are not seen since this scheduler started."""
        absent = {name: NodeView(name) for name in self._state().node_states}
        return absent | {node.name: node for node in self._fleet.nodes()}

    def _endpoints(self) -> dict[str, EndpointView]:
        absent = {endpoint: EndpointView(endpoint, node="") for endpoint in self._state().endpoint_states}
        return absent | {endpoint.id: endpoint for endpoint in self._fleet.endpoints()}

    def _node(self, name: str, state: SchedulingState | None = None) -> pb.Node:
        node = self._nodes().get(names.parse_name(names.NODES, name))
        if node is None:
            raise UnknownResource(name)
        return self._node_message(node, state)

    def _node_message(self, node: NodeView, state: SchedulingState | None = None) -> pb.Node:
        return node_message(node, state or self._state().node_states.get(node.name, SchedulingState.ACTIVE))

    def _endpoint(self, name: str, state: SchedulingState | None = None) -> pb.Endpoint:
        endpoint = self._endpoints().get(names.parse_name(names.ENDPOINTS, name))
        if endpoint is None:
            raise UnknownResource(name)
        return self._endpoint_message(endpoint, state)

    def _endpoint_message(self, endpoint: EndpointView, state: SchedulingState | None = None) -> pb.Endpoint:
        state = state or self._state().endpoint_states.get(endpoint.id, SchedulingState.ACTIVE)
        return endpoint_message(endpoint, state)
