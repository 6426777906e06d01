"""When Python looks for cycles: a little at a time, and as often as there are any.

A pause of the collector is as long as what it looks at. Of what is new since it last looked, an idle agent's stream is
20 objects, which wait for its next sample: with 1,250 agents that is 20 to 40 ms. A unary gRPC call leaves a cycle of
ten, a message on a stream none.
"""

import asyncio
import gc
from typing import Final

__all__ = ["Pace", "calm_collector", "collect_garbage"]

_SHORTEST_S: Final = 0.1
_LONGEST_S: Final = 10.0
_WORTH_IT: Final = 200
"""Fewer objects than this in cycles are not worth looking again soon."""
_OLDER_S: Final = 300.0
_ALL_S: Final = 3600.0


def calm_collector() -> None:
    """Leave alone what was made at the start, and look by itself only where `collect_garbage` does not keep up.

    By Python's own thresholds the collector took 70 µs of every routed request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


class Pace:
    """How long until the next look, and how far it goes, by what the last one found."""

    def __init__(self) -> None:
        self.pause_s = _SHORTEST_S
        self._older_in_s, self._all_in_s = _OLDER_S, _ALL_S

    def generation(self) -> int:
        """What to look at after this pause: 0, the newest; 1, also what outlived one look; 2, all."""
        self._older_in_s -= self.pause_s
        self._all_in_s -= self.pause_s
        if self._all_in_s <= 0.0:
            self._older_in_s, self._all_in_s = _OLDER_S, _ALL_S
            return 2
        if self._older_in_s <= 0.0:
            self._older_in_s = _OLDER_S
            return 1
        return 0

    def found(self, objects: int) -> None:
        """So many were in cycles."""
        self.pause_s = _SHORTEST_S if objects >= _WORTH_IT else min(_LONGEST_S, 2.0 * self.pause_s)


async def collect_garbage() -> None:
    """Look for cycles until cancelled."""
    pace = Pace()
    while True:
        await asyncio.sleep(pace.pause_s)
        pace.found(gc.collect(pace.generation()))
