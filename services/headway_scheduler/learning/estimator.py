"""Recursive least squares for one endpoint's coefficients: from a prior, forgetting, robust, bounded.

What is estimated are ratios to the prior, r: a time observed is y = Σ r_j·prior_j·x_j + e. A device that is slow is
slow in everything, so the ratios start highly correlated (one common scale), each with a little of its own: a few
observations of any kind correct all of them, many of different kinds tell them apart.
"""

import struct
from collections.abc import Sequence
from math import isfinite
from operator import mul
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from headway_scheduler.compiling import compiled

__all__ = ["COEFFICIENTS", "Estimate", "Estimator"]

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]

COEFFICIENTS: Final = ("tok", "base", "pair", "ctx", "overhead")
"""What there is a ratio for. `overhead` is the data plane's own time, in units of the prior's, and starts at zero."""

_SIZE: Final = len(COEFFICIENTS)
_TRIANGLE: Final = [(row, column) for row in range(_SIZE) for column in range(row, _SIZE)]
_NUMBERS: Final = struct.Struct(f"<{2 * _SIZE + len(_TRIANGLE)}d")
_SCALE: Final = 1.0
_SHAPE: Final = 0.25
_LOWEST: Final = (0.125, 0.125, 0.125, 0.125, 0.0)
_HIGHEST: Final = (8.0, 8.0, 8.0, 8.0, 4.0)
_START: Final = (1.0, 1.0, 1.0, 1.0, 0.0)
_MEMORY: Final = 300
"""Observations after which what was learned from one counts 1/e."""
_FORGET_EVERY: Final = 16
_KEPT: Final = (1.0 - 1.0 / _MEMORY) ** _FORGET_EVERY
_GATE: Final = 3.5
"""An observation further off than so many standard deviations is a stall, a preemption or a change."""
_PATIENCE: Final = 12
"""So many outliers in a row, all to one side, are a change: the device was throttled, or another took its place."""
_SURPRISE: Final = 16.0
_TAKEN: Final = 2


def _prior_covariance() -> Matrix:
    covariance = np.full((_SIZE, _SIZE), _SCALE**2)
    covariance[4, :] = covariance[:, 4] = 0.0
    covariance += np.diag([_SHAPE**2] * 4 + [1.0])
    return covariance


_COVARIANCE: Final = _prior_covariance()
_INFORMATION: Final = np.linalg.inv(_COVARIANCE)


class Estimate(msgspec.Struct, frozen=True):
    """A saved estimator: 25 little-endian doubles (prior, ratios, covariance's upper triangle by row), as there may be
    thousands of them every few seconds.
    """

    numbers: bytes
    observations: int = 0


class Estimator:
    """The ratios of one endpoint, and their covariance. `prior`: the coefficients believed in.

    All in the order of COEFFICIENTS.
    """

    __slots__ = ("_one_sided", "covariance", "observations", "prior", "ratios")

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = np.array(prior, np.float64)
        self.ratios = np.array(_START)
        self.observations = 0
        self.covariance = _COVARIANCE.copy()
        self._one_sided = 0

    @property
    def coefficients(self) -> list[float]:
        """The present belief."""
        found: list[float] = (self.ratios * self.prior).tolist()
        return found

    def predict(self, amounts: Sequence[float]) -> float:
        """The time that these amounts of work should take."""
        return float(sum(map(mul, self.coefficients, amounts)))

    def observe(self, amounts: Sequence[float], actual: float, noise: float) -> bool:
        """It took `actual`, give or take `noise` (a standard deviation). False if it was an outlier.

        An outlier changes nothing, but a row of them to one side makes the next ones believable.
        """
        found = _observe(self.prior, self.ratios, self.covariance, np.array(amounts, np.float64), actual, noise)
        if found != _TAKEN:
            if found:
                self._reject(found)
            return False
        self._one_sided = 0
        self.observations += 1
        if not self.observations % _FORGET_EVERY:
            self._forget()
        return True

    def doubt(self) -> None:
        """What was learned is a starting point only: the engine's version changed."""
        self.covariance = 0.5 * (self.covariance + _COVARIANCE)

    def save(self) -> Estimate:
        """As it is kept."""
        triangle = [self.covariance[row, column] for row, column in _TRIANGLE]
        return Estimate(_NUMBERS.pack(*self.prior, *self.ratios, *triangle), self.observations)

    @classmethod
    def load(cls, saved: Estimate) -> "Estimator":
        """From what was kept. Raises ValueError where that cannot be."""
        if len(saved.numbers) != _NUMBERS.size:
            raise ValueError(f"an estimate is {_NUMBERS.size} bytes")
        numbers = _NUMBERS.unpack(saved.numbers)
        found = cls(numbers[:_SIZE])
        found.ratios, found.observations = np.array(numbers[_SIZE : 2 * _SIZE]), saved.observations
        for (row, column), each in zip(_TRIANGLE, numbers[2 * _SIZE :], strict=True):
            found.covariance[row, column] = found.covariance[column, row] = each
        if not all(map(isfinite, numbers)) or found.prior.min() <= 0.0:
            raise ValueError("a prior is positive and finite, as everything learned is finite")
        if any(not low <= each <= high for low, each, high in zip(_LOWEST, found.ratios, _HIGHEST, strict=True)):
            raise ValueError("a ratio is beyond its bounds")
        if np.linalg.eigvalsh(found.covariance).min() <= 0.0:
            raise ValueError("a covariance is positive")
        return found

    def _reject(self, error: int) -> None:
        same_side = error * self._one_sided >= 0
        self._one_sided = (self._one_sided if same_side else 0) + (1 if error > 0 else -1)
        if abs(self._one_sided) >= _PATIENCE:
            self._one_sided = 0
            self.covariance = _SURPRISE * _COVARIANCE

    def _forget(self) -> None:
        """Let information decay towards the prior's, never below it: what nothing tells about stays as uncertain as it
        began, so no direction's covariance grows without end, and none drifts on noise (stabilised forgetting).
        """
        information = np.linalg.inv(self.covariance)
        covariance = np.linalg.inv(_KEPT * information + (1.0 - _KEPT) * _INFORMATION)
        self.covariance = 0.5 * (covariance + covariance.T)


@compiled("int64(float64[::1], float64[::1], float64[:,::1], float64[::1], float64, float64)")
def _observe(prior: Vector, ratios: Vector, covariance: Matrix, amounts: Vector, actual: float, noise: float) -> int:
    """Take an observation in and return _TAKEN; else change nothing and return the sign of an outlier's error, or 0."""
    x, spread = prior * amounts, np.empty(_SIZE)
    variance, expected = 0.0, 0.0
    for row in range(_SIZE):
        total = 0.0
        for column in range(_SIZE):
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
    for row in range(_SIZE):
        gain = spread[row] / variance
        ratios[row] = min(max(ratios[row] + gain * error, _LOWEST[row]), _HIGHEST[row])
        for column in range(_SIZE):
            covariance[row, column] -= gain * spread[column]
    return _TAKEN
