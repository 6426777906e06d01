"""What is simulated, as one writes it on the command line, and what it takes to run it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from headway_scheduler.admission.holds import HoldOrder
from headway_scheduler.core import EVERYTHING, Learned
from headway_scheduler.domain.names import DEFAULT_TENANT

from headway_sim.simulation.fleet import parse_fleet
from headway_sim.simulation.jobs import SessionSource, Source, TraceSource
from headway_sim.simulation.metrics import Measured, measure
from headway_sim.simulation.policies import catalogue
from headway_sim.simulation.router import Policy
from headway_sim.simulation.simulator import OnProgress, Setup, simulate
from headway_sim.traces import TraceFormat, TraceRequest, load_trace
from headway_sim.workloads import WORKLOADS

__all__ = ["Scenario", "ScenarioError", "Task", "run_task"]


class ScenarioError(ValueError):
    """A scenario that makes no sense; says why."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace or a workload, a fleet, and how the scheduler sees it. Small: workers load the rest themselves.

    `limit` keeps so many requests, after `skip` of a trace. `rate` scales arrivals. `waiting_limit` None: the
    workload's own. `open_loop`: a closed loop's sessions arrive by themselves instead. What arrives in the first
    `warmup_s` is served, but counts in no figure. Nor does what arrives after `until_s`.
    `dedicated`: tenants with so many engines to themselves.
    """

    trace: Path | None = None
    trace_format: TraceFormat | None = None
    workload: str | None = None
    workload_seed: int = 0
    fleet: str = "8xa100-40g-8b"
    cache_scale: float = 1.0
    rate: float = 1.0
    limit: int | None = None
    skip: int = 0
    telemetry_period_s: float = 1.0
    telemetry_delay_s: float = 0.0
    max_wait_s: float = 30.0
    waiting_limit: int | None = None
    prior_error: float = 1.0
    learn: frozenset[Learned] = EVERYTHING
    warmup_s: float = 0.0
    open_loop: bool = False
    dedicated: tuple[tuple[str, int], ...] = ()
    hold_order: HoldOrder = HoldOrder.FAIR
    until_s: float | None = None

    def check(self) -> None:
        """Raise ScenarioError, FleetError or TraceError unless it can be run."""
        if (self.trace is None) == (self.workload is None):
            raise ScenarioError("give a trace or a workload, one of them")
        if self.workload is not None and self.workload not in WORKLOADS:
            raise ScenarioError(f"workload {self.workload!r} is none of {', '.join(WORKLOADS)}")
        if self.workload is not None and self.skip:
            raise ScenarioError("skip is of traces; a workload has no beginning to leave out")
        if not 0 < self.rate < float("inf"):
            raise ScenarioError("rate must be positive")
        if self.limit is not None and self.limit < 1:
            raise ScenarioError("limit must be positive")
        if self.skip < 0:
            raise ScenarioError("skip must not be negative")
        if self.telemetry_period_s < 0 or self.telemetry_delay_s < 0:
            raise ScenarioError("telemetry's period and delay must not be negative")
        if self.warmup_s < 0:
            raise ScenarioError("warmup must not be negative")
        if self.prior_error <= 0:
            raise ScenarioError("prior-error must be positive")
        parse_fleet(self.fleet, cache_scale=self.cache_scale)
        if self.trace is not None:
            _trace(self.trace, self.trace_format, self.skip, self.limit)

    @property
    def is_closed_loop(self) -> bool:
        """Does the next request wait for an answer, so that there is no rate to speak of?"""
        if self.workload is None or (self.open_loop and WORKLOADS[self.workload].open_loop is not None):
            return False
        return WORKLOADS[self.workload].make(self.workload_seed).concurrency is not None

    def source(self) -> Source:
        """The requests, afresh."""
        if self.trace is not None:
            return TraceSource(_trace(self.trace, self.trace_format, self.skip, self.limit), self.rate)
        named = WORKLOADS[self.workload or ""]
        make = named.open_loop if self.open_loop and named.open_loop is not None else named.make
        return SessionSource(make(self.workload_seed), self.rate, self.limit)

    def setup(self, seed: int = 0, *, reordered: bool = False) -> Setup:
        """The fleet and how it is seen."""
        tenants: tuple[str, ...] = (DEFAULT_TENANT,)
        waiting_limit = self.waiting_limit
        if self.trace is not None:
            requests = _trace(self.trace, self.trace_format, self.skip, self.limit)
            tenants = tuple(sorted({request.tenant or DEFAULT_TENANT for request in requests}))
        if self.workload is not None:
            named = WORKLOADS[self.workload]
            tenants = named.tenants
            waiting_limit = named.waiting_limit if waiting_limit is None else waiting_limit
        return Setup(
            engines=parse_fleet(self.fleet, cache_scale=self.cache_scale),
            tenants=tenants,
            dedicated=dict(self.dedicated),
            hold_order=self.hold_order,
            telemetry_period_ms=self.telemetry_period_s * 1e3,
            telemetry_delay_ms=self.telemetry_delay_s * 1e3,
            waiting_limit=waiting_limit,
            max_wait_s=self.max_wait_s,
            prior_error=self.prior_error,
            learn=self.learn,
            seed=seed,
            reordered=reordered,
        )

    def at_rate(self, rate: float) -> "Scenario":
        """The same at another rate."""
        return replace(self, rate=rate)


@dataclass(frozen=True, slots=True)
class Task:
    """One run: a policy on a scenario with a roll of the dice."""

    scenario: Scenario
    policy: Policy
    seed: int = 0
    reordered: bool = False


def run_task(task: Task, on_progress: OnProgress | None = None) -> Measured:
    """Run it here."""
    setup = task.scenario.setup(task.seed, reordered=task.reordered)
    run = simulate(task.policy, catalogue(), task.scenario.source(), setup, on_progress)
    until_s = task.scenario.until_s
    return measure(run, task.scenario.warmup_s * 1e3, None if until_s is None else until_s * 1e3)


@cache
def _trace(path: Path, trace_format: TraceFormat | None, skip: int, limit: int | None) -> list[TraceRequest]:
    requests = load_trace(path, trace_format=trace_format, limit=None if limit is None else skip + limit)[skip:]
    if not requests:
        raise ScenarioError(f"{path} has no request after the first {skip}")
    start_ms = requests[0].arrival_ms
    return [replace(request, arrival_ms=request.arrival_ms - start_ms) for request in requests]


Runner = Callable[[list[Task]], list[Measured]]
"""Runs tasks, in parallel if it can, and returns their results in order."""
