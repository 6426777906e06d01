"""THE list of setups that Headway's decisions are judged on (issue "A calibrated fleet simulator…", Must show)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headway_sim.decisions.rows import FAVOURITE, LMETRIC, Judge, against_best, against_lmetric, article, overload, tail
from headway_sim.policies.catalog import PEERS
from headway_sim.simulation.policies import BASELINE, parse_policies
from headway_sim.simulation.scenario import Runner, Scenario, Task
from headway_sim.workloads import OVERLOAD

__all__ = ["ALL_PEERS", "GOODPUT_MS", "MIXED_FLEET", "Setup", "Traces", "capacity", "setups"]

GOODPUT_MS: Final = 500.0
MIXED_FLEET: Final = "4xa100-40g-8b+2xh100-8b+2xcpu-8b"
_SHARES: Final = (0.5, 0.9)
ALL_PEERS: Final = ",".join((*PEERS, FAVOURITE))
_AT_ONCE: Final = 1000.0
"""A rate at which a trace's requests arrive as good as together."""


@dataclass(frozen=True, slots=True)
class Traces:
    """The public traces, where they are at hand."""

    mooncake: Path | None = None
    azure_conv: Path | None = None
    azure_code: Path | None = None

    @staticmethod
    def of(folder: Path | None) -> "Traces":
        """Those of a folder, by their published names."""

        def find(pattern: str) -> Path | None:
            return None if folder is None else next(iter(sorted(folder.glob(pattern))), None)

        return Traces(find("mooncake_conv*.jsonl*"), find("Azure*conv*.csv*"), find("Azure*code*.csv*"))


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario that all peers are run on, and what is asked of adaptive there.

    `capacity_share` > 0: the rate is this share of what the fleet can do, found first. `policies` are run on it.
    """

    name: str
    scenario: Scenario
    judges: tuple[Judge, ...]
    capacity_share: float = 0.0
    policies: str = ALL_PEERS


def setups(traces: Traces, limit: int | None) -> Iterator[Setup]:
    """All of them; those of traces only where the trace is at hand.

    Mooncake's is cut to `limit` requests; the others, which show the same with fewer, to half as many.
    """
    half = None if limit is None else max(1, limit // 2)
    yield Setup("article", Scenario(workload="article"), (article,))
    if traces.mooncake is not None:
        base = Scenario(trace=traces.mooncake, limit=limit)
        for rate in (0.3, 0.5, 0.7):
            yield Setup(f"mooncake rate {rate:g}", base.at_rate(rate), (against_best(aim=0.97),))
        yield Setup("mooncake rate 1", base, (against_lmetric(0.80, 0.72), tail))
        big = replace(base, cache_scale=5.0)
        yield Setup("mooncake cache x 5, rate 1.2", big.at_rate(1.2), (against_lmetric(0.90, 0.85),))
        twice = replace(big, fleet="16xa100-40g-8b")
        yield Setup("mooncake 16 engines, cache x 5, rate 2", twice.at_rate(2.0), (against_best(aim=0.95),))
    for workload in ("shared-system-prompt", "bursty", "agentic"):
        yield Setup(workload, Scenario(workload=workload, limit=half), (against_best(aim=0.9),))
    for name, trace in (("Azure conv", traces.azure_conv), ("Azure code", traces.azure_code)):
        if trace is not None:
            for share in _SHARES:
                scenario = Scenario(trace=trace, limit=half)
                yield Setup(f"{name} at {share:g} of capacity", scenario, (against_best(),), share)
    mixed = Scenario(workload="agentic", limit=limit, rate=0.5)
    if traces.mooncake is not None:
        mixed = Scenario(trace=traces.mooncake, limit=limit, rate=0.5)
    mixed = replace(mixed, fleet=MIXED_FLEET, prior_error=2.0)
    yield Setup("mixed fleet, priors wrong by 2", mixed, (against_lmetric(0.75),))
    few = ",".join((BASELINE, LMETRIC, FAVOURITE))
    yield Setup(OVERLOAD, Scenario(workload=OVERLOAD), (overload,), policies=few)


def capacity(scenario: Scenario, run: Runner) -> float:
    """The rate at which the scenario's requests come as fast as the fleet answers them when all arrive at once."""
    policies = parse_policies("least_request")
    [rushed] = run([Task(replace(scenario, rate=_AT_ONCE, max_wait_s=1e6), policies[0])])
    arrivals_ms = [at for at, _ in scenario.at_rate(1.0).source().arrivals()]
    own_per_s = len(arrivals_ms) / (arrivals_ms[-1] - arrivals_ms[0]) * 1e3
    return len(rushed.ttft_ms) / rushed.duration_s / own_per_s
