"""Searches over rates: where round robin refuses its 12 %, and how much each policy can bear."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from headway_sim.simulation.metrics import Measured, percentile
from headway_sim.simulation.policies import BASELINE
from headway_sim.simulation.router import Policy
from headway_sim.simulation.scenario import Runner, Scenario, ScenarioError, Task

__all__ = ["Goodput", "find_goodputs", "find_overload", "search_rate", "within_objective"]

OVERLOAD_REJECTED: Final = 0.12
_OVERLOAD_TOLERANCE: Final = 0.002
_FASTEST: Final = 1024.0
GOODPUT_REJECTED: Final = 0.02
_OBJECTIVE_PERCENT: Final = 95
_DOUBLINGS: Final = 8
_STEPS: Final = 12


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate within the objective, and the requests a second answered at it; zero if there is none.

    Requests a second are those of the middle half: the fleet fills before and empties after, which would count against
    whoever bears the most.
    """

    rate: float
    goodput_per_s: float


def find_overload(scenario: Scenario, run: Runner) -> float:
    """The rate at which round robin refuses 12 % of the scenario's requests: doubling, then two points at a time."""

    def rejected(*rates: float) -> list[float]:
        results = run([Task(scenario.at_rate(rate), Policy(BASELINE, BASELINE)) for rate in rates])
        return [_rejected(measured) for measured in results]

    low, high = 0.0, 2.0
    while (shares := rejected(high, high * 2))[1] < OVERLOAD_REJECTED:
        low, high = high * 2, high * 4
        if high > _FASTEST:
            raise ScenarioError("round robin refuses less than 12 % at any rate: is there a waiting limit?")
    low, high = (low, high) if shares[0] >= OVERLOAD_REJECTED else (high, high * 2)
    for _ in range(_STEPS):
        points = [low + (high - low) / 3, low + (high - low) * 2 / 3]
        shares = rejected(*points)
        for point, share in zip(points, shares, strict=True):
            if abs(share - OVERLOAD_REJECTED) <= _OVERLOAD_TOLERANCE:
                return point
        above = [point for point, share in zip(points, shares, strict=True) if share >= OVERLOAD_REJECTED]
        below = [point for point, share in zip(points, shares, strict=True) if share < OVERLOAD_REJECTED]
        low, high = max([low, *below]), min([high, *above])
    return (low + high) / 2


def find_goodputs(
    scenario: Scenario, policies: Sequence[Policy], objective_ms: float, run: Runner
) -> Mapping[str, Goodput]:
    """Bisect every policy's rate, all policies in step so that they run in parallel."""
    searches = [search_rate(scenario.rate) for _ in policies]
    rates = {number: next(search) for number, search in enumerate(searches)}
    served: dict[tuple[int, float], float] = {}
    found: dict[str, Goodput] = {}
    while rates:
        numbers = list(rates)
        results = run([Task(scenario.at_rate(rates[number]), policies[number]) for number in numbers])
        for number, measured in zip(numbers, results, strict=True):
            rate = rates[number]
            served[number, rate] = _steady_per_s(measured)
            try:
                rates[number] = searches[number].send(within_objective(measured, objective_ms))
            except StopIteration as end:
                best: float = end.value
                found[policies[number].name] = Goodput(best, served.get((number, best), 0.0))
                del rates[number]
    return {policy.name: found[policy.name] for policy in policies}


def search_rate(start: float, precision: float = 0.01) -> Generator[float, bool, float]:
    """Yields rates to try, is sent whether each passes; returns the highest that does, to `precision` of it, or 0."""
    low, high, tried = 0.0, start, 0
    while (yield high) and tried < _DOUBLINGS:
        low, high, tried = high, high * 2, tried + 1
    if tried == 0:
        for _ in range(_DOUBLINGS):
            if (yield high / 2):
                low = high / 2
                break
            high /= 2
        else:
            return 0.0
    for _ in range(_STEPS):
        if high - low <= precision * high:
            break
        middle = (low + high) / 2
        if (yield middle):
            low = middle
        else:
            high = middle
    return low


def within_objective(measured: Measured, objective_ms: float) -> bool:
    """Refusals at most 2 % and p95 TTFT at most the objective."""
    if _rejected(measured) > GOODPUT_REJECTED or not len(measured.ttft_ms):
        return False
    return percentile(np.sort(measured.ttft_ms), _OBJECTIVE_PERCENT) <= objective_ms


def _steady_per_s(measured: Measured) -> float:
    """Requests a second over the middle half of those that were answered, by their arrivals."""
    arrivals = np.sort(measured.arrival_s)
    middle = arrivals[len(arrivals) // 4 : len(arrivals) - len(arrivals) // 4]
    span = float(middle[-1] - middle[0]) if len(middle) > 1 else 0.0
    return (len(middle) - 1) / span if span else 0.0


def _rejected(measured: Measured) -> float:
    return sum(measured.refusals.values()) / measured.requests
