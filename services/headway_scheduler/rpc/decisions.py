"""Remembered decisions over the wire: listed, shown, watched."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from headway.fleet.v1 import fleet_pb2 as pb

from headway_scheduler.domain.desired import Principal
from headway_scheduler.errors import InvalidField, UnknownResource
from headway_scheduler.record.entry import Entry
from headway_scheduler.record.ring import Filter, Record
from headway_scheduler.rpc.convert.decisions import entry_to_proto, filter_from_proto
from headway_scheduler.rpc.paging import check_size, make_token, read_number

__all__ = ["Decisions"]

_INTERVAL_S: Final = 0.25
_MOST_A_MESSAGE: Final = 500
"""Decisions in one message of a watch; of more in one interval the newest are sent, and the others are lost."""
_MOST_OPEN: Final = 5_000
"""Decisions of which a watch still waits for the outcome."""
_GOLDEN: Final = 0x9E3779B97F4A7C15
_SPACE: Final = 1 << 64


class Decisions:
    """Answers from one record. It reads when asked: a watch looks four times a second, and costs a decision nothing."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def list_page(self, request: pb.ListDecisionsRequest, principal: Principal) -> pb.ListDecisionsResponse:
        """A page, newest first. A token means "before this number": what is decided meanwhile moves nothing."""
        size = check_size(request.page_size)
        wanted = filter_from_proto(request.filter, principal)
        listing = f"decisions {request.filter.SerializeToString(deterministic=True).hex()}"
        before = read_number(listing, request.page_token)
        found = self._record.newest(size + 1, wanted, before)
        page = found[:size]
        token = make_token(listing, str(page[-1].number)) if len(found) > size else ""
        return pb.ListDecisionsResponse(decisions=[entry_to_proto(each) for each in page], next_page_token=token)

    def get(self, request: pb.GetDecisionRequest, principal: Principal) -> pb.GetDecisionResponse:
        """One of them, whole. Raises UnknownResource: also of what this principal may not see."""
        if not request.id:
            raise InvalidField("id", "is required")
        entry = self._record.find(request.id, filter_from_proto(pb.DecisionFilter(), principal))
        if entry is None:
            raise UnknownResource(f"decisions/{request.id}", "id")
        return pb.GetDecisionResponse(decision=entry_to_proto(entry, whole=True))

    async def watch(
        self, request: pb.WatchDecisionsRequest, principal: Principal
    ) -> AsyncIterator[pb.WatchDecisionsResponse]:
        """What is decided from now on."""
        if not 0.0 <= request.share <= 1.0:
            raise InvalidField("share", "must be within 0 and 1")
        watch = _Watch(self._record, filter_from_proto(request.filter, principal), request.share or 1.0)
        while True:
            await asyncio.sleep(_INTERVAL_S)
            response = watch.news(outcomes=request.outcomes)
            if response.decisions or response.lost:
                yield response


class _Watch:
    """Where one reader stands. While it does not read, it is not asked for news: what it misses by that is counted."""

    def __init__(self, record: Record, wanted: Filter, share: float) -> None:
        self._record, self._wanted = record, wanted
        self._limit = int(share * _SPACE)
        newest = record.newest(1)
        self._seen = newest[0].number if newest else 0
        self._open: dict[int, Entry] = {}

    def news(self, *, outcomes: bool) -> pb.WatchDecisionsResponse:
        """What was decided since the last look, and, if wanted, what ended."""
        fresh = self._record.after(self._seen)
        lost = 0
        if fresh:
            lost = max(0, fresh[-1].number - self._seen - len(fresh))  # the ring went on without us
            self._seen = fresh[-1].number
        fresh = [entry for entry in fresh if self._wanted.takes(entry) and self._sampled(entry)]
        lost += max(0, len(fresh) - _MOST_A_MESSAGE)
        fresh = fresh[-_MOST_A_MESSAGE:]
        ended = [entry for entry in self._open.values() if entry.is_over]
        for entry in ended:
            del self._open[entry.number]
        if outcomes:
            self._open.update((entry.number, entry) for entry in fresh if not entry.is_over)
            while len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
        return pb.WatchDecisionsResponse(decisions=[entry_to_proto(each) for each in (*ended, *fresh)], lost=lost)

    def _sampled(self, entry: Entry) -> bool:
        return entry.number * _GOLDEN % _SPACE < self._limit
