"""Which candidates come first, compiled: only the best few are ever wanted, so nothing is sorted."""

import numpy as np
import numpy.typing as npt

from headway_scheduler.compiling import compiled
from headway_scheduler.fleet.columns import FloatColumn, IntColumn, Slots

__all__ = ["first"]

BoolColumn = npt.NDArray[np.bool_]


@compiled(
    "int64[::1](int64, boolean[::1], float64[::1], int64[::1], float64[::1], float64[::1], int64[::1], int32[::1])"
)
def first(
    count: int,
    blocked: BoolColumn,
    cost: FloatColumn,
    inflight: IntColumn,
    external: FloatColumn,
    ahead: FloatColumn,
    last_chosen: IntColumn,
    slots: Slots,
) -> npt.NDArray[np.int64]:
    """The positions in `slots` of the best `count`: not blocked, cheapest, fewest in flight, longest not chosen, first.

    `blocked` and `cost` have an entry a candidate, `blocked` may be empty; the others are by slot. `ahead`: requests
    tentatively placed there; it may be empty.
    """
    found = np.empty(min(count, len(slots)), np.int64)
    keys = np.empty((len(found), 3))
    chosen = np.empty(len(found), np.int64)
    length = 0
    for number in range(len(slots)):
        shut = 1.0 if len(blocked) and blocked[number] else 0.0
        price = cost[number]
        if length == len(found):
            last = length - 1
            if shut > keys[last, 0] or (shut == keys[last, 0] and price > keys[last, 1]):
                continue
        slot = slots[number]
        here = inflight[slot] + external[slot]
        if len(ahead):
            here += ahead[slot]
        place = length
        while place > 0:
            other = place - 1
            if shut != keys[other, 0]:
                before = shut < keys[other, 0]
            elif price != keys[other, 1]:
                before = price < keys[other, 1]
            elif here != keys[other, 2]:
                before = here < keys[other, 2]
            else:
                before = last_chosen[slot] < chosen[other]
            if not before:
                break
            place -= 1
        if place == len(found):
            continue
        length = min(length + 1, len(found))
        for other in range(length - 1, place, -1):
            found[other], chosen[other] = found[other - 1], chosen[other - 1]
            keys[other] = keys[other - 1]
        found[place], chosen[place] = number, last_chosen[slot]
        keys[place, 0], keys[place, 1], keys[place, 2] = shut, price, here
    return found
