"""Where requests go, as the header that planes follow says it."""

from collections.abc import Sequence

from headway_scheduler.addresses import EngineAddresses
from headway_scheduler.admission.choosing import names_endpoint
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.errors import NoEndpoints

__all__ = ["any_endpoint", "destinations"]


def destinations(decision: Decision, addresses: EngineAddresses) -> str:
    """The chosen `ip:port` and those to fall back on, in the order of preference.

    Only what body and headers also fit: another engine may not know `cache_salt`, another rank has another header.
    """
    chosen = decision.endpoint.spec
    found = [chosen.address]
    for fallback in decision.fallbacks:
        spec = fallback.spec
        alike = spec.engine == chosen.engine and fallback.headers == decision.endpoint.headers
        if alike and spec.address not in found:
            found.append(spec.address)
    return ",".join(addresses.shown(each) for each in found)


def any_endpoint(scheduler: Scheduler, tenant: str, subset: Sequence[str] | None) -> str:
    """The least busy endpoint that the tenant may use, whatever it serves. Raises NoEndpoints."""
    names = None if subset is None else frozenset(subset)
    endpoints = [
        endpoint
        for endpoint in scheduler.fleet.open_to(tenant)
        if names is None or names_endpoint(endpoint.id, endpoint.spec.address, names)
    ]
    if not endpoints:
        raise NoEndpoints(f"there is no endpoint that {tenant!r} may use", tenant=tenant)
    inflight = scheduler.fleet.columns.inflight
    least = min(endpoints, key=lambda endpoint: inflight[endpoint.slot])
    return scheduler.addresses.shown(least.spec.address)
