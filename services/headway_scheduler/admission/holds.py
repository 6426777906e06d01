"""Holds: Routes kept waiting in the scheduler until an endpoint is worth giving."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.request import Request
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.ledger import Owner
from headway_scheduler.index.hashing import Chain

__all__ = ["Hold", "Holds", "Work"]

Waiter = Callable[[Decision | HeadwayError], None]


@dataclass(slots=True, eq=False)
class Work:
    """A request being decided, with what is computed once for it. Times: scheduler clock, seconds."""

    request: Request
    owner: Owner
    chain: Chain
    submitted_at: float
    expected_output: float
    estimated_tokens: float
    fingerprint: int | None = None
    decision: Decision | None = None
    queue_was_empty: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes Route idempotent."""
        return (self.owner.principal, self.request.tenant, self.request.request_id)

    @property
    def identity(self) -> tuple[str, int, int]:
        """Tells a retry from another request under the same id."""
        hashes = self.chain.hashes
        return (self.request.model, self.request.prompt_tokens, hashes[-1] if hashes else 0)


@dataclass(slots=True, eq=False)
class Hold:
    """A request that waits. Several calls may wait for the same one: retries keep its place."""

    work: Work
    deadline: float
    waiters: list[Waiter] = field(default_factory=list)

    def settle(self, outcome: Decision | HeadwayError) -> None:
        """Tell everyone who waits."""
        for waiter in self.waiters:
            waiter(outcome)


class Holds:
    """All holds, by key, in the order of service: higher priority first, then first come."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_key: dict[tuple[str, str, str], Hold] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Hold]:
        return iter(sorted(self._by_key.values(), key=lambda h: (-h.work.request.priority, h.work.submitted_at)))

    def find(self, key: tuple[str, str, str]) -> Hold | None:
        """The hold of this key."""
        return self._by_key.get(key)

    def add(self, hold: Hold) -> None:
        """Keep it."""
        self._by_key[hold.work.key] = hold

    def remove(self, hold: Hold) -> bool:
        """Let go of it; False if it was gone."""
        return self._by_key.pop(hold.work.key, None) is not None

    def overdue(self, now: float) -> list[Hold]:
        """Those whose time is over."""
        return [hold for hold in self._by_key.values() if hold.deadline <= now]
