"""`headway sim …`: the simulator on the command line."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from headway_scheduler.core import EVERYTHING, Learned
from rich.console import Console
from rich.table import Table

from headway_sim.simulation.compare import Comparison, compare, sweep
from headway_sim.simulation.fleet import FleetError
from headway_sim.simulation.metrics import Distribution
from headway_sim.simulation.parallel import ProcessRunner, cores
from headway_sim.simulation.policies import PolicyError, parse_policies
from headway_sim.simulation.report import describe, write_report
from headway_sim.simulation.scenario import Runner, Scenario, ScenarioError
from headway_sim.simulation.search import find_goodputs, find_overload
from headway_sim.simulation.tune import tune
from headway_sim.traces import TraceError, TraceFormat
from headway_sim.workloads import OVERLOAD, WORKLOADS

__all__ = ["sim_app"]

sim_app = typer.Typer(
    name="sim",
    help="Simulate a fleet in virtual time, routed by the scheduler's own objects.",
    no_args_is_help=True,
)


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


class Learning(StrEnum):
    """Which of adaptive's learning is on."""

    ALL = "all"
    COSTS = "costs"
    HISTORY = "history"
    NONE = "none"

    @property
    def parts(self) -> frozenset[Learned]:
        """As the scheduler has it."""
        if self is Learning.NONE:
            return frozenset()
        return EVERYTHING if self is Learning.ALL else frozenset({Learned(self.value)})


