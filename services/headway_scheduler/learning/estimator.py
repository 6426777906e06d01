"""Recursive least squares for one endpoint's coefficients: from a prior, forgetting, robust, bounded.

What is estimated are ratios to the prior, r: a time observed is y = Σ r_j·prior_j·x_j + e. A device that is slow is
slow in everything, so the ratios start highly correlated (one common scale), each with a little of its own: a few
observations of any kind correct all of them, many of different kinds tell them apart.
"""

import struct
from collections.abc import Sequence
from math import inf, isfinite
from operator import mul
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["COEFFICIENTS", "Estimate", "Estimator"]

Matrix = npt.NDArray[np.float64]

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
    """The ratios of one endpoint. `prior`: the coefficients believed in, in the order of COEFFICIENTS.

    Plain floats, not arrays: at this size they are several times as fast.
    """

    __slots__ = ("_covariance", "_one_sided", "observations", "prior", "ratios")

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = list(prior)
        self.ratios = list(_START)
        self.observations = 0
        self._covariance: list[list[float]] = _COVARIANCE.tolist()
        self._one_sided = 0

    @property
    def coefficients(self) -> list[float]:
        """The present belief, in the order of COEFFICIENTS."""
        return [ratio * prior for ratio, prior in zip(self.ratios, self.prior, strict=True)]

    @property
    def covariance(self) -> Matrix:
        """Of the ratios."""
        return np.array(self._covariance)

    def predict(self, amounts: Sequence[float]) -> float:
        """The time that these amounts of work should take."""
        return float(sum(map(mul, self.coefficients, amounts)))

    def observe(self, amounts: Sequence[float], actual: float, noise: float) -> bool:
        """It took `actual`, give or take `noise` (a standard deviation). False if it was an outlier.

        An outlier changes nothing, but a row of them to one side makes the next ones believable.
        """
        x = [*map(mul, self.prior, amounts)]
        spread = [sum(map(mul, row, x)) for row in self._covariance]
        variance = sum(map(mul, x, spread)) + noise * noise
        error = actual - sum(map(mul, x, self.ratios))
        if not isfinite(error) or not 0.0 < variance < inf:
            return False
        if error * error > _GATE * _GATE * variance:
            self._reject(error)
            return False
        self._one_sided = 0
        gain = [each / variance for each in spread]
        moved = [ratio + each * error for ratio, each in zip(self.ratios, gain, strict=True)]
        self.ratios = [*map(min, map(max, moved, _LOWEST), _HIGHEST)]
        for row, each in zip(self._covariance, gain, strict=True):
            row[:] = [was - each * other for was, other in zip(row, spread, strict=True)]
        self.observations += 1
        if not self.observations % _FORGET_EVERY:
            self._forget()
        return True

    def doubt(self) -> None:
        """What was learned is a starting point only: the engine's version changed."""
        self._covariance = (0.5 * (self.covariance + _COVARIANCE)).tolist()

    def save(self) -> Estimate:
        """As it is kept."""
        triangle = [self._covariance[row][column] for row, column in _TRIANGLE]
        return Estimate(_NUMBERS.pack(*self.prior, *self.ratios, *triangle), self.observations)

    @classmethod
    def load(cls, saved: Estimate) -> "Estimator":
        """From what was kept. Raises ValueError where that cannot be."""
        if len(saved.numbers) != _NUMBERS.size:
            raise ValueError(f"an estimate is {_NUMBERS.size} bytes")
        numbers = _NUMBERS.unpack(saved.numbers)
        found = cls(numbers[:_SIZE])
        found.ratios, found.observations = list(numbers[_SIZE : 2 * _SIZE]), saved.observations
        for (row, column), each in zip(_TRIANGLE, numbers[2 * _SIZE :], strict=True):
            found._covariance[row][column] = found._covariance[column][row] = each
        if not all(map(isfinite, numbers)) or min(found.prior) <= 0.0:
            raise ValueError("a prior is positive and finite, as everything learned is finite")
        if any(not low <= each <= high for low, each, high in zip(_LOWEST, found.ratios, _HIGHEST, strict=True)):
            raise ValueError("a ratio is beyond its bounds")
        if np.linalg.eigvalsh(found.covariance).min() <= 0.0:
            raise ValueError("a covariance is positive")
        return found

    def _reject(self, error: float) -> None:
        same_side = error * self._one_sided >= 0
        self._one_sided = (self._one_sided if same_side else 0) + (1 if error > 0 else -1)
        if abs(self._one_sided) >= _PATIENCE:
            self._one_sided = 0
            self._covariance = (_SURPRISE * _COVARIANCE).tolist()

    def _forget(self) -> None:
        """Let information decay towards the prior's, never below it: what nothing tells about stays as uncertain as it
        began, so no direction's covariance grows without end, and none drifts on noise (stabilised forgetting).
        """
        information = np.linalg.inv(self._covariance)
        covariance = np.linalg.inv(_KEPT * information + (1.0 - _KEPT) * _INFORMATION)
        self._covariance = (0.5 * (covariance + covariance.T)).tolist()
