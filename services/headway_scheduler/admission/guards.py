"""Soft guards: what forbids dispatch to an endpoint for now. Each has hysteresis, so that none flaps.

Hard guards are the fleet's (`Fleet.hard_guards`): they take an endpoint out before any strategy prices it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway_scheduler.fleet.columns import Columns, FloatColumn, Slots
from headway_scheduler.strategies.base import SoftGuard, View

__all__ = ["GuardConfig", "SoftGuards"]

BoolColumn = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """Where each guard closes and where it opens again. Pressure 0 to 1; heat over the slowdown temperature."""

    pressure_close: float = 0.80
    pressure_open: float = 0.75
    heat_close: float = 1.0
    heat_open: float = 0.95


class SoftGuards:
    """Remembers, for each slot, which guards are closed."""

    def __init__(self, columns: Columns, config: GuardConfig | None = None) -> None:
        self._columns = columns
        self._config = config or GuardConfig()
        self._pressed = _Latch(columns.capacity, self._config.pressure_close, self._config.pressure_open)
        self._hot = _Latch(columns.capacity, self._config.heat_close, self._config.heat_open)

    def blocked(self, guards: frozenset[SoftGuard], view: View, prompt_tokens: int) -> dict[SoftGuard, BoolColumn]:
        """For each guard in `guards`, which of the view's candidates it forbids now to a prompt of so many tokens."""
        self._latch(guards, view)
        found: dict[SoftGuard, BoolColumn] = {}
        if SoftGuard.MEMORY_PRESSURE in guards:
            found[SoftGuard.MEMORY_PRESSURE] = self._pressed.closed.take(view.slots)
        if SoftGuard.HEAT in guards:
            found[SoftGuard.HEAT] = self._hot.closed.take(view.slots) | view.read(self._columns.throttled)
        if SoftGuard.KV_ROOM in guards:
            # An idle endpoint has all the room it will ever have.
            need = prompt_tokens - view.hit_tokens
            found[SoftGuard.KV_ROOM] = (view.kv_room_tokens < need) & (view.inflight > 0)
        return found

    def forbidden(self, guards: frozenset[SoftGuard], view: View, prompt_tokens: int) -> BoolColumn:
        """Which of the view's candidates any guard in `guards` forbids now."""
        found = np.zeros(len(view), np.bool_)
        for each in self.blocked(guards, view, prompt_tokens).values():
            found |= each
        return found

    def forbids(self, guards: frozenset[SoftGuard], view: View, position: int, prompt_tokens: int) -> bool:
        """Does any guard in `guards` forbid this one candidate, for which nobody waits? Looks at all, as `blocked`."""
        self._latch(guards, view)
        slot = view.slots.item(position)
        if SoftGuard.MEMORY_PRESSURE in guards and self._pressed.closed[slot]:
            return True
        if SoftGuard.HEAT in guards and (self._hot.closed[slot] or self._columns.throttled[slot]):
            return True
        c = self._columns
        if SoftGuard.KV_ROOM not in guards or not c.inflight.item(slot) + c.external.item(slot) > 0.0:
            return False
        capacity, booked = c.kv_capacity.item(slot), float(c.kv_tokens.item(slot))
        used = c.kv_use.item(slot) * capacity
        room = capacity - (max(used, booked) if used == used else booked)  # NaN, not itself: unknown
        return bool(room < prompt_tokens - view.hit_tokens[position])

    def peek(self, guards: frozenset[SoftGuard], slot: int) -> list[SoftGuard]:
        """Which of `guards` are closed on `slot` as they were last evaluated; KV room depends on a request."""
        self._grow()
        found = []
        if SoftGuard.MEMORY_PRESSURE in guards and self._pressed.closed[slot]:
            found.append(SoftGuard.MEMORY_PRESSURE)
        if SoftGuard.HEAT in guards and (self._hot.closed[slot] or self._columns.throttled[slot]):
            found.append(SoftGuard.HEAT)
        return found

    def forget(self, slot: int) -> None:
        """Its endpoint is gone: the next one there starts with open guards."""
        self._grow()
        self._pressed.closed[slot] = self._hot.closed[slot] = False

    def _latch(self, guards: frozenset[SoftGuard], view: View) -> None:
        """Look at all candidates."""
        self._grow()
        if SoftGuard.MEMORY_PRESSURE in guards:
            self._pressed.look(view.slots, view.read(self._columns.memory_pressure))
        if SoftGuard.HEAT in guards:
            self._hot.look(view.slots, view.read(self._columns.heat))

    def _grow(self) -> None:
        if len(self._hot.closed) < self._columns.capacity:
            self._pressed.grow(self._columns.capacity)
            self._hot.grow(self._columns.capacity)


class _Latch:
    """Closes above `close`, opens at or below `reopen`, else stays; unknown is open."""

    def __init__(self, capacity: int, close: float, reopen: float) -> None:
        self.closed = np.zeros(capacity, np.bool_)
        self._close, self._reopen = close, reopen
        self._any = False

    def look(self, slots: Slots, values: FloatColumn) -> None:
        if not self._any and not np.fmax.reduce(values) > self._close:
            return  # as nearly always
        self.closed[slots] = (values > self._close) | (self.closed[slots] & (values > self._reopen))
        self._any = bool(self.closed.any())

    def grow(self, capacity: int) -> None:
        self.closed = np.concatenate([self.closed, np.zeros(capacity - len(self.closed), np.bool_)])
