"""Planes that send a body on as it came: what they cannot serve, since it would need another one."""

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Principal
from headway_scheduler.errors import InvalidField, NotPermitted

__all__ = ["FixedBodies"]


class FixedBodies:
    """Checks decisions for such planes. Who shares an endpoint is remembered until the fleet changes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._shared: dict[tuple[int, str], bool] = {}
        self._version = -1

    def check(self, decision: Decision, asked: str, principal: Principal, tenant_name: str) -> None:
        """Raise a refusal for an alias that the engine does not know, and for a salt where tenants share an engine."""
        spec = decision.endpoint.spec
        if asked != decision.model and asked not in spec.models:
            raise InvalidField("model", f"this plane cannot change the body: ask for {decision.model!r}")
        if not decision.cache_salt:
            return
        tenant = self._scheduler.intake.tenant(principal, tenant_name)
        if self._is_shared(decision, tenant.domain):
            message = f"{spec.address} serves other isolation domains too, and this plane cannot send a cache salt"
            raise NotPermitted(message, tenant=tenant.id)

    def _is_shared(self, decision: Decision, domain: str) -> bool:
        """May tenants of other isolation domains use this endpoint?"""
        fleet, tenants = self._scheduler.fleet, self._scheduler.intake.desired.tenants
        if self._version != fleet.version:
            self._version = fleet.version
            self._shared.clear()
        endpoint = fleet.find(decision.endpoint.spec.id)
        if endpoint is None:
            return False
        key = (endpoint.slot, domain)
        found = self._shared.get(key)
        if found is None:
            found = any(tenants[each].domain != domain for each in fleet.tenants_of(endpoint))
            self._shared[key] = found
        return found
