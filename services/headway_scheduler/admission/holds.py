"""Holds: Routes kept waiting in the scheduler until an endpoint is worth giving."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import merge
from typing import Final

from headway_scheduler.admission.values import Work
from headway_scheduler.domain.decision import Decision
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.values import Owner

__all__ = ["BEST_EFFORT", "DEFAULT_LIMITS", "Hold", "HoldLimits", "HoldOrder", "Holds", "Waiter"]

BEST_EFFORT: Final = -1
"""The priority that is shed first."""


class HoldOrder(StrEnum):
    """In which order those of one priority are served."""

    FAIR = "fair"
    """The tenant least served first, by its weight; within a tenant as SHORTEST."""
    SHORTEST = "shortest"
    """Shortest uncached prefill first, with ageing, whoever sent it."""
    ARRIVAL = "arrival"
    """First come, first served."""
    STRICT = "strict"
    """The tenant least served first, first come within it, and nobody overtakes, as in the counters' paper."""

    @property
    def is_fair(self) -> bool:
        """Do counters count?"""
        return self in (HoldOrder.FAIR, HoldOrder.STRICT)


@dataclass(slots=True, eq=False)
class Waiter:
    """One call that waits, at most until `until`. Whoever made it sets `answer`, in the same turn of the event loop."""

    hold: "Hold"
    owner: Owner
    until: float
    answer: Callable[[Decision | HeadwayError], None] = lambda _outcome: None


@dataclass(slots=True, eq=False)
class Hold:
    """A request that waits. Several calls may wait for the same one: retries keep its place.

    `number` counts holds in the order in which they came; `held_bytes` is what its prompt takes.
    """

    work: Work
    waiters: list[Waiter] = field(default_factory=list)
    number: int = 0
    held_bytes: int = 0

    def join(self, owner: Owner, until: float) -> Waiter:
        """One more call waits; what will be reserved belongs to the latest of them."""
        waiter = Waiter(self, owner, until)
        self.waiters.append(waiter)
        self.work.owner = owner
        return waiter

    def leave(self, waiter: Waiter) -> bool:
        """A call waits no more; True if it did until now."""
        if waiter not in self.waiters:
            return False
        self.waiters.remove(waiter)
        if self.waiters:
            self.work.owner = self.waiters[-1].owner
        return True

    def settle(self, outcome: Decision | HeadwayError) -> None:
        """Tell everyone who waits."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.answer(outcome)


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How many holds there may be, and how much memory their prompts may take: of all tenants, and of each."""

    count: int = 10_000
    size_bytes: int = 1 << 30
    tenant_count: int = 2_500
    tenant_bytes: int = 256 << 20


DEFAULT_LIMITS: Final = HoldLimits()


@dataclass(slots=True)
class _Sum:
    """Holds counted."""

    count: int = 0
    size_bytes: int = 0

    def add(self, hold: Hold, sign: int) -> None:
        self.count += sign
        self.size_bytes += sign * hold.held_bytes


Line = dict[tuple[str, str, str], Hold]
"""A tenant's holds of one priority, in the order in which they came."""


class Holds:
    """All holds, by key, by priority and by tenant."""

    def __init__(self, limits: HoldLimits) -> None:
        self.limits = limits
        self.tenants: dict[str, int] = {}
        self._by_key: Line = {}
        self._bands: dict[int, dict[str, Line]] = {}
        self._all = _Sum()
        self._sums: dict[str, _Sum] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Hold]:
        """All of them: higher priority first, then first come."""
        for _, lines in self.bands():
            yield from sorted((hold for line in lines.values() for hold in line.values()), key=lambda h: h.number)

    def bands(self) -> list[tuple[int, Mapping[str, Line]]]:
        """What waits in each priority, the highest first: each tenant's line."""
        return sorted(self._bands.items(), key=lambda band: -band[0])

    def waiting_in(self, priority: int) -> Mapping[str, Line]:
        """The lines of one priority, by tenant."""
        return self._bands.get(priority, {})

    def find(self, key: tuple[str, str, str]) -> Hold | None:
        """The hold of this key."""
        return self._by_key.get(key)

    def add(self, hold: Hold) -> None:
        """Keep it, as the last of its priority and tenant."""
        request, key = hold.work.request, hold.work.key
        self._numbers += 1
        hold.number, hold.held_bytes = self._numbers, hold.work.held_bytes
        self._by_key[key] = hold
        self._bands.setdefault(request.priority, {}).setdefault(request.tenant, {})[key] = hold
        self._all.add(hold, 1)
        self._sums.setdefault(request.tenant, _Sum()).add(hold, 1)
        self.tenants[request.tenant] = self.tenants.get(request.tenant, 0) + 1

    def remove(self, hold: Hold) -> bool:
        """Let go of it; False if it was gone."""
        request, key = hold.work.request, hold.work.key
        if self._by_key.get(key) is not hold:
            return False
        lines = self._bands[request.priority]
        del self._by_key[key], lines[request.tenant][key]
        if not lines[request.tenant]:
            del lines[request.tenant]
        if not lines:
            del self._bands[request.priority]
        self._all.add(hold, -1)
        self._sums[request.tenant].add(hold, -1)
        self.tenants[request.tenant] -= 1
        if not self.tenants[request.tenant]:
            del self.tenants[request.tenant], self._sums[request.tenant]
        return True

    def make_room(self, work: Work) -> list[Hold] | None:
        """Which holds must go so that this one fits: the newest of best effort, for what has a higher priority.

        First its tenant's own limits, then those of all. None: it does not fit, whoever goes.
        """
        request, size, limits = work.request, work.held_bytes, self.limits
        own = self._sums.get(request.tenant, _NOTHING)
        victims = self._shed(request.priority, size, own, limits.tenant_count, limits.tenant_bytes, request.tenant)
        if victims is None:
            return None
        left = _Sum(self._all.count, self._all.size_bytes)
        for hold in victims:
            left.add(hold, -1)
        more = self._shed(request.priority, size, left, limits.count, limits.size_bytes, None, victims)
        return None if more is None else victims + more

    def overdue(self, now: float) -> list[Waiter]:
        """The calls whose time is over."""
        return [waiter for hold in self._by_key.values() for waiter in hold.waiters if waiter.until <= now]

    # Inside

    def _shed(
        self,
        priority: int,
        size: int,
        held: _Sum,
        count: int,
        size_bytes: int,
        tenant: str | None,
        gone: "list[Hold] | tuple[()]" = (),
    ) -> list[Hold] | None:
        """The holds that must go, of `tenant` if one is named, until one more of `size` bytes fits the limits."""
        if held.count < count and held.size_bytes + size <= size_bytes:
            return []
        if priority <= BEST_EFFORT or count < 1 or size > size_bytes:
            return None
        left, victims = _Sum(held.count, held.size_bytes), list[Hold]()
        for hold in self._newest_best_effort(tenant):
            if hold in gone:
                continue
            victims.append(hold)
            left.add(hold, -1)
            if left.count < count and left.size_bytes + size <= size_bytes:
                return victims
        return None

    def _newest_best_effort(self, tenant: str | None) -> Iterator[Hold]:
        lines = self._bands.get(BEST_EFFORT, {})
        wanted = lines.values() if tenant is None else [lines.get(tenant, {})]
        return merge(*(reversed(line.values()) for line in wanted), key=lambda hold: -hold.number)


_NOTHING: Final = _Sum()
