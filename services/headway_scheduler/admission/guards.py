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
        self._pressed = np.zeros(columns.capacity, np.bool_)
        self._hot = np.zeros(columns.capacity, np.bool_)

    def blocked(
        self, guards: frozenset[SoftGuard], view: View, need_tokens: FloatColumn
    ) -> dict[SoftGuard, BoolColumn]:
        """For each guard in `guards`, which of the view's candidates it forbids now."""
        found: dict[SoftGuard, BoolColumn] = {}
        self._grow()
        config, slots = self._config, view.slots
        if SoftGuard.MEMORY_PRESSURE in guards:
            values = view.memory_pressure
            found[SoftGuard.MEMORY_PRESSURE] = _latch(
                self._pressed, slots, values, config.pressure_close, config.pressure_open
            )
        if SoftGuard.HEAT in guards:
            latched = _latch(self._hot, slots, view.heat, config.heat_close, config.heat_open)
            found[SoftGuard.HEAT] = latched | self._columns.throttled[slots]
        if SoftGuard.KV_ROOM in guards:
            # An idle endpoint has all the room it will ever have.
            found[SoftGuard.KV_ROOM] = (view.kv_room_tokens < need_tokens) & (view.inflight > 0)
        return found

    def peek(self, guards: frozenset[SoftGuard], slot: int) -> list[SoftGuard]:
        """Which of `guards` are closed on `slot` as they were last evaluated; KV room depends on a request."""
        self._grow()
        found = []
        if SoftGuard.MEMORY_PRESSURE in guards and self._pressed[slot]:
            found.append(SoftGuard.MEMORY_PRESSURE)
        if SoftGuard.HEAT in guards and (self._hot[slot] or self._columns.throttled[slot]):
            found.append(SoftGuard.HEAT)
        return found

    def forget(self, slot: int) -> None:
        """Its endpoint is gone: the next one there starts with open guards."""
        self._grow()
        self._pressed[slot] = self._hot[slot] = False

    def _grow(self) -> None:
        missing = self._columns.capacity - len(self._hot)
        if missing > 0:
            self._pressed = np.concatenate([self._pressed, np.zeros(missing, np.bool_)])
            self._hot = np.concatenate([self._hot, np.zeros(missing, np.bool_)])


def _latch(state: BoolColumn, slots: Slots, values: FloatColumn, close: float, reopen: float) -> BoolColumn:
    """Close above `close`, open at or below `reopen`, else stay; unknown is open."""
    now: BoolColumn = (values > close) | (state[slots] & (values > reopen))
    state[slots] = now
    return now
