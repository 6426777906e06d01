"""When Python looks for cycles: a little at a time, and as often as there are any.

A pause of the collector is as long as what it looks at. Of what is new since it last looked, an idle agent's stream is
20 objects, which wait for its next sample: with 1,250 agents that is 20 to 40 ms. A unary gRPC call leaves a cycle of
ten, a message on a stream none.
"""

import asyncio
import gc
import time
from typing import Final

__all__ = ["Pace", "calm_collector", "collect_garbage"]

_SHORTEST_S: Final = 0.1
_LONGEST_S: Final = 10.0
_WORTH_IT: Final = 200
"""Fewer objects than this in cycles are not worth looking again soon."""
_LONG_S: Final = 0.002
"""A look that took longer had too much to look at: the next one comes sooner."""
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

    def found(self, objects: int, took_s: float) -> None:
        """So many were in cycles, and it took so long to look at the newest."""
        if objects >= _WORTH_IT:
            self.pause_s = _SHORTEST_S
        elif took_s > _LONG_S:
            self.pause_s = max(_SHORTEST_S, self.pause_s * _LONG_S / took_s)
        elif took_s < _LONG_S / 2:
            self.pause_s = min(_LONGEST_S, 2.0 * self.pause_s)


async def collect_garbage() -> None:
    """Look for cycles until cancelled."""
    pace = Pace()
    while True:
        await asyncio.sleep(pace.pause_s)
        generation, began = pace.generation(), time.perf_counter()
        objects = gc.collect(generation)
        pace.found(objects, 0.0 if generation else time.perf_counter() - began)
