"""Fair share: weighted virtual-token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

A tenant's counter in an arena is the service it got there, over its weight:

    service = input·(prompt − cached) + cached·cached + output·answer          tokens, each with its weight

It is charged when a request is dispatched, on what is expected of it, and settled when it ends. Of those that wait, the
tenant with the least counter is next. One that begins to wait is lifted to the least counter of those that wait
already, or to what the counter of whoever was dispatched last was before that, if it was less (start-time fair
queueing, Goyal et al., 1996): it has no arrears, no debts of a time when nobody competed, and is not behind a tenant
that is always there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Final

from headway_scheduler.admission.holds import Hold
from headway_scheduler.admission.values import Charge, Work
from headway_scheduler.fleet.arenas import Arenas

__all__ = ["DEFAULT_WEIGHTS", "FairShare", "ServiceWeights", "Share"]

_ONE: Final = 1.0


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """What a token counts for: computed from the prompt, found in the cache, answered."""

    input: float = 1.0
    cached: float = 0.1
    output: float = 2.0

    def service(self, prompt: float, cached: float, output: float) -> float:
        """What a request gets, or got."""
        return self.input * max(0.0, prompt - cached) + self.cached * min(prompt, cached) + self.output * output


DEFAULT_WEIGHTS: Final = ServiceWeights()


@dataclass(slots=True)
class _Counters:
    """An arena's: by tenant; `floor` is where the last request dispatched began; `open`: charges not settled yet.

    `served` adds up what each got, settled, for people to see. `number` tells them from those of an arena of the same
    name that was there before: what was charged there is not settled here.
    """

    number: int
    by_tenant: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0
    open: int = 0
    served: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's standing in an arena: its weight, all service it got, and how far its counter is above the least."""

    arena: str
    tenant: str
    weight: float
    service: float
    ahead: float


