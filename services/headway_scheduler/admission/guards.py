"""Soft guards: what forbids dispatch to an endpoint for now. Each has hysteresis and a dwell, so that none flaps.

They are looked at when telemetry comes, not at each decision: a decision reads one number an endpoint. Hard guards are
the fleet's (`Fleet.hard_guards`): they take an endpoint out before any strategy prices it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from headway_scheduler.admission.marking import ROOM, Marks, is_calm, mark_closed
from headway_scheduler.fleet.columns import Columns, IntColumn
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.strategies.base import SoftGuard
from headway_scheduler.strategies.view import View

__all__ = ["GuardConfig", "SoftGuards", "marked"]

_LATCHED: Final = {
    SoftGuard.MEMORY_PRESSURE: 1,
    SoftGuard.HEAT: 2,
    SoftGuard.THROTTLE: 4,
    SoftGuard.POWER_BRAKE: 8,
}
"""KV room is not among them: it depends on the request."""
_PRESSED, _HOT, _THROTTLED, _BRAKED = _LATCHED.values()
_BRAKE: Final = "power_brake"
_BITS: Final = {**_LATCHED, SoftGuard.KV_ROOM: ROOM}
"""All, as they stand in a mark."""
_NOBODY: Final = np.zeros(0)


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """Where each guard closes and where it opens again. Pressure 0 to 1; heat over the slowdown temperature.

    One opens when it has had no reason to be closed for `dwell_s` on end. `throttle_reasons`: those of NVML's that
    close; `off`: guards that never do.
    """

    pressure_close: float = 0.80
    pressure_open: float = 0.75
    heat_close: float = 1.0
    heat_open: float = 0.95
    dwell_s: float = 2.0
    throttle_reasons: frozenset[str] = frozenset({"hw_slowdown", "hw_thermal"})
    off: frozenset[SoftGuard] = frozenset()


@dataclass(slots=True)
class _Closed:
    """A closed guard: what closed it, and since when it has had no reason to be."""

    detail: str
    calm_since: float | None = None


class SoftGuards:
    """Remembers, for each slot, which guards are closed."""

    def __init__(self, columns: Columns, config: GuardConfig | None = None) -> None:
        self._columns = columns
        self._config = config or GuardConfig()
        self._closed = np.zeros(columns.capacity, np.uint8)
        self._records: dict[tuple[int, int], _Closed] = {}
        self._on = _sum(frozenset(_LATCHED) - self._config.off)
        self._bits: dict[frozenset[SoftGuard], int] = {}

    # When telemetry comes

    def look(self, endpoints: Iterable[Endpoint], slots: IntColumn, now: float) -> None:
        """A sample of these endpoints was applied to the columns: close at once, open after the dwell."""
        self._grow()
        columns, config = self._columns, self._config
        calm = is_calm(
            self._closed, columns.memory_pressure, columns.heat, slots, config.pressure_close, config.heat_close
        )
        for endpoint in endpoints:
            if not calm or endpoint.throttles:
                self._look(endpoint, now)

    def forget(self, slot: int) -> None:
        """Its endpoint is gone: the next one there starts with open guards."""
        self._grow()
        self._closed[slot] = 0
        for bit in _LATCHED.values():
            self._records.pop((slot, bit), None)

    # When a decision is made

    def marks(self, view: View, prompt_tokens: int) -> Marks:
        """Which guards are closed on each candidate to a prompt of so many tokens, as bits.

        Of all guards, whether a strategy heeds them or not: `bits` picks those that it does.
        """
        c, closed, tentative = self._columns, self._closed, view.tentative
        if len(closed) != len(c.inflight):
            self._grow()
            closed = self._closed
        found = np.empty(len(view.slots), np.uint8)
        ahead = _NOBODY if tentative is None else tentative.inflight
        mark_closed(
            closed,
            c.kv_use,
            c.kv_capacity,
            c.kv_tokens,
            c.inflight,
            c.external,
            ahead,
            view.slots,
            view.hit_tokens,
            prompt_tokens,
            found,
        )
        return found

    def bits(self, guards: frozenset[SoftGuard]) -> int:
        """What stands for `guards` in marks, without those that are off."""
        found = self._bits.get(guards)
        if found is None:
            found = self._bits[guards] = _sum(guards - self._config.off)
        return found

    # For people

    def peek(self, guards: frozenset[SoftGuard], slot: int) -> list[SoftGuard]:
        """Which of `guards` are closed on `slot`; KV room depends on a request."""
        return [guard for guard, bit in _LATCHED.items() if guard in guards and (slot, bit) in self._records]

    def detail(self, guard: SoftGuard, slot: int) -> str:
        """What closed a guard on `slot`: the device or the cache, its value and the limit; empty: it is open."""
        record = self._records.get((slot, _LATCHED.get(guard, 0)))
        return "" if record is None else record.detail

    def details(self, slot: int) -> dict[str, str]:
        """The same for each that is closed there, by name."""
        return {
            guard.value: self._records[slot, bit].detail
            for guard, bit in _LATCHED.items()
            if (slot, bit) in self._records
        }

    # Inside

    def _look(self, endpoint: Endpoint, now: float) -> None:
        slot, columns, config = endpoint.slot, self._columns, self._config
        closed: int = self._closed.item(slot)
        found = 0
        if columns.memory_pressure.item(slot) > (config.pressure_open if closed & _PRESSED else config.pressure_close):
            found |= _PRESSED
        if columns.heat.item(slot) > (config.heat_open if closed & _HOT else config.heat_close):
            found |= _HOT
        if endpoint.throttles:
            if not config.throttle_reasons.isdisjoint(endpoint.throttles):
                found |= _THROTTLED
            if _BRAKE in endpoint.throttles:
                found |= _BRAKED
        found &= self._on
        if found or closed:  # seldom
            self._closed[slot] = self._latch(endpoint, closed, found, now)

    def _latch(self, endpoint: Endpoint, closed: int, found: int, now: float) -> int:
        slot = endpoint.slot
        for guard, bit in _LATCHED.items():
            record = self._records.get((slot, bit))
            if found & bit:
                if record is None:
                    self._records[slot, bit] = _Closed(self._detail(guard, endpoint))
                    closed |= bit
                else:
                    record.calm_since = None
            elif record is not None:
                record.calm_since = now if record.calm_since is None else record.calm_since
                if now - record.calm_since >= self._config.dwell_s:
                    del self._records[slot, bit]
                    closed &= ~bit
        return closed

    def _detail(self, guard: SoftGuard, endpoint: Endpoint) -> str:
        if guard is SoftGuard.MEMORY_PRESSURE:
            pressure = self._columns.memory_pressure.item(endpoint.slot)
            of = "KV cache" if self._columns.kv_use.item(endpoint.slot) == pressure else "device memory"
            return f"{of} {pressure:.2f}, over {self._config.pressure_close:.2f}"
        if guard is SoftGuard.HEAT:
            hottest = endpoint.hottest()
            return f"{self._columns.heat.item(endpoint.slot):.2f} of the slowdown temperature: {hottest}"
        reasons = self._config.throttle_reasons if guard is SoftGuard.THROTTLE else {_BRAKE}
        return ", ".join(
            f"{device.uuid} {reason}"
            for device, sample in endpoint.readings()
            for reason in sample.throttle_reasons
            if reason in reasons
        )

    def _grow(self) -> None:
        missing = self._columns.capacity - len(self._closed)
        if missing:
            self._closed = np.concatenate([self._closed, np.zeros(missing, np.uint8)])


def marked(mark: int, bits: int) -> tuple[str, ...]:
    """The names of the guards that `bits` picks, of those that were closed in a mark."""
    return tuple(guard.value for guard, bit in _BITS.items() if mark & bits & bit)


def _sum(guards: Iterable[SoftGuard]) -> int:
    return sum(_BITS.get(guard, 0) for guard in guards)
