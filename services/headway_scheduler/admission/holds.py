"""Holds: Routes kept waiting in the scheduler until an endpoint is worth giving."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.request import Request, TextPrompt, TokensPrompt
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.ledger import Owner
from headway_scheduler.index.hashing import Chain
from headway_scheduler.index.kv import KvPrompt
from headway_scheduler.learning.timing import Flight

__all__ = ["Hold", "Holds", "Waiter", "Work"]


class Work(msgspec.Struct, eq=False):
    """A request being decided, with what is computed once for it. Times: scheduler clock, seconds.

    `identity` tells a retry from another request under the same id; None: not known. `kv_output` is the answer that
    memory is kept for; `weight` and `uncapped_weight` are the task's, fixed here; `flight` is what the cost model
    learns from; `ttft_ms` is as reported; `kv` is the prompt as engines' KV events know it, where any might;
    `least_prefill_ms` is its prefill on the best candidate, as last priced;
    `urgent`: it has waited so long that it goes before all others of its priority;
    `patient`: it may be held at all; `split`: which of its model's splits it was drawn for last;
    `retry`: it counts as a retry now (`Retries`).
    """

    request: Request
    owner: Owner
    identity: int | None
    chain: Chain
    submitted_at: float
    expected_output: float
    estimated_tokens: float
    kv_output: float
    weight: float
    uncapped_weight: float
    text_bytes: int = 0
    fingerprint: int | None = None
    kv: KvPrompt | None = None
    decision: Decision | None = None
    flight: Flight | None = None
    ttft_ms: float | None = None
    least_prefill_ms: float = 0.0
    urgent: bool = False
    patient: bool = True
    split: str = ""
    retry: bool = False

    @property
    def data(self) -> bytes:
        """The prompt's bytes, while they are kept: until it has its place."""
        prompt = self.request.prompt
        return prompt.data if isinstance(prompt, TextPrompt | TokensPrompt) else b""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes Route idempotent."""
        return (self.owner.principal, self.request.tenant, self.request.request_id)


@dataclass(slots=True, eq=False)
class Waiter:
    """One call that waits, at most until `until`. Whoever made it sets `answer`, in the same turn of the event loop."""

    hold: "Hold"
    owner: Owner
    until: float
    answer: Callable[[Decision | HeadwayError], None] = lambda _outcome: None


@dataclass(slots=True, eq=False)
class Hold:
    """A request that waits. Several calls may wait for the same one: retries keep its place."""

    work: Work
    waiters: list[Waiter] = field(default_factory=list)

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


class Holds:
    """All holds, by key, in the order of service: higher priority first, then first come."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tenants: dict[str, int] = {}
        self._by_key: dict[tuple[str, str, str], Hold] = {}
        self._bands: dict[int, dict[tuple[str, str, str], Hold]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Hold]:
        for priority in sorted(self._bands, reverse=True):
            yield from list(self._bands[priority].values())

    def in_order(self, rank: Callable[[Work], tuple[int, float]]) -> list[Hold]:
        """All of them, higher priority first, then by rank, then first come."""
        ordered: list[Hold] = []
        for priority in sorted(self._bands, reverse=True):
            ordered.extend(sorted(self._bands[priority].values(), key=lambda hold: rank(hold.work)))
        return ordered

    def find(self, key: tuple[str, str, str]) -> Hold | None:
        """The hold of this key."""
        return self._by_key.get(key)

    def add(self, hold: Hold) -> None:
        """Keep it, as the last of its priority."""
        request, key = hold.work.request, hold.work.key
        self._by_key[key] = hold
        self._bands.setdefault(request.priority, {})[key] = hold
        self.tenants[request.tenant] = self.tenants.get(request.tenant, 0) + 1

    def remove(self, hold: Hold) -> bool:
        """Let go of it; False if it was gone."""
        request, key = hold.work.request, hold.work.key
        if self._by_key.get(key) is not hold:
            return False
        del self._by_key[key], self._bands[request.priority][key]
        self.tenants[request.tenant] -= 1
        if not self.tenants[request.tenant]:
            del self.tenants[request.tenant]
        return True

    def overdue(self, now: float) -> list[Waiter]:
        """The calls whose time is over."""
        return [waiter for hold in self._by_key.values() for waiter in hold.waiters if waiter.until <= now]
