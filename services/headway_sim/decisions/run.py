"""Runs the setups and judges them. Each setup's results are kept as soon as they are there."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway_sim.decisions.rows import FAVOURITE, LMETRIC, Row, goodput, learned, worst_regret
from headway_sim.decisions.setups import GOODPUT_MS, Setup, capacity
from headway_sim.simulation.compare import Comparison, compare
from headway_sim.simulation.metrics import Samples
from headway_sim.simulation.policies import BASELINE, parse_policies
from headway_sim.simulation.scenario import Runner, Scenario, Task
from headway_sim.simulation.search import find_goodputs, find_overload
from headway_sim.workloads import OVERLOAD

__all__ = ["GOODPUT", "Found", "Results", "measure"]

GOODPUT = "article sessions, goodput at p95 ≤ 500 ms"


@dataclass(frozen=True, slots=True)
class Found:
    """A setup's comparison, at the rate that it was run at. `holds_ms`: adaptive's, one a request."""

    rate: float
    comparison: Comparison
    holds_ms: Samples


@dataclass(slots=True)
class Results:
    """What there is so far: a row for every judge of every setup, and what they were judged on."""

    rows: list[Row] = field(default_factory=list)
    setups: dict[str, Found] = field(default_factory=dict)

    @property
    def table(self) -> list[Row]:
        """Every row, and those of all setups together."""
        compared = {name: found.comparison for name, found in self.setups.items() if name != OVERLOAD}
        together = [worst_regret(compared)] if compared else []
        return [*self.rows, *together, *([self._longest_hold()] if self.setups else [])]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rows": [dataclasses.asdict(row) for row in self.table],
            "setups": {
                name: {"rate": found.rate, **found.comparison.document()} for name, found in self.setups.items()
            },
        }

    def _longest_hold(self) -> Row:
        longest = {name: float(found.holds_ms.max(initial=0.0)) for name, found in self.setups.items()}
        worst = max(longest, key=lambda name: longest[name])
        # In no setup may a call wait longer than it allows: 30 s, and a tick of the scheduler.
        within = longest[worst] <= 30_050.0
        return Row(f"longest hold: {worst}", "held", f"{longest[worst]:,.0f} ms", "", None, None, "bounded", "", within)


def measure(setups: Sequence[Setup], *, with_goodput: bool, run: Runner, on_change: Callable[[Results], None]) -> None:
    """Run all peers and adaptive on every setup; `on_change` is given all there is after each of them."""
    results = Results()
    capacities: dict[Scenario, float] = {}
    for setup in setups:
        scenario = _placed(setup, capacities, run)
        comparison = compare(scenario, parse_policies(setup.policies), 1, run)
        holds = np.concatenate([each.hold_ms for each in comparison.runs[FAVOURITE]])
        results.setups[setup.name] = Found(scenario.rate, comparison, holds)
        results.rows.extend(judge(setup.name, comparison) for judge in setup.judges)
        if scenario.prior_error != 1.0:
            results.rows.append(_learned(setup.name, scenario, comparison, run))
        on_change(results)
    if with_goodput:
        sessions = Scenario(workload="article", open_loop=True)
        chosen = parse_policies(f"{BASELINE},{LMETRIC},{FAVOURITE}")
        results.rows.append(goodput(GOODPUT, find_goodputs(sessions, chosen, GOODPUT_MS, run)))
    on_change(results)


def _placed(setup: Setup, capacities: dict[Scenario, float], run: Runner) -> Scenario:
    """The setup's scenario at the rate that it asks for; `capacities` are those found already."""
    scenario = setup.scenario
    if scenario.workload == OVERLOAD:
        return scenario.at_rate(find_overload(scenario, run))
    if not setup.capacity_share:
        return scenario
    if scenario not in capacities:
        capacities[scenario] = capacity(scenario, run)
    return scenario.at_rate(setup.capacity_share * capacities[scenario])


def _learned(name: str, scenario: Scenario, comparison: Comparison, run: Runner) -> Row:
    [policy] = parse_policies(FAVOURITE)
    [right] = run([Task(dataclasses.replace(scenario, prior_error=1.0), policy)])
    return learned(name, comparison.runs[FAVOURITE][0], right, comparison.noise_floor)
