"""How long a prefill takes on each endpoint (FIELD.md section 1), from priors and from what was reported.

The prior gives the shape; a factor per endpoint is learned from reported first-token times: the exponentially
weighted mean of log(actual/predicted), for requests that met an empty prefill queue, where the two are comparable.
"""

from dataclasses import dataclass, field
from math import exp, log
from typing import Final

import msgspec
import numpy as np

from headway_scheduler.fleet.columns import Columns, FloatColumn, Slots
from headway_scheduler.learning.priors import Coefficients

__all__ = ["CostModel", "prefill_ms"]

_RATE: Final = 0.05
_OUTLIER: Final = 3.0
"""Observations more than e^3 away from the prediction are a stall or a lost prior, and move the factor by this only."""
_BOUND: Final = 4.0


def prefill_ms(columns: Columns, slots: Slots, uncached: FloatColumn, hit: FloatColumn) -> FloatColumn:
    """Time to prefill `uncached` tokens after `hit` cached ones on each slot, alone on the engine; milliseconds.

    `p = tok·n + pair·n·(hit + n/2) + base·max(1, n/budget)`.
    """
    steps = np.maximum(1.0, uncached / columns.budget_tokens[slots])
    attention = columns.pair_ms[slots] * uncached * (hit + uncached / 2)
    result: FloatColumn = columns.tok_ms[slots] * uncached + attention + columns.base_ms[slots] * steps
    return result


class _Learned(msgspec.Struct):
    log_factor: float = 0.0
    observations: int = 0


@dataclass(slots=True)
class CostModel:
    """Writes the learned columns. `time_scale` divides every time: an emulated fleet may run faster than life.

    State is kept per key, the endpoint's id with its engine's version, and survives restarts through `dump`.
    """

    columns: Columns
    time_scale: float = 1.0
    _learned: dict[str, _Learned] = field(default_factory=dict)
    _priors: dict[int, tuple[str, Coefficients]] = field(default_factory=dict)

    def install(self, slot: int, key: str, prior: Coefficients) -> None:
        """An endpoint took `slot`: write its coefficients."""
        self._priors[slot] = (key, prior)
        if np.isnan(self.columns.kv_capacity[slot]):
            self.columns.kv_capacity[slot] = prior.kv_tokens
        self._write(slot)

    def observe(self, slot: int, predicted_ms: float, actual_ms: float) -> None:
        """A request met an empty prefill queue on `slot` and took `actual_ms` to its first token."""
        if slot not in self._priors or predicted_ms <= 0.0 or actual_ms <= 0.0:
            return
        learned = self._learned.setdefault(self._priors[slot][0], _Learned())
        error = max(-_OUTLIER, min(_OUTLIER, log(actual_ms / predicted_ms)))
        rate = max(_RATE, 1.0 / (learned.observations + 10))
        learned.log_factor = max(-_BOUND, min(_BOUND, learned.log_factor + rate * error))
        learned.observations += 1
        self._write(slot)

    def prefill_ms_at(self, slot: int, uncached: float, hit: float) -> float:
        """`prefill_ms` for one slot, in plain numbers."""
        c = self.columns
        steps = max(1.0, uncached / float(c.budget_tokens[slot]))
        attention = float(c.pair_ms[slot]) * uncached * (hit + uncached / 2)
        return float(c.tok_ms[slot]) * uncached + attention + float(c.base_ms[slot]) * steps

    def factor(self, slot: int) -> float:
        """How much slower than its prior the endpoint is."""
        learned = self._learned.get(self._priors[slot][0])
        return 1.0 if learned is None else exp(learned.log_factor)

    def dump(self) -> bytes:
        """The learned state, for the store."""
        return msgspec.json.encode(self._learned)

    def restore(self, state: bytes) -> None:
        """Take over a saved state."""
        self._learned = msgspec.json.decode(state, type=dict[str, _Learned])
        for slot in self._priors:
            self._write(slot)

    def _write(self, slot: int) -> None:
        prior, c = self._priors[slot][1], self.columns
        scale = self.factor(slot) / self.time_scale
        c.tok_ms[slot] = prior.tok_ms * scale
        c.base_ms[slot] = prior.base_ms * scale
        c.pair_ms[slot] = prior.pair_ms * scale
        c.ctx_ms[slot] = prior.ctx_ms * scale
        c.budget_tokens[slot] = prior.budget_tokens
