"""Who may use which endpoints: GPU groups by name and label, bindings by mode and order, and a model's splits.

Found anew when the fleet or the desired state changes, never at a decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headway_scheduler.domain.desired import Binding, BindingMode, DesiredState, GpuGroup, Model

__all__ = ["Member", "Membership", "Rights", "owners_of", "split_of"]


class Member(Protocol):
    """What a group knows of an endpoint."""

    @property
    def id(self) -> str:
        """`10.0.0.1:8000@0`."""
        ...

    @property
    def slot(self) -> int:
        """Its place in the columns."""
        ...

    @property
    def node_id(self) -> str:
        """Its node's."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """Its own over its node's."""
        ...


@dataclass(frozen=True, slots=True)
class Rights:
    """Slots that a tenant may use, in tiers: each is for when those before it can take nothing more.

    `own`: groups bound as dedicated or shared, by their bindings' order; `burst`: those it may overflow into.
    """

    own: tuple[frozenset[int], ...] = ()
    burst: tuple[frozenset[int], ...] = ()

    @property
    def own_slots(self) -> frozenset[int]:
        """All of its own."""
        return frozenset().union(*self.own)

    @property
    def burst_slots(self) -> frozenset[int]:
        """All that it may overflow into."""
        return frozenset().union(*self.burst)


class Membership:
    """The members of every group at one moment, and what follows from the bindings."""

    def __init__(self, desired: DesiredState, endpoints: Iterable[Member]) -> None:
        self._desired = desired
        known = _Known(endpoints)
        self._members = {group.id: known.members(group) for group in desired.groups.values()}
        owners: dict[int, set[str]] = {}
        for binding in desired.bindings:
            if binding.mode == BindingMode.DEDICATED:
                for slot in self._of(binding):
                    owners.setdefault(slot, set()).add(binding.tenant)
        self._owned = frozenset(owners)
        self._alone: dict[str, set[int]] = {}
        for slot, tenants in owners.items():
            if len(tenants) == 1:
                (tenant,) = tenants
                self._alone.setdefault(tenant, set()).add(slot)

    def rights(self, tenant: str) -> Rights:
        """What a tenant may use. An endpoint in another tenant's dedicated group is out of every group for it."""
        others = self._owned - self._alone.get(tenant, set())
        mine = sorted((b for b in self._desired.bindings if b.tenant == tenant), key=lambda b: (b.order, b.group))
        own = self._tiers([b for b in mine if b.mode != BindingMode.BURST], others)
        burst = self._tiers([b for b in mine if b.mode == BindingMode.BURST], others.union(*own))
        return Rights(own, burst)

    def alone(self) -> dict[str, int]:
        """Mask, for each isolation domain, of the slots that no other domain's tenants may use."""
        users: dict[int, set[str]] = {}
        for tenant in self._desired.tenants.values():
            rights = self.rights(tenant.id)
            for slot in rights.own_slots | rights.burst_slots:
                users.setdefault(slot, set()).add(tenant.domain)
        found: dict[str, int] = {}
        for slot, domains in users.items():
            if len(domains) == 1:
                (domain,) = domains
                found[domain] = found.get(domain, 0) | 1 << slot
        return found

    def _of(self, binding: Binding) -> frozenset[int]:
        return self._members.get(binding.group, frozenset())

    def _tiers(self, bindings: list[Binding], taken: frozenset[int]) -> tuple[frozenset[int], ...]:
        """The members of the bindings' groups by order, each slot in the first tier that has it."""
        tiers: list[frozenset[int]] = []
        for order in sorted({binding.order for binding in bindings}):
            tier = frozenset().union(*(self._of(b) for b in bindings if b.order == order)) - taken
            taken |= tier
            if tier:
                tiers.append(tier)
        return tuple(tiers)


class _Known:
    """Endpoints by all that a group may name: as GpuGroup.holds says, without asking each group of each endpoint."""

    def __init__(self, endpoints: Iterable[Member]) -> None:
        self._every: set[int] = set()
        self._by_id: dict[str, int] = {}
        self._by_node: dict[str, set[int]] = {}
        self._by_label: dict[tuple[str, str], set[int]] = {}
        for each in endpoints:
            self._every.add(each.slot)
            self._by_id[each.id] = each.slot
            self._by_node.setdefault(each.node_id, set()).add(each.slot)
            for label in each.labels.items():
                self._by_label.setdefault(label, set()).add(each.slot)

    def members(self, group: GpuGroup) -> frozenset[int]:
        """Slots of the group's members."""
        if group.all:
            return frozenset(self._every)
        found = {self._by_id[name] for name in group.endpoints if name in self._by_id}
        found.update(*(self._by_node.get(name, ()) for name in group.nodes))
        if group.selector:
            matching = [self._by_label.get(label, set()) for label in group.selector.items()]
            found |= set.intersection(*matching)
        return frozenset(found)


def owners_of(desired: DesiredState, endpoint: Member) -> frozenset[str]:
    """Tenants with a dedicated group that the endpoint is in. More than one: it can serve none of them alone."""
    labels = endpoint.labels
    return frozenset(
        binding.tenant
        for binding in desired.bindings
        if binding.mode == BindingMode.DEDICATED
        and (group := desired.groups.get(binding.group)) is not None
        and group.holds(endpoint.id, endpoint.node_id, labels)
    )


def split_of(model: Model, desired: DesiredState, endpoint: Member, engine_version: str) -> int | None:
    """Which of the model's splits the endpoint belongs to: the first by name that it matches; None: none."""
    labels = endpoint.labels
    named = {split.group for split in model.splits if split.group}
    held = {
        name
        for name in named
        if (group := desired.groups.get(name)) is not None and group.holds(endpoint.id, endpoint.node_id, labels)
    }
    return next((n for n, split in enumerate(model.splits) if split.holds(labels, engine_version, held)), None)
