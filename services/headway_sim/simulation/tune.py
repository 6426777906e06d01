"""Searches a strategy's parameters on one scenario: each in turn, up and down, while it gains."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import annotated_types
from pydantic.fields import FieldInfo

from headway_sim.simulation.compare import noise_floor
from headway_sim.simulation.metrics import Measured
from headway_sim.simulation.policies import PolicyError, catalogue
from headway_sim.simulation.router import Policy
from headway_sim.simulation.scenario import Runner, Scenario, Task

__all__ = ["Tuned", "neighbours", "tune"]

_FACTORS: Final = (0.25, 0.5, 2.0, 4.0)
_FROM_ZERO: Final = (0.01, 0.1, 1.0)
_MORE_REFUSED: Final = 0.002
"""Parameters that refuse more than this share on top are no gain, whatever they do to TTFT."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best parameters found, what they gain, and what gains mean nothing. JSON values, hence Any.

    `gain` is the share of the mean TTFT that they save; `tried` counts the settings.
    """

    parameters: Mapping[str, Any]
    before_ms: float
    after_ms: float
    gain: float
    noise_floor: float
    tried: int


def tune(scenario: Scenario, policy: Policy, rounds: int, run: Runner) -> Tuned:
    """Coordinate search from `policy`'s own parameters, at most `rounds` times around. Raises PolicyError."""
    fields = catalogue()[policy.algorithm].parameters_type.model_fields
    if not fields:
        raise PolicyError(f"{policy.algorithm!r} has no parameters to tune")
    start = {name: policy.parameters.get(name, field.get_default()) for name, field in fields.items()}
    floor = noise_floor(scenario, policy, run)
    first = run([Task(scenario, policy)])[0]
    best, measured, tried = dict(start), first, 1
    for _ in range(rounds):
        before = dict(best)
        for name, field in fields.items():
            settings = [{**best, name: value} for value in neighbours(field, best[name])]
            results = run([Task(scenario, Policy(policy.name, policy.algorithm, each)) for each in settings])
            tried += len(settings)
            for setting, result in zip(settings, results, strict=True):
                if _better(result, measured, first):
                    best, measured = setting, result
        if best == before:
            break
    before_ms, after_ms = _ttft(first), _ttft(measured)
    changed = {name: value for name, value in best.items() if value != start[name]}
    return Tuned(changed, before_ms, after_ms, 1 - after_ms / before_ms, floor, tried)


def neighbours(field: FieldInfo, value: object) -> Iterator[Any]:
    """Values to try instead of `value`: the other truth, or multiples within the field's bounds."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        candidates = [value * factor for factor in _FACTORS] if value else list(_FROM_ZERO)
        low, high = _bounds(field)
        whole = isinstance(value, int)
        found = {round(each) if whole else each for each in (min(max(each, low), high) for each in candidates)}
        yield from sorted(found - {value})


def _bounds(field: FieldInfo) -> tuple[float, float]:
    low, high = -math.inf, math.inf
    for bound in field.metadata:
        if isinstance(bound, annotated_types.Ge) and isinstance(bound.ge, (int, float)):
            low = bound.ge
        elif isinstance(bound, annotated_types.Le) and isinstance(bound.le, (int, float)):
            high = bound.le
    return low, high


def _better(result: Measured, than: Measured, first: Measured) -> bool:
    if not len(result.ttft_ms) or _rejected(result) > _rejected(first) + _MORE_REFUSED:
        return False
    return _ttft(result) < _ttft(than)


def _ttft(measured: Measured) -> float:
    return float(measured.ttft_ms.mean()) if len(measured.ttft_ms) else math.inf


def _rejected(measured: Measured) -> float:
    return sum(measured.refusals.values()) / measured.requests
