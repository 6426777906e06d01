"""Searches over rates: where round robin refuses its 12 %, and how much a policy can bear."""

from collections.abc import Callable
from typing import Final

import numpy as np

from headway_sim.simulation.metrics import Measured, percentile
from headway_sim.simulation.policies import BASELINE
from headway_sim.simulation.router import Policy
from headway_sim.simulation.scenario import Scenario, Task, run_task

__all__ = ["bisect", "find_goodput", "find_overload", "within_objective"]

OVERLOAD_REJECTED: Final = 0.12
_OVERLOAD_TOLERANCE: Final = 0.002
GOODPUT_REJECTED: Final = 0.02
_STEPS: Final = 12
_DOUBLINGS: Final = 8


def bisect(passes: Callable[[float], bool], start: float, *, precision: float = 0.01) -> float:
    """The highest rate that passes, to `precision` of it; 0 if none is found down to start / 2^8."""
    low, high = 0.0, start
    if passes(start):
        for _ in range(_DOUBLINGS):
            low, high = high, high * 2
            if not passes(high):
                break
        else:
            return high
    else:
        for _ in range(_DOUBLINGS):
            high, lower = min(high, start), high / 2
            if passes(lower):
                low = lower
                break
            high = lower
        else:
            return 0.0
    for _ in range(_STEPS):
        if high - low <= precision * high:
            break
        middle = (low + high) / 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def find_overload(scenario: Scenario, run: Callable[[Task], Measured] = run_task) -> float:
    """The rate at which round robin refuses 12 % of the scenario's requests."""

    def rejected(rate: float) -> float:
        measured = run(Task(scenario.at_rate(rate), Policy(BASELINE, BASELINE)))
        return sum(measured.refusals.values()) / measured.requests

    low, high = 0.0, 1.0
    while rejected(high) < OVERLOAD_REJECTED:
        low, high = high, high * 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        share = rejected(middle)
        if abs(share - OVERLOAD_REJECTED) <= _OVERLOAD_TOLERANCE:
            return middle
        low, high = (middle, high) if share < OVERLOAD_REJECTED else (low, middle)
    return (low + high) / 2


def within_objective(measured: Measured, objective_ms: float) -> bool:
    """Refusals at most 2 % and p95 TTFT at most the objective."""
    if sum(measured.refusals.values()) > GOODPUT_REJECTED * measured.requests or not len(measured.ttft_ms):
        return False
    return percentile(np.sort(measured.ttft_ms), 95) <= objective_ms


def find_goodput(
    scenario: Scenario, policy: Policy, objective_ms: float, run: Callable[[Task], Measured] = run_task
) -> tuple[float, float]:
    """The highest rate within the objective, and the requests a second answered at it."""
    best: dict[float, float] = {}

    def passes(rate: float) -> bool:
        measured = run(Task(scenario.at_rate(rate), policy))
        best[rate] = len(measured.ttft_ms) / measured.duration_s if measured.duration_s else 0.0
        return within_objective(measured, objective_ms)

    rate = bisect(passes, scenario.rate)
    return rate, best.get(rate, 0.0)
