"""Which soft guards are closed on each candidate, by compiled code. guards.py says what they mean."""

from typing import Final

import numpy as np
import numpy.typing as npt

from headway_scheduler.compiling import compiled
from headway_scheduler.fleet.columns import FloatColumn, IntColumn, Slots

__all__ = ["ROOM", "Marks", "is_calm", "mark_closed"]

Marks = npt.NDArray[np.uint8]
"""The guards that are closed, as bits, an entry a candidate."""
ROOM: Final = 128
"""The bit of a KV cache without room for the prompt."""


@compiled(
    "void(uint8[::1], float64[::1], float64[::1], int64[::1], int64[::1], float64[::1], float64[::1],"
    " int32[::1], float64[::1], int64, uint8[::1])"
)
def mark_closed(
    closed: npt.NDArray[np.uint8],
    kv_use: FloatColumn,
    kv_capacity: FloatColumn,
    kv_tokens: IntColumn,
    inflight: IntColumn,
    external: FloatColumn,
    ahead: FloatColumn,
    slots: Slots,
    hits: FloatColumn,
    prompt_tokens: int,
    found: npt.NDArray[np.uint8],
) -> None:
    """What is latched, and where the KV cache has no room. An idle endpoint has all the room it will ever have.

    `ahead`: requests tentatively placed, by slot; empty: none.
    """
    for number in range(len(slots)):
        slot = slots[number]
        mark = closed[slot]
        here = inflight[slot] + external[slot]
        if len(ahead):
            here += ahead[slot]
        if here > 0.0:
            capacity, booked = kv_capacity[slot], float(kv_tokens[slot])
            used = kv_use[slot] * capacity
            if used == used and used > booked:  # NaN, not itself: unknown
                booked = used
            if capacity - booked < prompt_tokens - hits[number]:
                mark |= ROOM
        found[number] = mark


@compiled("boolean(uint8[::1], float64[::1], float64[::1], int64[::1], float64, float64)")
def is_calm(
    closed: npt.NDArray[np.uint8],
    memory_pressure: FloatColumn,
    heat: FloatColumn,
    slots: IntColumn,
    pressure_close: float,
    heat_close: float,
) -> bool:
    """No guard is closed there, and none closes by pressure or heat."""
    for slot in slots:
        if closed[slot] or memory_pressure[slot] > pressure_close or heat[slot] > heat_close:
            return False
    return True
