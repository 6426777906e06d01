"""One step of recursive least squares, compiled. estimator.py says what is estimated."""

from typing import Final

import numpy as np
import numpy.typing as npt

from headway_scheduler.compiling import compiled

__all__ = ["HIGHEST", "LOWEST", "SIZE", "TAKEN", "Matrix", "Vector", "observe"]

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]

SIZE: Final = 5
"""Ratios that are estimated."""
LOWEST: Final = (0.125, 0.125, 0.125, 0.125, 0.0)
HIGHEST: Final = (8.0, 8.0, 8.0, 8.0, 4.0)
"""Their bounds."""
TAKEN: Final = 2
"""An observation was taken in."""
_GATE: Final = 3.5
"""An observation further off than so many standard deviations is a stall, a preemption or a change."""


@compiled("int64(float64[::1], float64[::1], float64[:,::1], float64[::1], float64, float64)")
def observe(prior: Vector, ratios: Vector, covariance: Matrix, amounts: Vector, actual: float, noise: float) -> int:
    """Take an observation in and return TAKEN; else change nothing and return the sign of an outlier's error, or 0."""
    x, spread = prior * amounts, np.empty(SIZE)
    variance, expected = 0.0, 0.0
    for row in range(SIZE):
        total = 0.0
        for column in range(SIZE):
            total += covariance[row, column] * x[column]
        spread[row] = total
        variance += x[row] * total
        expected += x[row] * ratios[row]
    variance += noise * noise
    error = actual - expected
    if not np.isfinite(error) or not 0.0 < variance < np.inf:
        return 0
    if error * error > _GATE * _GATE * variance:
        return 1 if error > 0.0 else -1
    for row in range(SIZE):
        gain = spread[row] / variance
        ratios[row] = min(max(ratios[row] + gain * error, LOWEST[row]), HIGHEST[row])
        for column in range(SIZE):
            covariance[row, column] -= gain * spread[column]
    return TAKEN
