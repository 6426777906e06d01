"""Policies side by side on one scenario: the results that `headway sim run` prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from headway_sim.simulation.bound import lower_bound
from headway_sim.simulation.metrics import Figures, Measured, figures
from headway_sim.simulation.policies import BASELINE
from headway_sim.simulation.router import Policy
from headway_sim.simulation.scenario import Runner, Scenario, Task

__all__ = ["Comparison", "LoadPoint", "compare", "noise_floor", "sweep"]

_FAVOURITE: Final = "adaptive"
_ROLLS: Final = 3
_SWEEP_FACTORS: Final = (0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every policy's figures and runs; `noise_floor` is a share of the mean TTFT."""

    figures: dict[str, Figures]
    runs: dict[str, list[Measured]]
    noise_floor: float
    lower_bound: dict[str, Any]  # as the JSON has it

    def document(self) -> dict[str, Any]:  # JSON
        """The results as JSON."""
        return {"policies": self.figures, "noise_floor": self.noise_floor, "lower_bound": self.lower_bound}


def compare(scenario: Scenario, policies: Sequence[Policy], seeds: int, run: Runner) -> Comparison:
    """Run every policy with every seed, and what the comparison needs beside.

    The noise floor is the spread (largest less smallest, over the mean) of one policy's mean TTFT when nothing but
    the seed, the order of endpoints and the order of float operations changes.
    """
    reference = _reference(policies)
    tasks = [Task(scenario, policy, seed) for policy in policies for seed in range(seeds)]
    rolls = [Task(scenario, reference, seed, reordered=True) for seed in range(max(_ROLLS, seeds))]
    extra = [] if any(each.name == BASELINE for each in policies) else _baseline(scenario, seeds)
    results = iter(run([*tasks, *rolls, *extra]))
    runs = {policy.name: list(islice(results, seeds)) for policy in policies}
    rolled = list(islice(results, len(rolls)))
    base = runs.get(BASELINE) or list(results)
    base_ttft = np.concatenate([each.ttft_ms for each in base])
    base_mean = float(base_ttft.mean()) if len(base_ttft) else None
    return Comparison(
        figures={name: figures(each, base_mean) for name, each in runs.items()},
        runs=runs,
        noise_floor=_spread([*runs[reference.name], *rolled]),
        lower_bound=dict(lower_bound(scenario.source(), scenario.setup().engines)),
    )


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A policy at one rate."""

    policy: str
    rate: float
    requests_per_s: float
    ttft_ms: float


def sweep(scenario: Scenario, policies: Sequence[Policy], run: Runner) -> list[LoadPoint]:
    """Every policy at half to five quarters of the scenario's rate; nothing for a closed loop, which has no rate."""
    if scenario.is_closed_loop:
        return []
    tasks = [Task(scenario.at_rate(scenario.rate * factor), policy) for policy in policies for factor in _SWEEP_FACTORS]
    return [
        LoadPoint(task.policy.name, task.scenario.rate, len(each.ttft_ms) / each.duration_s, float(each.ttft_ms.mean()))
        for task, each in zip(tasks, run(tasks), strict=True)
        if len(each.ttft_ms)
    ]


def noise_floor(scenario: Scenario, policy: Policy, run: Runner) -> float:
    """How much a policy's mean TTFT varies, as a share of it, when nothing that matters changes."""
    rolls = [Task(scenario, policy, seed, reordered=bool(seed)) for seed in range(_ROLLS)]
    return _spread(run(rolls))


def _reference(policies: Sequence[Policy]) -> Policy:
    return next((policy for policy in policies if policy.algorithm == _FAVOURITE), policies[0])


def _baseline(scenario: Scenario, seeds: int) -> list[Task]:
    return [Task(scenario, Policy(BASELINE, BASELINE), seed) for seed in range(seeds)]


def _spread(runs: Sequence[Measured]) -> float:
    means = [float(each.ttft_ms.mean()) for each in runs if len(each.ttft_ms)]
    middle = sum(means) / len(means) if means else 0.0
    return (max(means) - min(means)) / middle if middle else 0.0
