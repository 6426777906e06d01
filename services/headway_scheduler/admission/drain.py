"""How fast each pool of endpoints drains, and so when a refused call may come back."""

from dataclasses import dataclass
from typing import Final

import numpy as np

__all__ = ["DrainRates", "Pool"]

Pool = tuple[str, str]
"""Where requests compete: the arena (or the tenant that is in none) and the model."""

_RATE: Final = 0.05
"""An exponential mean over about the last 20 ends; over all while there are fewer."""
_BEFORE_ANY_S: Final = 1.0
_LEAST_S: Final = 0.5
_MOST_S: Final = 30.0
_MOST_POOLS: Final = 10_000


@dataclass(slots=True)
class _Drain:
    interval_s: float
    ended_at: float
    intervals: int = 0


class DrainRates:
    """The mean time between two ends of requests, by pool."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._pools: dict[Pool, _Drain] = {}

    def ended(self, pool: Pool, now: float) -> None:
        """A request of this pool has left its endpoint."""
        drain = self._pools.pop(pool, None)
        if drain is None:
            drain = _Drain(_BEFORE_ANY_S, now)
            if len(self._pools) >= _MOST_POOLS:
                del self._pools[next(iter(self._pools))]  # the one that has been silent for longest
        else:
            drain.intervals += 1
            rate = max(_RATE, 1 / drain.intervals)
            drain.interval_s += rate * (min(now - drain.ended_at, _MOST_S) - drain.interval_s)
            drain.ended_at = now
        self._pools[pool] = drain

    def retry_after_s(self, pool: Pool, ahead: int, now: float) -> float:
        """How long until `ahead` requests and one more have left; half a second to half a minute, and up to half more.

        Where nothing has ended for longer than usual, that is how long an end takes now. The jitter keeps those that
        were refused together from coming back together.
        """
        drain = self._pools.get(pool)
        interval_s = _BEFORE_ANY_S if drain is None else max(drain.interval_s, _stalled_s(drain, now))
        wait_s = max(_LEAST_S, min(_MOST_S, (ahead + 1) * interval_s))
        return wait_s * float(self._random.uniform(1.0, 1.5))


def _stalled_s(drain: _Drain, now: float) -> float:
    """An end that is overdue: silence as long as several intervals is no pause between two."""
    silent_s = now - drain.ended_at
    return silent_s if silent_s > 5 * drain.interval_s else 0.0
