"""The last ten minutes: what endpoints and the scheduler did, in a ring of samples.

One sample in five seconds, 120 in all; 8 bytes an endpoint and sample, so that 10,000 endpoints take 10 to 16 MB. A
sample is made for the fleet of its moment: a fleet that grows moves nothing.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
from headway_scheduler.app import Scheduler
from headway_scheduler.fleet.members import Endpoint

__all__ = ["SAMPLES", "SAMPLE_S", "History", "Totals"]

SAMPLE_S: Final = 5.0
SAMPLES: Final = 120
INFLIGHT: Final = 0
QUEUED_MS: Final = 1
KV_USE: Final = 2
HIT_RATIO: Final = 3
_METRICS: Final = 4
_MOST: Final = 60_000.0
"""A half-precision number holds no more than 65,504."""
_AT_ONCE: Final = 500
"""Endpoints looked at in one turn of the event loop: 0.5 ms."""

Half = npt.NDArray[np.float16]
_NAN: Final = float("nan")


@dataclass(frozen=True, slots=True)
class Totals:
    """The scheduler's counts at one moment; `at` is its clock, in seconds."""

    at: float
    routes: int
    holds: int
    inflight: int
    refusals: dict[str, int]


class History:
    """Samples one scheduler. Nothing is kept of an endpoint that is gone."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._samples: deque[Half] = deque(maxlen=SAMPLES)
        self._taken = 0
        self._since: dict[int, int] = {}
        self._counters: dict[int, tuple[float, float]] = {}
        self.totals: deque[Totals] = deque(maxlen=SAMPLES + 1)
        scheduler.fleet.on_removed.append(self._forget)

    @property
    def nbytes(self) -> int:
        """Memory of the samples."""
        return sum(each.nbytes for each in self._samples)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def sample(self) -> None:
        """Take one sample."""
        scheduler = self._scheduler
        columns = scheduler.fleet.columns
        row: Half = np.empty((_METRICS, columns.capacity), np.float16)
        row[INFLIGHT] = np.minimum(columns.inflight + columns.external, _MOST)
        row[QUEUED_MS] = np.minimum(columns.prefill_us / 1e3, _MOST)
        row[KV_USE] = columns.kv_use
        row[HIT_RATIO] = np.nan
        for number, endpoint in enumerate(list(scheduler.fleet.endpoints.values())):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            if endpoint.slot < row.shape[1]:  # the fleet may grow meanwhile
                row[HIT_RATIO, endpoint.slot] = self._hit_ratio(endpoint)
        unused = np.ones(row.shape[1], np.bool_)
        unused[[slot for slot in scheduler.fleet.by_slot if slot < row.shape[1]]] = False
        row[:, unused] = np.nan
        self._samples.append(row)
        self._taken += 1
        self.totals.append(self.now())

    def now(self) -> Totals:
        """The counts of this moment."""
        scheduler = self._scheduler
        return Totals(
            scheduler.clock(),
            scheduler.dispatcher.routes,
            len(scheduler.dispatcher.holds),
            len(scheduler.ledger.reservations),
            dict(scheduler.refusals),
        )

    def of(self, endpoint: Endpoint, metric: int) -> list[float]:
        """One endpoint's values, oldest first, NaN where unknown."""
        slot = endpoint.slot
        first = self._taken - len(self._samples)
        since = max(first, self._since.get(slot, 0))
        wanted = islice(self._samples, since - first, None)
        return _padded([each.item(metric, slot) if slot < each.shape[1] else _NAN for each in wanted])

    def route_rates(self) -> list[float]:
        """Routes a second between samples, oldest first."""
        return self._rates([float(each.routes) for each in self.totals])

    def refusal_rates(self, reason: str) -> list[float]:
        """Refusals a second between samples, of one reason."""
        return self._rates([float(each.refusals.get(reason, 0)) for each in self.totals])

    def holds(self) -> list[float]:
        """Routes held, at each sample."""
        return _padded([float(each.holds) for each in list(self.totals)[-SAMPLES:]])

    def routes_per_second(self) -> float | None:
        """Lately: since the last sample but one."""
        if len(self.totals) < 2:
            return None
        now, before = self.now(), self.totals[-2]
        return (now.routes - before.routes) / max(1e-9, now.at - before.at)

    def _rates(self, counts: list[float]) -> list[float]:
        times = [each.at for each in self.totals]
        pairs = zip(counts, counts[1:], times, times[1:], strict=False)
        return _padded([(after - before) / max(1e-9, then - at) for before, after, at, then in pairs])

    def _hit_ratio(self, endpoint: Endpoint) -> float:
        """Of the tokens looked up since the sample before."""
        now = endpoint.prefixes
        if now is None:
            return _NAN
        before = self._counters.get(endpoint.slot, now)
        self._counters[endpoint.slot] = now
        looked_up, found = now[0] - before[0], now[1] - before[1]
        return min(1.0, found / looked_up) if looked_up > 0 <= found else _NAN

    def _forget(self, endpoint: Endpoint) -> None:
        """What comes to its slot had no past there."""
        self._counters.pop(endpoint.slot, None)
        self._since[endpoint.slot] = self._taken


def _padded(values: list[float]) -> list[float]:
    return [_NAN] * (SAMPLES - len(values)) + values
