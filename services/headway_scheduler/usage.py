"""What tenants consumed and is not stored yet: added up by the minute, and stored in batches, each exactly once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from headway_scheduler.domain.usage import Usage
from headway_scheduler.store.base import UsageStore

__all__ = ["UsageLog"]

_Key = tuple[str, str, datetime]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows under an id that the store knows them by, should they be sent again."""

    id: str
    rows: Sequence[Usage]


class UsageLog:
    """Collects usage between two flushes. `prefix` makes its batches' ids unique among schedulers and their starts."""

    def __init__(self, prefix: str, wall: Callable[[], datetime]) -> None:
        self._prefix, self._wall = prefix, wall
        self._rows: dict[_Key, Usage] = {}
        self._sent: _Batch | None = None
        self._count = 0

    def __len__(self) -> int:
        """Rows that are not known to be stored."""
        return len(self._rows) + (len(self._sent.rows) if self._sent else 0)

    def add(self, tenant: str, model: str, **amounts: int) -> None:
        """Add amounts (`requests=1, prompt_tokens=100`) to this minute."""
        minute = self._wall().replace(second=0, microsecond=0)
        key, row = (tenant, model, minute), Usage(tenant, model, minute, **amounts)
        before = self._rows.get(key)
        self._rows[key] = row if before is None else before.plus(row)

    async def flush(self, store: UsageStore) -> None:
        """Store what is collected. What fails or is cancelled is sent again as it was by the next flush."""
        while self._sent is not None or self._rows:
            if self._sent is None:
                self._count += 1
                self._sent, self._rows = _Batch(f"{self._prefix}{self._count}", list(self._rows.values())), {}
            sent = self._sent
            await store.record_usage(sent.rows, sent.id)
            if self._sent is sent:  # another flush at the same time may be on its way with the next already
                self._sent = None
