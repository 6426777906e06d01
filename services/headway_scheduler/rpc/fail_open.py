"""What a data plane needs to route by itself while no scheduler answers."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import EVERYBODY, DesiredState, Principal
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.errors import HeadwayError
from headway_scheduler.rpc.convert.numbers import uint32
from headway_scheduler.rpc.convert.routing import placement_to_proto

__all__ = ["AT_ONCE", "fail_open_view", "writing_view"]

AT_ONCE: Final = 100
"""Endpoints written in one turn: less than a millisecond."""

_SLOTS_AT_ONCE: Final = 2000


def fail_open_view(scheduler: Scheduler, principal: Principal) -> pb.FailOpenView:
    """What `writing_view` writes, at once: of 10,000 endpoints that takes 70 ms."""
    view = pb.FailOpenView()
    for _ in writing_view(view, scheduler, principal):
        pass
    return view


def writing_view(view: pb.FailOpenView, scheduler: Scheduler, principal: Principal) -> Iterator[None]:
    """Write the endpoints that may be chosen now, each with the tenants, of those this principal may name, that may use
    it; in turns, between which the fleet may change: what changed then is in the next view.

    It stands there once for each set of models that any of them may use. An alias stands beside its model, since
    nobody resolves it meanwhile.

    Where this principal may use no endpoint, or admins closed all, an entry that is nobody's says so: an empty view is
    of a scheduler that has met no agent yet, or of a fleet that is ill, and clients keep the one before.
    """
    fleet, desired = scheduler.fleet, scheduler.intake.desired
    catalogue = desired.models
    view.bypassed.extend(sorted(each for each in desired.bypassed if each == EVERYBODY or principal.may_name(each)))
    for tenant in desired.tenants.values():
        if tenant.routed_percent < 100 and principal.may_name(tenant.id):
            view.routed_percent[tenant.id] = tenant.routed_percent
    with suppress(HeadwayError):  # one that does not exist is nobody's
        view.default_tenant = scheduler.intake.tenant(principal, "").id
    tenants: dict[int, list[str]] = {}
    yield from _by_slot(tenants, scheduler, desired, principal)
    shared: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[str, ...], list[str]]] = {}
    serving = ill = False
    for number, endpoint in enumerate(list(fleet.endpoints.values())):
        if number % AT_ONCE == AT_ONCE - 1:
            yield
        if fleet.by_slot.get(endpoint.slot) is not endpoint:  # it went meanwhile
            continue
        if not fleet.columns.open[endpoint.slot]:
            ill = ill or {endpoint.state, endpoint.node.state} == {SchedulingState.ACTIVE}
            continue
        serving = True
        key = (tuple(endpoint.spec.models), tuple(tenants.get(endpoint.slot, ())))
        found = shared.get(key)  # most endpoints are as many others
        if found is None:
            found = shared[key] = _by_models(scheduler, desired, *key)
        for models, who in found.items():
            view.endpoints.add(
                endpoint=placement_to_proto(endpoint.placement),
                models=[
                    *models,
                    *(alias for model in models if model in catalogue for alias in catalogue[model].aliases),
                ],
                tenants=who,
                inflight=uint32(fleet.columns.inflight[endpoint.slot]),
            )
    if not view.endpoints and fleet.endpoints and (serving or not ill) and scheduler.is_settled:
        view.endpoints.add()


def _by_slot(
    found: dict[int, list[str]], scheduler: Scheduler, desired: DesiredState, principal: Principal
) -> Iterator[None]:
    """Write who may use each slot, of the tenants that this principal may name."""
    for tenant in desired.tenants:
        if principal.may_name(tenant):
            rights = scheduler.fleet.rights(tenant)
            slots = iter(rights.own_slots | rights.burst_slots)
            while some := list(islice(slots, _SLOTS_AT_ONCE)):
                for slot in some:
                    found.setdefault(slot, []).append(tenant)
                yield


def _by_models(
    scheduler: Scheduler, desired: DesiredState, models: Sequence[str], tenants: Sequence[str]
) -> dict[tuple[str, ...], list[str]]:
    """The tenants by which of the models they may use; those that may use none are left out."""
    intake = scheduler.intake
    found: dict[tuple[str, ...], list[str]] = {}
    for tenant in tenants:
        allowed = tuple(model for model in models if intake.allows(desired.tenants[tenant], model))
        if allowed:
            found.setdefault(allowed, []).append(tenant)
    return found
