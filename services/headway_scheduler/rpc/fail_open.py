"""What a data plane needs to route by itself while no scheduler answers."""

from collections.abc import Sequence
from contextlib import suppress

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import EVERYBODY, Principal
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.errors import HeadwayError
from headway_scheduler.rpc.convert.routing import placement_to_proto

__all__ = ["fail_open_view"]


def fail_open_view(scheduler: Scheduler, principal: Principal) -> pb.FailOpenView:
    """The endpoints that may be chosen now, each with the tenants, of those this principal may name, that may use it.

    It stands there once for each set of models that any of them may use. An alias stands beside its model, since
    nobody resolves it meanwhile.

    Where this principal may use no endpoint, or admins closed all, an entry that is nobody's says so: an empty view is
    of a scheduler that has met no agent yet, or of a fleet that is ill, and clients keep the one before.
    """
    fleet, catalogue = scheduler.fleet, scheduler.intake.desired.models
    desired = scheduler.intake.desired
    view = pb.FailOpenView(
        bypassed=sorted(each for each in desired.bypassed if each == EVERYBODY or principal.may_name(each))
    )
    for tenant in desired.tenants.values():
        if tenant.routed_percent < 100 and principal.may_name(tenant.id):
            view.routed_percent[tenant.id] = tenant.routed_percent
    with suppress(HeadwayError):  # one that does not exist is nobody's
        view.default_tenant = scheduler.intake.tenant(principal, "").id
    tenants = _by_slot(scheduler, principal)
    shared: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[str, ...], list[str]]] = {}
    serving = ill = False
    for endpoint in fleet.endpoints.values():
        if not fleet.columns.open[endpoint.slot]:
            ill = ill or {endpoint.state, endpoint.node.state} == {SchedulingState.ACTIVE}
            continue
        serving = True
        key = (tuple(endpoint.spec.models), tuple(tenants.get(endpoint.slot, ())))
        found = shared.get(key)  # most endpoints are as many others
        if found is None:
            found = shared[key] = _by_models(scheduler, *key)
        for models, who in found.items():
            view.endpoints.add(
                endpoint=placement_to_proto(endpoint.placement),
                models=[
                    *models,
                    *(alias for model in models if model in catalogue for alias in catalogue[model].aliases),
                ],
                tenants=who,
                inflight=int(fleet.columns.inflight[endpoint.slot]),
            )
    if not view.endpoints and fleet.endpoints and (serving or not ill) and scheduler.is_settled:
        view.endpoints.add()
    return view


def _by_slot(scheduler: Scheduler, principal: Principal) -> dict[int, list[str]]:
    """Who may use each slot, of the tenants that this principal may name."""
    found: dict[int, list[str]] = {}
    for tenant in scheduler.intake.desired.tenants:
        if principal.may_name(tenant):
            rights = scheduler.fleet.rights(tenant)
            for slot in rights.own_slots | rights.burst_slots:
                found.setdefault(slot, []).append(tenant)
    return found


def _by_models(scheduler: Scheduler, models: Sequence[str], tenants: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """The tenants by which of the models they may use; those that may use none are left out."""
    intake = scheduler.intake
    found: dict[tuple[str, ...], list[str]] = {}
    for tenant in tenants:
        allowed = tuple(model for model in models if intake.allows(intake.desired.tenants[tenant], model))
        if allowed:
            found.setdefault(allowed, []).append(tenant)
    return found
