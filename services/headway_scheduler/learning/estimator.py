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

import numpy as np

from headway_scheduler.learning.least_squares import HIGHEST, LOWEST, SIZE, TAKEN, Matrix, observe
from headway_scheduler.learning.saved import Estimate

__all__ = ["COEFFICIENTS", "Estimator"]

COEFFICIENTS: Final = ("tok", "base", "pair", "ctx", "overhead")
"""What there is a ratio for. `overhead` is the data plane's own time, in units of the prior's, and starts at zero."""

_TRIANGLE: Final = [(row, column) for row in range(SIZE) for column in range(row, SIZE)]
_NUMBERS: Final = struct.Struct(f"<{2 * SIZE + len(_TRIANGLE)}d")
_SCALE: Final = 1.0
_SHAPE: Final = 0.25
_START: Final[tuple[float, ...]] = (1.0, 1.0, 1.0, 1.0, 0.0)
_MEMORY: Final = 300
"""Observations after which what was learned from one counts 1/e."""
_FORGET_EVERY: Final = 16
_KEPT: Final = (1.0 - 1.0 / _MEMORY) ** _FORGET_EVERY
_PATIENCE: Final = 12
"""So many outliers in a row, all to one side, are a change: the device was throttled, or another took its place."""
_SURPRISE: Final = 16.0


def _prior_covariance() -> Matrix:
    covariance = np.full((SIZE, SIZE), _SCALE**2)
    covariance[4, :] = covariance[:, 4] = 0.0
    covariance += np.diag([_SHAPE**2] * 4 + [1.0])
    return covariance


_COVARIANCE: Final = _prior_covariance()
_INFORMATION: Final = np.linalg.inv(_COVARIANCE)


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
        found = observe(self.prior, self.ratios, self.covariance, np.array(amounts, np.float64), actual, noise)
        if found != TAKEN:
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
        found = cls(numbers[:SIZE])
        found.ratios, found.observations = np.array(numbers[SIZE : 2 * SIZE]), saved.observations
        for (row, column), each in zip(_TRIANGLE, numbers[2 * SIZE :], strict=True):
            found.covariance[row, column] = found.covariance[column, row] = each
        if not all(map(isfinite, numbers)) or found.prior.min() <= 0.0:
            raise ValueError("a prior is positive and finite, as everything learned is finite")
        if any(not low <= each <= high for low, each, high in zip(LOWEST, found.ratios, HIGHEST, strict=True)):
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
