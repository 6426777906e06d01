"""A quantile sketch of token counts: a fixed log-spaced histogram that forgets."""

from math import log2
from typing import Final

import msgspec

__all__ = ["Sketch"]

_BINS_PER_DOUBLING: Final = 8
"""Each bin is 9 % wide; within it values are taken to lie evenly."""
_MOST: Final = 512.0
"""At this weight everything is halved: what came so many values ago counts half or less."""


class Sketch(msgspec.Struct):
    """Counts by bin: bin 0 holds 0, bin b holds values from 2^((b-1)/8) on. Mergeable; at most some 150 bins."""

    bins: dict[int, float] = msgspec.field(default_factory=dict)
    weight: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """Exact, over what is remembered; 0 without values."""
        return self.total / self.weight if self.weight else 0.0

    def add(self, value: float) -> None:
        """One more value, not negative."""
        place = _bin(value)
        self.bins[place] = self.bins.get(place, 0.0) + 1.0
        self.weight += 1.0
        self.total += value
        self._forget()

    def merge(self, other: "Sketch") -> None:
        """Take in what another one saw."""
        for place, count in other.bins.items():
            self.bins[place] = self.bins.get(place, 0.0) + count
        self.weight += other.weight
        self.total += other.total
        self._forget()

    def quantile(self, q: float) -> float:
        """The value that a share `q` of all lies at or below, to within a bin; 0 without values."""
        left = min(1.0, max(0.0, q)) * self.weight
        found = 0.0
        for place in sorted(self.bins):
            count = self.bins[place]
            low, high = _edges(place)
            if left <= count:
                return low + (high - low) * left / count
            left -= count
            found = high
        return found

    def is_sound(self) -> bool:
        """Could this be what `add` makes?"""
        counts = self.bins.values()
        return (
            all(count > 0.0 for count in counts)
            and all(0 <= place <= 1000 for place in self.bins)
            and abs(sum(counts) - self.weight) <= 1e-6 * max(1.0, self.weight)
            and 0.0 <= self.total < float("inf")
        )

    def _forget(self) -> None:
        while self.weight >= _MOST:
            self.bins = {place: count / 2 for place, count in self.bins.items() if count > 1e-3}
            self.weight = sum(self.bins.values())
            self.total /= 2


def _bin(value: float) -> int:
    return 0 if value < 1.0 else 1 + int(_BINS_PER_DOUBLING * log2(value))


def _edges(place: int) -> tuple[float, float]:
    if place == 0:
        return 0.0, 0.0
    return 2.0 ** ((place - 1) / _BINS_PER_DOUBLING), 2.0 ** (place / _BINS_PER_DOUBLING)
