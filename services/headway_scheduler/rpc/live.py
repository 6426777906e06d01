"""The Admin service of a scheduler, and the live side of nodes and endpoints as it sees them."""

from collections.abc import Sequence
from dataclasses import replace

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Binding, BindingMode, GpuGroup
from headway_scheduler.domain.fleet_view import EndpointView, NodeView
from headway_scheduler.domain.names import ENDPOINTS, GPU_GROUPS, MODELS, NODES, TENANTS
from headway_scheduler.errors import DisruptionBudgetBroken, GroupNotFree, InUse, UnknownResource
from headway_scheduler.fleet.membership import owners_of
from headway_scheduler.rpc.admin import AdminService

__all__ = ["LiveFleet", "admin_service"]


def admin_service(scheduler: Scheduler) -> AdminService:
    """The Admin service of this scheduler."""
    return AdminService(
        store=scheduler.store,
        state=lambda: scheduler.desired,
        refresh=scheduler.refresh,
        check_strategy=scheduler.registry.check,
        fleet=LiveFleet(scheduler),
        check_model=scheduler.tokenizers.check,
    )


class LiveFleet:
    """Reads the scheduler's memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._fleet, self._clock = scheduler, scheduler.fleet, scheduler.clock

    def nodes(self) -> Sequence[NodeView]:
        """Every node known, connected or not."""
        columns = self._fleet.columns
        inflight = columns.inflight + columns.external
        return [
            NodeView(
                name=node.id,
                labels=node.hello.labels,
                connected=node.connected,
                agent_version=node.hello.agent_version,
                devices=len(node.hello.devices),
                endpoints=len(node.endpoints),
                inflight=sum(int(inflight[endpoint.slot]) for endpoint in node.endpoints.values()),
                clock_skew_s=node.clock_skew_s,
            )
            for node in self._fleet.nodes.values()
        ]

    def endpoints(self) -> Sequence[EndpointView]:
        """Every endpoint known."""
        columns = self._fleet.columns
        return [
            EndpointView(
                id=endpoint.id,
                node=endpoint.node.id,
                labels=endpoint.labels,
                models=endpoint.spec.models,
                healthy=bool(columns.open[endpoint.slot]),
                inflight=int(columns.inflight[endpoint.slot] + columns.external[endpoint.slot]),
            )
            for endpoint in self._fleet.endpoints.values()
        ]

    def check_exclusive(self, resource: GpuGroup | Binding) -> None:
        """Raise GroupNotFree if, with this written, an endpoint were in dedicated groups of two tenants.

        Of the endpoints known now; one that comes into such a place later is closed (`contested`).
        """
        before = self._scheduler.desired
        if isinstance(resource, GpuGroup):
            after = replace(before, groups={**before.groups, resource.id: resource})
            mine, field = {b.tenant for b in before.bindings if b.group == resource.id}, "gpu_group"
        else:
            others = (b for b in before.bindings if (b.tenant, b.group) != (resource.tenant, resource.group))
            after = replace(before, bindings=(*others, resource))
            mine, field = {resource.tenant}, "binding.mode"
        if not any(binding.mode == BindingMode.DEDICATED for binding in after.bindings if binding.tenant in mine):
            return
        for endpoint in self._fleet.endpoints.values():
            owners = owners_of(after, endpoint)
            if len(owners) > 1 and owners & mine and owners != owners_of(before, endpoint):
                name, user = f"{GPU_GROUPS}/{_group_of(resource)}", min(owners - mine or owners)
                problem = f"its endpoint {endpoint.id!r} is {user!r}'s alone"
                raise GroupNotFree(name, f"{TENANTS}/{user}", field, problem)

    def check_disruption(self, name: str) -> None:
        """Raise DisruptionBudgetBroken if too few of a model's endpoints were left able to serve without this one.

        `name`: `nodes/gpu-7`, or an endpoint's full name.
        """
        fleet, models = self._fleet, self._scheduler.desired.models
        is_open = fleet.columns.open
        named = (e for e in fleet.endpoints.values() if name in (f"{NODES}/{e.node_id}", f"{ENDPOINTS}/{e.id}"))
        closing = {endpoint.slot for endpoint in named if is_open[endpoint.slot]}
        touched = {model for slot in closing for model in fleet.by_slot[slot].spec.models}
        for model in sorted(touched & models.keys()):
            pool = fleet.pool(model).tolist()
            required = models[model].disruption_budget.required(len(pool))
            left = sum(bool(is_open[slot]) and slot not in closing for slot in pool)
            if left < required:
                raise DisruptionBudgetBroken(name, f"{MODELS}/{model}", left, required)

    def lift_ejection(self, endpoint: str) -> None:
        """Let an endpoint back in that is ejected; nothing else changes."""
        found = self._fleet.endpoints.get(endpoint)
        if found is not None:
            self._fleet.lift_ejection(found, self._clock())

    def forget_node(self, name: str) -> None:
        """Drop a node that is not connected. Raises InUse if it is, UnknownResource if there is none."""
        node = self._fleet.nodes.get(name)
        if node is None:
            raise UnknownResource(f"{NODES}/{name}")
        if node.connected:
            raise InUse(f"{NODES}/{name}", "its agent, which is connected")
        self._fleet.forget_node(name)


def _group_of(resource: GpuGroup | Binding) -> str:
    return resource.id if isinstance(resource, GpuGroup) else resource.group
