"""What the scheduler needs of a store. Only domain types cross this line.

Each write is one transaction: it checks, writes, appends to the audit trail, remembers the answer under its request
id, and notifies every scheduler. `Write` carries what all writes share.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headway_scheduler.domain.desired import (
    AuditEntry,
    Binding,
    Credential,
    DesiredState,
    GpuGroup,
    Model,
    StrategyBinding,
    StrategyConfig,
    StrategyRevision,
    Tenant,
)
from headway_scheduler.domain.endpoint import SchedulingState

__all__ = ["DesiredStore", "LearnedStore", "Resource", "Write"]

Resource = Tenant | GpuGroup | Binding | Model | StrategyConfig | StrategyBinding | Credential
R = TypeVar("R", bound=Resource)


@dataclass(frozen=True, slots=True)
class Write:
    """Who writes, by which method, under which request id, and whether only to check."""

    principal: str
    method: str
    request_id: str = ""
    validate_only: bool = False


class DesiredStore(Protocol):
    """Desired state. Every method may raise StoreDown; `save` and `delete` raise what they name."""

    async def load(self) -> DesiredState:
        """The whole desired state, as one consistent snapshot."""
        ...

    def changes(self) -> AsyncIterator[int]:
        """Versions of the desired state as any process commits them. Reconnects by itself, and yields after it."""
        ...

    async def create(self, resource: R, write: Write) -> R:
        """Add a resource. Raises DuplicateName, UnknownResource (something it refers to), InvalidField."""
        ...

    async def update(self, resource: R, write: Write, *, etag: str = "", allow_missing: bool = False) -> R:
        """Replace a resource. Raises UnknownResource, StaleEtag, InvalidField. A strategy gains a revision."""
        ...

    async def delete(
        self, kind: type[Resource], key: str, write: Write, *, etag: str = "", force: bool = False
    ) -> None:
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

    async def audit(self, *, before_id: int | None, limit: int) -> Sequence[AuditEntry]:
        """Audit entries with an id below `before_id`, newest first."""
        ...


class LearnedStore(Protocol):
    """State that strategies and models learned, as JSON by key."""

    async def load_learned(self) -> Mapping[str, bytes]:
        """Everything saved, by key."""
        ...

    async def save_learned(self, states: Mapping[str, bytes]) -> None:
        """Replace the states under these keys."""
        ...
