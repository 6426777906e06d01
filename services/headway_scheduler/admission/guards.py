"""Soft guards: what forbids dispatch to an endpoint for now. Each has hysteresis and a dwell, so that none flaps.

They are looked at when telemetry comes, not at each decision: a decision reads one number an endpoint. Hard guards are
the fleet's (`Fleet.hard_guards`): they take an endpoint out before any strategy prices it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from headway_scheduler.fleet.columns import Columns
from headway_scheduler.fleet.fleet import Endpoint
from headway_scheduler.strategies.base import SoftGuard, View

__all__ = ["GuardConfig", "SoftGuards"]

BoolColumn = npt.NDArray[np.bool_]

_BITS: Final = {
    SoftGuard.MEMORY_PRESSURE: 1,
    SoftGuard.HEAT: 2,
    SoftGuard.THROTTLE: 4,
    SoftGuard.POWER_BRAKE: 8,
}
"""The latched ones. KV room is not among them: it depends on the request."""
_PRESSED, _HOT, _THROTTLED, _BRAKED = _BITS.values()
_BRAKE: Final = "power_brake"


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
        self._on = _sum(frozenset(_BITS) - self._config.off)
        self._room = SoftGuard.KV_ROOM not in self._config.off

    # When telemetry comes

    def look(self, endpoint: Endpoint, now: float) -> None:
        """A sample of this endpoint was applied to the columns: close at once, open after the dwell."""
        slot, columns, config = endpoint.slot, self._columns, self._config
        self._grow()
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

    def forget(self, slot: int) -> None:
        """Its endpoint is gone: the next one there starts with open guards."""
        self._grow()
        self._closed[slot] = 0
        for bit in _BITS.values():
            self._records.pop((slot, bit), None)

    # When a decision is made

    def blocked(self, guards: frozenset[SoftGuard], view: View, prompt_tokens: int) -> dict[SoftGuard, BoolColumn]:
        """For each guard in `guards`, which of the view's candidates it forbids now to a prompt of so many tokens."""
        self._grow()
        closed = self._closed.take(view.slots)
        found: dict[SoftGuard, BoolColumn] = {
            guard: (closed & bit).astype(np.bool_) for guard, bit in _BITS.items() if guard in guards
        }
        if SoftGuard.KV_ROOM in guards and self._room:
            found[SoftGuard.KV_ROOM] = _lacks_room(view, prompt_tokens)
        return found

    def forbidden(self, guards: frozenset[SoftGuard], view: View, prompt_tokens: int) -> BoolColumn:
        """Which of the view's candidates any guard in `guards` forbids now."""
        found: BoolColumn
        if self._records and guards:
            self._grow()
            found = (self._closed.take(view.slots) & _sum(guards)).astype(np.bool_)
        else:
            found = np.zeros(len(view), np.bool_)
        if SoftGuard.KV_ROOM in guards and self._room:
            found |= _lacks_room(view, prompt_tokens)
        return found

    def forbids(self, guards: frozenset[SoftGuard], view: View, position: int, prompt_tokens: int) -> bool:
        """Does any guard in `guards` forbid this one candidate, for which nobody waits?"""
        slot = view.slots.item(position)
        if self._records and slot < len(self._closed) and self._closed.item(slot) & _sum(guards):
            return True
        c = self._columns
        if SoftGuard.KV_ROOM not in guards or not self._room:
            return False
        if not c.inflight.item(slot) + c.external.item(slot) > 0.0:
            return False
        capacity, booked = c.kv_capacity.item(slot), float(c.kv_tokens.item(slot))
        used = c.kv_use.item(slot) * capacity
        room = capacity - (max(used, booked) if used == used else booked)  # NaN, not itself: unknown
        return bool(room < prompt_tokens - view.hit_tokens[position])

    # For people

    def peek(self, guards: frozenset[SoftGuard], slot: int) -> list[SoftGuard]:
        """Which of `guards` are closed on `slot`; KV room depends on a request."""
        return [guard for guard, bit in _BITS.items() if guard in guards and (slot, bit) in self._records]

    def detail(self, guard: SoftGuard, slot: int) -> str:
        """What closed a guard on `slot`: the device or the cache, its value and the limit; empty: it is open."""
        record = self._records.get((slot, _BITS.get(guard, 0)))
        return "" if record is None else record.detail

    def details(self, slot: int) -> dict[str, str]:
        """The same for each that is closed there, by name."""
        return {
            guard.value: self._records[slot, bit].detail for guard, bit in _BITS.items() if (slot, bit) in self._records
        }

    # Inside

    def _latch(self, endpoint: Endpoint, closed: int, found: int, now: float) -> int:
        slot = endpoint.slot
        for guard, bit in _BITS.items():
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


def _sum(guards: Iterable[SoftGuard]) -> int:
    return sum(_BITS.get(guard, 0) for guard in guards)


def _lacks_room(view: View, prompt_tokens: int) -> BoolColumn:
    # An idle endpoint has all the room it will ever have.
    need = prompt_tokens - view.hit_tokens
    found: BoolColumn = (view.kv_room_tokens < need) & (view.inflight > 0)
    return found
