"""What benchmarks find: numbers that mean something, or an error."""

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["BenchError", "Json", "percentile"]

Json = dict[str, Any]  # what is printed


class BenchError(Exception):
    """Something did not start, or requests failed: its numbers would mean nothing."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all lies at or below; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
