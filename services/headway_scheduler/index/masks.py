"""Masks of slots read by compiled code."""

import numpy as np
import numpy.typing as npt

from headway_scheduler.compiling import compiled

__all__ = ["mark"]


@compiled("void(float64[::1], Array(uint8, 1, 'C', readonly=True), float64)")
def _mark(entries: npt.NDArray[np.float64], mask: npt.NDArray[np.uint8], value: float) -> None:
    """Write `value` to the entry of each slot of a mask: its bytes, the least significant first."""
    for number in range(len(mask)):
        bits, slot = mask[number], 8 * number
        while bits:
            if bits & 1:
                entries[slot] = value
            bits >>= 1
            slot += 1


def mark(entries: npt.NDArray[np.float64], mask: int, value: float) -> None:
    """Write `value` to the entry of each slot of a mask; as many entries as there is room for slots."""
    _mark(entries, np.frombuffer(mask.to_bytes((mask.bit_length() + 7) >> 3, "little"), np.uint8), value)
