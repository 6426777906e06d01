"""The record: the newest decisions and refusals, bounded by count and by bytes."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Final

from headway_scheduler.record.entry import REFUSED, Entry

__all__ = ["ENTRY_BYTES", "EVERYTHING", "Filter", "Record", "RecordConfig"]

ENTRY_BYTES: Final = 2048
"""What one entry takes without its table, at most: ids are bounded."""


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """`entries`: so many decisions, and as many refusals. `size_bytes`: of all of it; tables of the oldest go first."""

    entries: int = 10_000
    size_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Filter:
    """Every part that is set must match. `endpoint` is an id, chosen or served by. `outcome`: see Entry, or `refused`.

    `tenants` None: all; `since` is a Unix time.
    """

    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    outcome: str = ""
    refused: bool | None = None
    since: float = 0.0
    tenants: frozenset[str] | None = None

    def takes(self, entry: Entry) -> bool:
        """Does it match? All but its time."""
        request = entry.request
        return (
            (not self.tenant or request.tenant == self.tenant)
            and (not self.model or request.model == self.model)
            and (not self.endpoint or self.endpoint in (entry.endpoint, entry.served_by))
            and (not self.outcome or entry.outcome == self.outcome)
            and (self.refused is None or (entry.refusal is not None) is self.refused)
            and (self.tenants is None or request.tenant in self.tenants)
        )


EVERYTHING: Final = Filter()


class Record:
    """Two rings, so that a flood of refusals leaves the decisions be. All live on one event loop: no locks."""

    def __init__(self, config: RecordConfig | None = None) -> None:
        config = config or RecordConfig()
        self.entries = max(0, min(config.entries, config.size_bytes // (2 * ENTRY_BYTES)))
        self._most_table_bytes = max(0, config.size_bytes - 2 * ENTRY_BYTES * self.entries)
        self._decisions: deque[Entry] = deque()
        self._refusals: deque[Entry] = deque(maxlen=self.entries)
        self._with_table: deque[Entry] = deque()
        self._table_bytes = 0
        self.dropped_tables = 0
        """Tables that were let go while their entries stayed."""

    def __len__(self) -> int:
        return len(self._decisions) + len(self._refusals)

    @property
    def size_bytes(self) -> int:
        """What it takes, at most."""
        return len(self) * ENTRY_BYTES + self._table_bytes

    # Written by the recorder

    def add(self, entry: Entry) -> None:
        """Remember a decision."""
        entries = self._decisions
        entries.append(entry)
        table = entry.table
        if table is not None:
            self._with_table.append(entry)
            self._table_bytes += table.size_bytes
            while self._table_bytes > self._most_table_bytes:
                self._drop_table()
                self.dropped_tables += 1
        if len(entries) > self.entries and entries.popleft().table is not None:
            self._drop_table()  # both are in the same order: it is the oldest

    def add_refusal(self, entry: Entry) -> None:
        """Remember a refusal."""
        self._refusals.append(entry)

    # Read by whoever asks

    def newest(self, limit: int, wanted: Filter = EVERYTHING, before: int | None = None) -> list[Entry]:
        """At most so many that `wanted` takes, newest first; `before`: those with a smaller number."""
        return list(islice(self._matching(wanted, before), limit))

    def after(self, number: int) -> list[Entry]:
        """Those with a greater number, oldest first."""
        found = []
        for entry in self._newest_first():
            if entry.number <= number:
                break
            found.append(entry)
        found.reverse()
        return found

    def find(self, name: str, wanted: Filter = EVERYTHING) -> Entry | None:
        """The newest with this request id or reservation id."""
        for entry in self._newest_first():
            if name in (entry.request.request_id, entry.reservation_id) and wanted.takes(entry):
                return entry
        return None

    # Inside

    def _matching(self, wanted: Filter, before: int | None) -> Iterator[Entry]:
        for entry in self._newest_first(None if wanted.outcome == "" else wanted.outcome == REFUSED):
            if entry.at < wanted.since:
                return
            if (before is None or entry.number < before) and wanted.takes(entry):
                yield entry

    def _newest_first(self, refused: bool | None = None) -> Iterable[Entry]:
        if refused is not None:
            return reversed(self._refusals if refused else self._decisions)
        return merge(reversed(self._decisions), reversed(self._refusals), key=lambda entry: -entry.number)

    def _drop_table(self) -> None:
        entry = self._with_table.popleft()
        if entry.table is not None:
            self._table_bytes -= entry.table.size_bytes
            entry.table = None
