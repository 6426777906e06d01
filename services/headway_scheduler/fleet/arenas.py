"""Arenas: which tenants compete for which endpoints, and with what weight.

An arena is the endpoints of GPU groups that tenants share, directly or through others: usually one group. A tenant that
shares no endpoint is in none, and what it does on endpoints of its own counts for nothing among those it shares.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from headway_scheduler.domain.desired import BindingMode, DesiredState

__all__ = ["NO_ARENAS", "Arena", "Arenas", "arenas_of"]


@dataclass(frozen=True, slots=True)
class Arena:
    """Tenants that compete. `id`: the first of its GPU groups. `yielding`: those that may only burst into it."""

    id: str
    weights: Mapping[str, float]
    yielding: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Arenas:
    """All of them. `by_tenant` has no tenant without a competitor; `contested` are the slots that several may use."""

    by_tenant: Mapping[str, Arena] = field(default_factory=dict)
    contested: frozenset[int] = frozenset()


NO_ARENAS = Arenas()


def arenas_of(desired: DesiredState, groups_by_slot: Mapping[int, Iterable[str]]) -> Arenas:
    """Who competes, from the bindings and from what groups each slot is in now."""
    slots: dict[frozenset[str], list[int]] = {}
    for slot, groups in groups_by_slot.items():
        slots.setdefault(frozenset(groups), []).append(slot)
    bound: dict[str, dict[str, BindingMode]] = {}
    for binding in desired.bindings:
        if binding.tenant in desired.tenants:
            bound.setdefault(binding.group, {})[binding.tenant] = binding.mode
    contested: list[int] = []
    together: list[tuple[Set[str], Set[str]]] = []
    owners: set[str] = set()
    for groups, members in slots.items():
        own, burst = _users(groups, bound)
        if len(own | burst) < 2:
            continue
        contested += members
        owners |= own
        together.append((own | burst, groups.intersection(bound)))
    by_tenant: dict[str, Arena] = {}
    for tenants, groups in _joined(together):
        weights = {tenant: _weight(desired, tenant, groups) for tenant in sorted(tenants)}
        arena = Arena(min(groups), weights, frozenset(tenants - owners))
        by_tenant.update(dict.fromkeys(tenants, arena))
    return Arenas(by_tenant, frozenset(contested))


def _users(groups: Iterable[str], bound: Mapping[str, Mapping[str, BindingMode]]) -> tuple[set[str], set[str]]:
    """Who may use an endpoint of these groups, always or in bursts: a dedicated group is its tenant's alone."""
    own: set[str] = set()
    burst: set[str] = set()
    for group in groups:
        for tenant, mode in bound.get(group, {}).items():
            if mode is BindingMode.DEDICATED:
                return set(), set()
            (burst if mode is BindingMode.BURST else own).add(tenant)
    return own, burst - own


def _joined(parts: list[tuple[Set[str], Set[str]]]) -> list[tuple[Set[str], Set[str]]]:
    """Those with a tenant in common are one: a tenant's counter is one wherever it competes."""
    found: list[tuple[Set[str], Set[str]]] = []
    for tenants, groups in parts:
        apart = []
        for other in found:
            if tenants & other[0]:
                tenants, groups = tenants | other[0], groups | other[1]
            else:
                apart.append(other)
        found = [*apart, (tenants, groups)]
    return found


def _weight(desired: DesiredState, tenant: str, groups: Set[str]) -> float:
    """That of the tenant's first binding to one of the groups, where one is set there, else its own."""
    bindings = [each for each in desired.bindings if each.tenant == tenant and each.group in groups]
    for binding in sorted(bindings, key=lambda each: each.order):
        if binding.weight not in (0.0, 1.0):
            return binding.weight
    return desired.tenants[tenant].weight or 1.0