TraceOption = Annotated[
    Path | None,
    typer.Option(help="A trace (Mooncake JSONL, Azure CSV, ShareGPT token JSONL, plain JSONL; .gz; or a folder)."),
]
FormatOption = Annotated[TraceFormat | None, typer.Option("--format", help="The trace's format; detected by default.")]
WorkloadOption = Annotated[str | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")]
FleetOption = Annotated[str, typer.Option(help="COUNTxHARDWARE, mixed with +: 4xa100-40g-8b+2xh100-8b+2xcpu-8b.")]
CacheScaleOption = Annotated[float, typer.Option(help="KV memory times this, for a host-memory tier.")]
RateOption = Annotated[float, typer.Option(help="Arrivals come so many times as fast.")]
LimitOption = Annotated[int | None, typer.Option(help="So many requests.")]
SkipOption = Annotated[int, typer.Option(help="Leave out the trace's first requests.")]
SeedsOption = Annotated[int, typer.Option(min=1, help="Run every policy with so many seeds.")]
WorkloadSeedOption = Annotated[int, typer.Option(help="The seed of a workload's own dice.")]
PoliciesOption = Annotated[
    str, typer.Option(help="`a,b` or `all`; parameters as adaptive:externality=0.2:other=value.")
]
PeriodOption = Annotated[float, typer.Option(help="Seconds between an agent's samples; 0: always fresh.")]
DelayOption = Annotated[float, typer.Option(help="Seconds a sample takes to arrive.")]
MaxWaitOption = Annotated[float, typer.Option(help="Seconds a request may be held.")]
WaitingLimitOption = Annotated[int | None, typer.Option(help="An engine refuses beyond so many waiting requests.")]
PriorErrorOption = Annotated[float, typer.Option(help="Believe every other endpoint so many times slower, or faster.")]
LearnOption = Annotated[Learning, typer.Option(help="What the scheduler may learn from reports.")]
WarmupOption = Annotated[
    float, typer.Option(help="Leave the requests of the first so many seconds out of the figures.")
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="What is printed.")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes; as many as there are cores by default.")]
OutOption = Annotated[Path | None, typer.Option(help="Write results.json, plots and index.html into this folder.")]


@sim_app.command()
def run(
    trace: TraceOption = None,
    trace_format: FormatOption = None,
    workload: WorkloadOption = None,
    fleet: FleetOption = "8xa100-40g-8b",
    cache_scale: CacheScaleOption = 1.0,
    rate: RateOption = 1.0,
    limit: LimitOption = None,
    skip: SkipOption = 0,
    workload_seed: WorkloadSeedOption = 0,
    telemetry_period: PeriodOption = 1.0,
    telemetry_delay: DelayOption = 0.0,
    max_wait: MaxWaitOption = 30.0,
    waiting_limit: WaitingLimitOption = None,
    prior_error: PriorErrorOption = 1.0,
    learn: LearnOption = Learning.ALL,
    warmup: WarmupOption = 0.0,
    output: OutputOption = Output.TABLE,
    jobs: JobsOption = None,
    policies: PoliciesOption = "all",
    seeds: SeedsOption = 1,
    out: OutOption = None,
) -> None:
    """Run policies side by side on a trace or a workload."""
    scenario = Scenario(
        trace=trace,
        trace_format=trace_format,
        workload=workload,
        workload_seed=workload_seed,
        fleet=fleet,
        cache_scale=cache_scale,
        rate=rate,
        limit=limit,
        skip=skip,
        telemetry_period_s=telemetry_period,
        telemetry_delay_s=telemetry_delay,
        max_wait_s=max_wait,
        waiting_limit=waiting_limit,
        prior_error=prior_error,
        learn=learn.parts,
        warmup_s=warmup,
    )
    with _usage_errors():
        scenario.check()
        chosen = parse_policies(policies)
        with ProcessRunner(jobs or cores()) as runner:
            scenario = _at_overload(scenario, runner.run)
            comparison = compare(scenario, chosen, seeds, runner.run)
            loads = sweep(scenario, chosen, runner.run) if out is not None else []
    if out is not None:
        write_report(out, describe(scenario), comparison, loads)
        _console.print(f"wrote {out / 'index.html'}")
    _print(comparison, output)


@sim_app.command()
def goodput(
    slo: Annotated[float, typer.Option(min=0.0, help="The p95 of TTFT must be at most so many milliseconds.")],
    trace: TraceOption = None,
    trace_format: FormatOption = None,
    workload: WorkloadOption = None,
    fleet: FleetOption = "8xa100-40g-8b",
    cache_scale: CacheScaleOption = 1.0,
    rate: RateOption = 1.0,
    limit: LimitOption = None,
    skip: SkipOption = 0,
    workload_seed: WorkloadSeedOption = 0,
    telemetry_period: PeriodOption = 1.0,
    telemetry_delay: DelayOption = 0.0,
    max_wait: MaxWaitOption = 30.0,
    waiting_limit: WaitingLimitOption = None,
    prior_error: PriorErrorOption = 1.0,
    learn: LearnOption = Learning.ALL,
    warmup: WarmupOption = 0.0,
    output: OutputOption = Output.TABLE,
    jobs: JobsOption = None,
    policies: PoliciesOption = "all",
) -> None:
    """The highest rate at which each policy keeps refusals at most 2 % and the p95 of TTFT within the objective.

    The article's closed loop has no rate: its sessions arrive by themselves here, at `rate` a second to begin with.
    """
    scenario = Scenario(
        trace=trace,
        trace_format=trace_format,
        workload=workload,
        workload_seed=workload_seed,
        fleet=fleet,
        cache_scale=cache_scale,
        rate=rate,
        limit=limit,
        skip=skip,
        telemetry_period_s=telemetry_period,
        telemetry_delay_s=telemetry_delay,
        max_wait_s=max_wait,
        waiting_limit=waiting_limit,
        prior_error=prior_error,
        learn=learn.parts,
        warmup_s=warmup,
        open_loop=True,
    )
    with _usage_errors():
        scenario.check()
        chosen = parse_policies(policies)
        with ProcessRunner(jobs or cores()) as runner:
            found = find_goodputs(scenario, chosen, slo, runner.run)
    if output is Output.JSON:
        typer.echo(json.dumps({"policies": {name: dataclasses.asdict(each) for name, each in found.items()}}, indent=2))
        return
    table = Table(title=f"p95 TTFT at most {slo:g} ms, refusals at most 2 %")
    for heading in ("policy", "rate", "requests/s"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, each in sorted(found.items(), key=lambda item: -item[1].goodput_per_s):
        table.add_row(name, f"{each.rate:.3f}", f"{each.goodput_per_s:.2f}")
    Console().print(table)


@sim_app.command("tune")
def tune_command(
    trace: TraceOption = None,
    trace_format: FormatOption = None,
    workload: WorkloadOption = None,
    fleet: FleetOption = "8xa100-40g-8b",
    cache_scale: CacheScaleOption = 1.0,
    rate: RateOption = 1.0,
    limit: LimitOption = None,
    skip: SkipOption = 0,
    workload_seed: WorkloadSeedOption = 0,
    telemetry_period: PeriodOption = 1.0,
    telemetry_delay: DelayOption = 0.0,
    max_wait: MaxWaitOption = 30.0,
    waiting_limit: WaitingLimitOption = None,
    prior_error: PriorErrorOption = 1.0,
    learn: LearnOption = Learning.ALL,
    warmup: WarmupOption = 0.0,
    output: OutputOption = Output.TABLE,
    jobs: JobsOption = None,
    policy: Annotated[str, typer.Option(help="The policy, with the parameters to start from.")] = "adaptive",
    rounds: Annotated[int, typer.Option(min=1, help="Times around all parameters at most.")] = 2,
) -> None:
    """Search a strategy's parameters on a trace or a workload, and say what they gain."""
    scenario = Scenario(
        trace=trace,
        trace_format=trace_format,
        workload=workload,
        workload_seed=workload_seed,
        fleet=fleet,
        cache_scale=cache_scale,
        rate=rate,
        limit=limit,
        skip=skip,
        telemetry_period_s=telemetry_period,
        telemetry_delay_s=telemetry_delay,
        max_wait_s=max_wait,
        waiting_limit=waiting_limit,
        prior_error=prior_error,
        learn=learn.parts,
        warmup_s=warmup,
    )
    with _usage_errors():
        scenario.check()
        chosen = parse_policies(policy)
        if len(chosen) != 1:
            raise PolicyError("name one policy")
        with ProcessRunner(jobs or cores()) as runner:
            scenario = _at_overload(scenario, runner.run)
            tuned = tune(scenario, chosen[0], rounds, runner.run)
    if output is Output.JSON:
        typer.echo(json.dumps(dataclasses.asdict(tuned), indent=2))
        return
    settings = " ".join(f"{name}={value}" for name, value in tuned.parameters.items()) or "nothing better found"
    typer.echo(f"{chosen[0].name}: {settings}")
    typer.echo(f"mean TTFT {tuned.before_ms:,.1f} -> {tuned.after_ms:,.1f} ms, a gain of {tuned.gain:.1%}")
    typer.echo(f"noise floor {tuned.noise_floor:.1%}; {tuned.tried} settings tried")


_console = Console(stderr=True)


def _at_overload(scenario: Scenario, run: Runner) -> Scenario:
    """`article-overload` at the rate that is asked for: 1 is where round robin refuses 12 %."""
    if scenario.workload != OVERLOAD:
        return scenario
    found = find_overload(dataclasses.replace(scenario, rate=1.0), run)
    _console.print(f"round robin refuses 12 % at {found:.3f} sessions/s")
    return scenario.at_rate(found * scenario.rate)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What was asked for makes no sense: say so as the command line does."""
    try:
        yield
    except (FleetError, ScenarioError, PolicyError, TraceError) as error:
        raise typer.BadParameter(str(error)) from error


def _print(comparison: Comparison, output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps(comparison.document(), indent=2))
        return
    table = Table(title=f"noise floor {comparison.noise_floor:.1%} of the mean TTFT")
    table.add_column("policy")
    headings = (
        "TTFT ms",
        "p50",
        "p99",
        "TPOT ms",
        "E2E ms",
        "hits",
        "refused",
        "req/s",
        "KV use",
        "spread",
        "held p99",
    )
    for heading in (*headings, "vs round robin"):
        table.add_column(heading, justify="right")
    bound = comparison.lower_bound
    table.add_row("(lower bound)", *_times(bound["ttft_ms"]), *_means(bound), f"{bound['hit_ratio']:.1%}")
    for name, found in sorted(comparison.figures.items(), key=lambda item: item[1]["ttft_ms"]["mean"] or 0.0):
        ratio = found["vs_round_robin"]
        table.add_row(
            name,
            *_times(found["ttft_ms"]),
            _ms(found["tpot_ms"]["mean"]),
            _ms(found["e2e_ms"]["mean"]),
            f"{found['hit_ratio']:.1%}",
            f"{found['rejected_ratio']:.1%}",
            f"{found['requests_per_s']:.2f}",
            f"{found['kv_use_mean']:.0%}",
            f"{found['spread']:.2f}",
            _ms(found["hold_ms"]["p99"]),
            "" if ratio is None else f"{ratio:.3f}",
        )
    Console().print(table)


def _times(times: Distribution) -> tuple[str, str, str]:
    return _ms(times["mean"]), _ms(times["p50"]), _ms(times["p99"])


def _means(bound: dict[str, Distribution]) -> tuple[str, str]:
    return _ms(bound["tpot_ms"]["mean"]), _ms(bound["e2e_ms"]["mean"])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


@sim_app.callback()
def _sim() -> None:
    """Simulate a fleet in virtual time, routed by the scheduler's own objects."""
