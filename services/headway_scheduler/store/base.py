"""What the scheduler needs of a store. Only domain types cross this line.

Each write is one transaction: it checks, writes, appends to the audit trail, remembers the answer under its request
id, and notifies every scheduler. `Write` carries what all writes share.
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol, TypeVar

from headway_scheduler.domain.desired import AuditEntry, DesiredState, StrategyRevision
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.resources import Resource
from headway_scheduler.domain.usage import Interval, Usage
from headway_scheduler.errors import StoreDown

__all__ = [
    "AdminStore",
    "DesiredStore",
    "LeaderLock",
    "LearnedStore",
    "Notified",
    "PostgresAbsent",
    "Resource",
    "Store",
    "Term",
    "UsageStore",
    "Write",
]

R = TypeVar("R", bound=Resource)


@dataclass(frozen=True, slots=True)
class Write:
    """Who writes, by which method, under which request id, and whether only to check.

    A `request_id` makes a retry by the same principal answer what the first try answered, for a day. `fingerprint`
    identifies the request's contents, so that an id used again for something else is refused.
    """

    principal: str
    method: str
    request_id: str = ""
    validate_only: bool = False
    fingerprint: str = ""


class Notified(StrEnum):
    """Does news of other processes' writes arrive at once?"""

    DELIVERED = "delivered"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """Not tried yet."""


class DesiredStore(Protocol):
    """Desired state. Every method may raise StoreDown; the others are named where they are raised."""

    async def load(self) -> DesiredState:
        """The whole desired state, as one consistent snapshot."""
        ...

    def changes(self) -> AsyncGenerator[int]:
        """Versions of the desired state as any process commits them. Reconnects by itself, and yields after it."""
        ...

    async def get(self, kind: type[R], key: str) -> R:
        """One resource as it is now. Raises UnknownResource."""
        ...

    async def recall(self, kind: type[R], write: Write) -> tuple[R | None] | None:
        """What an earlier try of this write answered (None inside: nothing, it deleted), or None: no earlier try.

        Raises InvalidField if the request id was used for something else.
        """
        ...

    async def create(self, resource: R, write: Write) -> R:
        """Add a resource. Raises DuplicateName, UnknownResource (something it refers to), InUse, InvalidField."""
        ...

    async def update(self, resource: R, write: Write, *, etag: str = "", allow_missing: bool = False) -> R:
        """Replace a resource. Raises UnknownResource, StaleEtag, InUse, InvalidField. A strategy gains a revision."""
        ...

    async def delete(self, kind: type[R], key: str, write: Write, *, etag: str = "", force: bool = False) -> None:
        """Remove a resource by id (a binding: `tenant/group`). Raises UnknownResource, StaleEtag, InUse."""
        ...

    async def strategy_revisions(self, strategy: str) -> Sequence[StrategyRevision]:
        """All revisions of a strategy, newest first. Raises UnknownResource."""
        ...

    async def set_node_state(self, node: str, state: SchedulingState, write: Write) -> None:
        """Cordon, drain or uncordon a node."""
        ...

    async def set_endpoint_state(self, endpoint: str, state: SchedulingState, write: Write) -> None:
        """Cordon, drain or uncordon an endpoint."""
        ...

    async def set_bypass(self, tenant: str, on: bool, write: Write) -> None:
        """Leave a tenant's requests alone, or everybody's (`EVERYBODY`), or no more."""
        ...

    async def audit(
        self,
        *,
        before_id: int | None,
        limit: int,
        principal: str = "",
        resource: str = "",
        since: datetime | None = None,
    ) -> Sequence[AuditEntry]:
        """Audit entries with an id below `before_id`, newest first; only those of a principal, a resource, a time.

        A resource stands for what is below it, too: `tenants/acme` for its bindings, `tenants` for all of them.
        """
        ...


class LearnedStore(Protocol):
    """State that strategies and models learned, as bytes by key. Every method may raise StoreDown."""

    async def load_learned(self) -> Mapping[str, bytes]:
        """Everything saved, by key."""
        ...

    async def save_learned(self, states: Mapping[str, bytes], *, epoch: int | None = None) -> None:
        """Replace the states under these keys. Raises Standby if `epoch` is not that of the leadership any more."""
        ...

    async def forget_learned(self, keys: Collection[str], *, epoch: int | None = None) -> None:
        """Remove these keys, where they are. Raises Standby if `epoch` is not that of the leadership any more."""
        ...

    async def keep_learned(self, key: str, state: bytes) -> bytes:
        """Save the state if there is none under this key; returns the one that is kept."""
        ...


class UsageStore(Protocol):
    """What tenants consumed. Every method may raise StoreDown."""

    async def record_usage(self, rows: Sequence[Usage], batch: str = "") -> None:
        """Add these amounts to what is recorded for their tenant, model and minute, all or nothing.

        A `batch` (an id) that was added within the last day adds nothing again: a lost answer may be tried again.
        """
        ...

    async def usage(
        self,
        *,
        since: datetime,
        until: datetime,
        tenant: str = "",
        model: str = "",
        interval: Interval = Interval.MINUTE,
        after: tuple[datetime, str, str] | None = None,
        limit: int | None = None,
    ) -> Sequence[Usage]:
        """Usage in minutes of [since, until), of one tenant and model or of all, added up by interval.

        By interval (of UTC), tenant and model; only what comes `after` such a key, and no more than `limit` of it.
        """
        ...

    async def forget_usage(self, before: datetime) -> int:
        """Delete the usage of earlier minutes; returns how many rows it was."""
        ...


class AdminStore(DesiredStore, UsageStore, Protocol):
    """What the Admin service reads and writes."""


@dataclass(frozen=True, slots=True)
class Term:
    """The lock, taken: an epoch above all before it, and how long its last holder may believe that it still leads."""

    epoch: int
    wait_s: float


class PostgresAbsent(StoreDown):
    """Postgres runs nowhere that it could: at this moment nobody can hold a lock."""


class LeaderLock(Protocol):
    """A lock that one scheduler holds. It is lost with its session, and the session with a lease of silence.

    Every method answers or raises StoreDown within a lease; PostgresAbsent where it proved to be down for everybody.
    """

    async def reach(self) -> None:
        """Look whether Postgres answers, and take nothing."""
        ...

    async def take(self) -> Term | None:
        """The lock; None: another session holds it."""
        ...

    async def renew(self) -> None:
        """Say that its holder lives. An answer shows that nobody else had it since `take`."""
        ...

    async def release(self) -> None:
        """Give it up, and let the next one take it without a wait."""
        ...

    async def close(self) -> None:
        """End the session, and with it the lock."""
        ...


class Store(DesiredStore, LearnedStore, UsageStore, Protocol):
    """All a scheduler needs."""

    @property
    def available(self) -> bool:
        """Did the latest attempt reach the database?"""
        ...

    @property
    def notified(self) -> Notified:
        """Does news of writes arrive at once?"""
        ...

    async def schema_revision(self) -> str:
        """The revision that the database is at. Raises StoreDown."""
        ...
