"""Failed authentication, limited by peer: what is logged of it, and when a peer is told to come back later.

Only failures are limited. Whatever else a peer did, a right credential is looked up as always: an honest caller behind
the same address never pays for another one's guesses.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import structlog

from headway_scheduler.app import AuthenticationCounts
from headway_scheduler.errors import HeadwayError, NoCredential, TooManyFailures

__all__ = ["MAX_PEERS", "Failures"]

log = structlog.get_logger(__name__)

MAX_PEERS: Final = 10_000
"""Peers remembered at once; the one that failed longest ago is forgotten first."""


class Failures:
    """A bucket for each peer's address: `per_minute` failures at once, refilled over a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float], counts: AuthenticationCounts) -> None:
        self._most, self._clock, self._counts = float(per_minute), clock, counts
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Peers remembered."""
        return len(self._buckets)

    def note(self, error: NoCredential, address: str) -> HeadwayError:
        """What the peer is answered: the failure itself, or that there were too many."""
        now, rate = self._clock(), self._most / 60.0
        left, since = self._buckets.pop(address, (self._most, now))
        left = min(self._most, left + (now - since) * rate)
        if len(self._buckets) >= MAX_PEERS:
            self._buckets.popitem(last=False)
        if left < 1.0:
            self._buckets[address] = (left, now)
            self._counts.limited += 1
            return TooManyFailures("authorization: too many failures", retry_after_s=(1.0 - left) / rate)
        self._buckets[address] = (left - 1.0, now)
        self._counts.failed += 1
        log.warning("authentication_failed", peer=address, problem=error.message)
        return error