class FairShare:
    """Every arena's counters. `arenas` tells who competes; `holds` are asked who waits. Nothing survives a restart."""

    def __init__(self, arenas: Callable[[], Arenas], weights: ServiceWeights | None = None) -> None:
        self.weights = weights or ServiceWeights()
        self._arenas = arenas
        self._counters: dict[str, _Counters] = {}
        self._made = 0

    # What happens to a request

    def expected(self, work: Work, cached: float) -> float:
        """The service that a request will probably get, with so much of its prompt cached."""
        return self.weights.service(work.request.prompt_tokens, cached, work.expected_output)

    def begin_to_wait(self, tenant: str, others: Iterable[str]) -> None:
        """A tenant that waited for nothing waits now, and `others` did already, in the same priority: lift it."""
        arena = self._arenas().by_tenant.get(tenant)
        if arena is not None:
            self._lift(arena.id, tenant, others)

    def charge(self, work: Work, slot: int, cached: float, *, waited: bool) -> None:
        """It is dispatched. `waited`: its tenant's place among others is settled, else it is lifted first."""
        arenas, tenant = self._arenas(), work.request.tenant
        if slot not in arenas.contested:
            return
        arena = arenas.by_tenant[tenant]
        counters = self._of(arena.id)
        by_tenant = counters.by_tenant
        start = by_tenant.get(tenant, counters.floor)
        if start < counters.floor and not waited:
            start = counters.floor
        service = self.expected(work, cached)
        by_tenant[tenant] = start + service / arena.weights.get(tenant, _ONE)
        if start > counters.floor:
            counters.floor = start
        counters.open += 1
        work.charge = Charge(arena.id, counters.number, service)

    def settle(self, work: Work, service: float | None) -> None:
        """It ended, having got so much; 0: it failed. None: nobody said what became of it, so as expected."""
        charge = work.charge
        if charge is None:
            return
        work.charge = None
        counters = self._counters.get(charge.arena)
        if counters is None or counters.number != charge.counters:
            return
        counters.open -= 1
        tenant, got = work.request.tenant, charge.service if service is None else service
        counters.served[tenant] = counters.served.get(tenant, 0.0) + got
        if got != charge.service:
            arena = self._arenas().by_tenant.get(tenant)
            weight = _ONE if arena is None else arena.weights.get(tenant, _ONE)
            before = counters.by_tenant.get(tenant, counters.floor)
            counters.by_tenant[tenant] = before + (got - charge.service) / weight

    # The order of those that wait

    def interleave(self, lines: Mapping[str, Sequence[Hold]]) -> Iterator[Hold]:
        """One line of all: of the tenant least served the first, as if each before it had been dispatched.

        Those that may only burst into where they compete come after all that may always be there.
        """
        by_tenant, found = self._arenas().by_tenant, []
        for number, (tenant, line) in enumerate(lines.items()):
            arena = by_tenant.get(tenant)
            if arena is None:
                yield from line  # it competes with nobody
                continue
            counters = self._of(arena.id)
            counter = counters.by_tenant.get(tenant, counters.floor)
            weight = arena.weights.get(tenant, _ONE)
            found.append((tenant in arena.yielding, counter, number, 0, weight, line))
        heapify(found)
        while found:
            yields, counter, number, place, weight, line = found[0]
            hold = line[place]
            if place + 1 < len(line):
                after = counter + self.expected(hold.work, hold.work.cached) / weight
                heapreplace(found, (yields, after, number, place + 1, weight, line))
            else:
                heappop(found)
            yield hold

    def is_behind(self, tenant: str, others: Iterable[str]) -> bool:
        """Does one of `others` that competes with this tenant come before it?"""
        by_tenant = self._arenas().by_tenant
        arena = by_tenant.get(tenant)
        if arena is None:
            return False
        counters = self._of(arena.id)
        found = counters.by_tenant
        mine = (tenant in arena.yielding, found.get(tenant, counters.floor))
        return any(
            (other in arena.yielding, found.get(other, counters.floor)) < mine
            for other in others
            if other != tenant and by_tenant.get(other) is arena
        )

    def arena_of(self, tenant: str) -> str | None:
        """Where a tenant competes."""
        arena = self._arenas().by_tenant.get(tenant)
        return None if arena is None else arena.id

    # What time does, and what people see

    def tidy(self, waiting: Iterable[str]) -> None:
        """Forget counters that say nothing any more: of tenants that wait for nothing and would be lifted anyway."""
        by_tenant = self._arenas().by_tenant
        waiting, members = set(waiting), dict[str, set[str]]()
        for tenant, arena in by_tenant.items():
            members.setdefault(arena.id, set()).add(tenant)
        busy: dict[str, list[str]] = {}
        for tenant in waiting:
            if (its := by_tenant.get(tenant)) is not None:
                busy.setdefault(its.id, []).append(tenant)
        for name, counters in list(self._counters.items()):
            competing = members.get(name, set())
            if not competing:
                del self._counters[name]
                continue
            counters.served = {t: served for t, served in counters.served.items() if t in competing}
            if not counters.open and name not in busy:
                counters.by_tenant, counters.floor = {}, 0.0
                continue
            floors = [counters.by_tenant.get(tenant, counters.floor) for tenant in busy.get(name, ())]
            least = min([counters.floor, *floors])
            counters.by_tenant = {
                tenant: counter
                for tenant, counter in counters.by_tenant.items()
                if tenant in waiting or (counter > least and tenant in competing)
            }

    def shares(self, most: int = 1_000_000) -> list[Share]:
        """The standing of tenants that compete, those with most service first."""
        found, leasts = [], dict[str, float]()
        for tenant, arena in self._arenas().by_tenant.items():
            counters = self._of(arena.id)
            if (least := leasts.get(arena.id)) is None:
                least = leasts[arena.id] = min(counters.by_tenant.values(), default=counters.floor)
            ahead = max(0.0, counters.by_tenant.get(tenant, least) - least)
            weight = arena.weights.get(tenant, _ONE)
            found.append(Share(arena.id, tenant, weight, counters.served.get(tenant, 0.0), ahead))
        return sorted(found, key=lambda share: -share.service)[:most]

    def __len__(self) -> int:
        """Counters kept."""
        return sum(len(counters.by_tenant) for counters in self._counters.values())

    # Inside

    def _of(self, arena: str) -> _Counters:
        counters = self._counters.get(arena)
        if counters is None:
            self._made += 1
            counters = self._counters[arena] = _Counters(self._made)
        return counters

    def _lift(self, arena: str, tenant: str, others: Iterable[str]) -> None:
        counters, by_tenant = self._of(arena), self._arenas().by_tenant
        found = counters.by_tenant
        floor = counters.floor
        waiting = [found.get(t, floor) for t in others if (a := by_tenant.get(t)) is not None and a.id == arena]
        least = min([floor, *waiting])
        found[tenant] = max(found.get(tenant, least), least)
