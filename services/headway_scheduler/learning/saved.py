"""What was learned in the form in which it is kept. msgspec reads these back by their annotations: see ADR 52."""

from typing import Any, Final

import msgspec

from headway_scheduler.learning.sketch import Sketch

__all__ = ["HISTORY_FORMAT", "SPEEDS_FORMAT", "Estimate", "Mean", "SavedHistory", "SavedSpeeds"]

HISTORY_FORMAT: Final = 1
SPEEDS_FORMAT: Final = 1
_RATE: Final = 0.05


class Mean(msgspec.Struct):
    """A mean that follows: of the first few values exact, then forgetting."""

    value: float
    count: int = 0

    def add(self, observed: float) -> None:
        """One more value."""
        self.count += 1
        self.value += (observed - self.value) * max(_RATE, 1.0 / self.count)


class SavedHistory(msgspec.Struct):
    """What requests turned out to cost (see `History`), by class, tenant and model as its keys say."""

    format: int = HISTORY_FORMAT
    outputs: dict[str, Sketch] = msgspec.field(default_factory=dict)
    costs_ms: dict[str, Mean] = msgspec.field(default_factory=dict)
    seconds_per_token: dict[str, Mean] = msgspec.field(default_factory=dict)
    bytes_per_token: dict[str, Mean] = msgspec.field(default_factory=dict)

    def tables(self) -> tuple[dict[str, Any], ...]:  # of sketches, and of means
        """All of it."""
        return self.outputs, self.costs_ms, self.seconds_per_token, self.bytes_per_token


class Estimate(msgspec.Struct, frozen=True):
    """A saved estimator: 25 little-endian doubles (prior, ratios, covariance's upper triangle by row), as there may be
    thousands of them every few seconds.
    """

    numbers: bytes
    observations: int = 0


class SavedSpeeds(msgspec.Struct, frozen=True):
    """Of a cost model, by endpoint and engine version."""

    format: int
    endpoints: dict[str, Estimate]
