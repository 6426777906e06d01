"""What watches decisions: fills the record, counts for the metrics, and hands on to an export what is sampled.

It sits on the decision's path. It keeps references to what the decision made anyway and formats nothing.
"""

from collections.abc import Callable
from typing import Final, Protocol

from msgspec.structs import replace

from headway_scheduler.admission.values import Choice, Work
from headway_scheduler.core import Core
from headway_scheduler.domain.report import Finished
from headway_scheduler.domain.request import Request
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.ledger import EndCause
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.fleet.values import Reservation
from headway_scheduler.index.hashing import chain_of
from headway_scheduler.index.values import Chain
from headway_scheduler.metrics.counts import Counts
from headway_scheduler.record.entry import REFUSED, Entry, Refusal, Table
from headway_scheduler.record.ring import Record

__all__ = ["Recorder", "Sink", "observe"]

_COLUMNS: Final = 3
"""Floats a candidate that a strategy answers: cost, TTFT, prefill."""


class Sink(Protocol):
    """Takes what has ended, sampled."""

    def wants(self, request: Request) -> bool:
        """Is it in the sample?"""
        ...

    def take(self, entry: Entry, block_tokens: float, hashes: list[int]) -> None:
        """It has ended, or was refused. The prompt's blocks: tokens in each, and their chained hashes."""
        ...


class Recorder:
    """The dispatcher's observer. `sink` may be set at any time."""

    def __init__(
        self,
        record: Record,
        counts: Counts,
        fleet: Fleet,
        timer: Callable[[], float],
        wall: Callable[[], float],
        chain: Callable[[Request], Chain],
    ) -> None:
        """`chain` finds a prompt's, of a request that was refused."""
        self.record, self.counts, self.timer = record, counts, timer
        self.sink: Sink | None = None
        self.submitted = counts.decision.observe
        self._fleet, self._wall, self._chain = fleet, wall, chain
        self._number = 0
        self._names: list[str] | None = None
        self._keeps = record.entries > 0

    def decided(self, work: Work, choice: Choice, now: float) -> None:
        """Remember a decision."""
        request, decision = work.request, work.decision
        if decision is None:
            return
        self.counts.routed(request, decision)
        sink = self.sink
        sampled = sink is not None and sink.wants(request)
        if not self._keeps and not sampled:
            return
        if request.subset is not None or request.excluded:
            request = replace(request, subset=None, excluded=frozenset())  # whose size nobody bounds
        names = self._names
        if names is None:
            names = self._names = self._named()
        slots, hits = choice.slots, choice.hits
        size = 8 * (_COLUMNS * len(slots) + len(names)) + len(slots)
        table = Table(slots, hits, choice.priced.costs, choice.marks, choice.bits, names, choice.order[0], size)
        self._number = number = self._number + 1
        work.seen = entry = Entry(number, self._wall(), request, decision, choice.slot, table)
        if sampled:
            entry.chain = work.chain
        if self._keeps:
            self.record.add(entry)

    def refused(self, request: Request, error: HeadwayError, held_ms: float) -> None:
        """Remember a refusal."""
        self.counts.refused(request, error.reason)
        sink = self.sink
        sampled = sink is not None and sink.wants(request)
        if not self._keeps and not sampled:
            return
        bare = replace(request, prompt=None, subset=None, excluded=frozenset())
        self._number += 1
        at = self._wall()
        refusal = Refusal(error.reason, error.message[:500], error.retry_after_s, held_ms)
        entry = Entry(self._number, at, bare, refusal=refusal, outcome=REFUSED, ended_at=at)
        if sampled and sink is not None:
            chain = self._chain(request)
            sink.take(entry, chain.block_tokens, chain.hashes)
        if self._keeps:
            self.record.add_refusal(entry)

    def finished(self, reservation: Reservation, work: Work, report: Finished) -> None:
        """Remember how a request ended, as its data plane said."""
        ttft_ms = report.ttft_ms if work.ttft_ms is None else work.ttft_ms
        self.counts.ended(reservation, report, ttft_ms)
        entry = work.seen
        if not isinstance(entry, Entry):
            return
        entry.outcome, entry.usage = report.outcome, report.usage
        entry.ttft_ms, entry.duration_ms = ttft_ms, report.duration_ms
        self._close(entry, reservation)

    def ended(self, reservation: Reservation, cause: EndCause, now: float) -> None:
        """Remember that one ended without a report."""
        if cause == EndCause.REPORTED:
            return
        work = reservation.attachment
        self.counts.lost(reservation, cause)
        if isinstance(work, Work) and isinstance(work.seen, Entry):
            work.seen.outcome, work.seen.ttft_ms = cause, work.ttft_ms
            self._close(work.seen, reservation)

    def fleet_changed(self, _endpoint: Endpoint) -> None:
        """Slots may have other names from now on: what was decided keeps those that it saw."""
        self._names = None

    # Inside

    def _close(self, entry: Entry, reservation: Reservation) -> None:
        entry.ended_at = self._wall()
        slot = reservation.slot
        entry.served_by, entry.moved = self._fleet.by_slot[slot].id, slot != entry.slot
        chain = entry.chain
        if chain is not None and self.sink is not None:
            self.sink.take(entry, chain.block_tokens, chain.hashes)
            entry.chain = None  # the record outlives what an export needs

    def _named(self) -> list[str]:
        names = [""] * self._fleet.columns.capacity
        for slot, endpoint in self._fleet.by_slot.items():
            names[slot] = endpoint.id
        return names


def observe(
    core: Core, record: Record, counts: Counts, timer: Callable[[], float], wall: Callable[[], float]
) -> Recorder:
    """Have a core's decisions recorded and counted."""
    most_blocks = core.dispatcher.config.max_index_blocks

    def chain(request: Request) -> Chain:
        return chain_of(request, core.history.bytes_per_token(request.model), most_blocks)

    recorder = Recorder(record, counts, core.fleet, timer, wall, chain)
    core.fleet.on_announced.append(recorder.fleet_changed)
    core.fleet.on_removed.append(recorder.fleet_changed)
    core.ledger.on_end.append(recorder.ended)
    core.observe(recorder)
    return recorder
