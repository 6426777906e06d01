"""What a data plane needs to route by itself while no scheduler answers."""

from contextlib import suppress

from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal
from headway_scheduler.errors import HeadwayError
from headway_scheduler.rpc.convert.routing import placement_to_proto

__all__ = ["fail_open_view"]


def fail_open_view(scheduler: Scheduler, principal: Principal) -> pb.FailOpenView:
    """The endpoints that may be chosen now, each with the tenants, of those this principal may name, that may use it.

    An alias stands beside its model, since nobody resolves it meanwhile.
    """
    fleet, aliases = scheduler.fleet, scheduler.intake.desired.models
    view = pb.FailOpenView()
    with suppress(HeadwayError):  # one that does not exist is nobody's
        view.default_tenant = scheduler.intake.tenant(principal, "").id
    for endpoint in fleet.endpoints.values():
        tenants = [tenant for tenant in fleet.tenants_of(endpoint) if principal.may_name(tenant)]
        if not tenants or not fleet.columns.open[endpoint.slot]:
            continue
        names = [*endpoint.spec.models]
        for model in endpoint.spec.models:
            if model in aliases:
                names.extend(aliases[model].aliases)
        view.endpoints.add(
            endpoint=placement_to_proto(endpoint.placement),
            models=names,
            tenants=tenants,
            inflight=int(fleet.columns.inflight[endpoint.slot]),
        )
    return view
