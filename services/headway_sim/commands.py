"""`headway sim …`: the simulator on the command line."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import typer
from headway_scheduler.admission.holds import HoldOrder
from headway_scheduler.core import EVERYTHING, Learned
from rich import box
from rich.console import Console
from rich.table import Table

from headway_sim.decisions.command import decisions
from headway_sim.simulation.compare import Comparison, compare, sweep
from headway_sim.simulation.fleet import FleetError
from headway_sim.simulation.metrics import Figures
from headway_sim.simulation.parallel import ProcessRunner, cores
from headway_sim.simulation.policies import PolicyError, parse_policies
from headway_sim.simulation.report import describe, write_report
from headway_sim.simulation.scenario import Runner, Scenario, ScenarioError
from headway_sim.simulation.search import find_goodputs, find_overload
from headway_sim.simulation.tenancy import Tenancy, compare_tenants
from headway_sim.simulation.tune import tune
from headway_sim.traces import TraceError, TraceFormat
from headway_sim.workloads import MIXED, OVERLOAD, WORKLOADS

__all__ = ["sim_app"]

sim_app = typer.Typer(
    name="sim",
    help="Simulate a fleet in virtual time, routed by the scheduler's own objects.",
    no_args_is_help=True,
    add_completion=False,
)
sim_app.command()(decisions)

Times = Literal["ttft_ms", "tpot_ms", "e2e_ms", "hold_ms"]
Statistic = Literal["mean", "p50", "p90", "p99", "max"]


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
    typer.Option(
        help="A trace (Mooncake, ShareGPT or plain JSONL, Azure CSV, a scheduler's export; .gz; or a folder)."
    ),
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
    policies: Annotated[
        str | None, typer.Option(help="As in other commands; `all` by default, `adaptive` with mixed-tenants.")
    ] = None,
    hold_order: Annotated[HoldOrder, typer.Option(help="In which order held requests are served.")] = HoldOrder.FAIR,
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
        hold_order=hold_order,
    )
    mixed = workload == MIXED
    with _usage_errors():
        scenario.check()
        chosen = parse_policies(policies or ("adaptive" if mixed else "all"))
        with ProcessRunner(jobs or cores()) as runner:
            scenario = _at_overload(scenario, runner.run)
            comparison = compare(scenario, chosen, seeds, runner.run)
            tenancy = compare_tenants(chosen[0], seeds, runner.run) if mixed else None
            loads = sweep(scenario, chosen, runner.run) if out is not None else []
    if out is not None:
        write_report(out, describe(scenario), comparison, loads)
        _console.print(f"wrote {out / 'index.html'}")
    _print(comparison, output, tenancy)


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


def _print(comparison: Comparison, output: Output, tenancy: Tenancy | None) -> None:
    if output is Output.JSON:
        document = comparison.document() | ({} if tenancy is None else {"tenants": tenancy})
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console()
    columns = [column for column in _COLUMNS if column.narrow or console.width >= _WIDE]
    table = Table(title=f"noise floor {comparison.noise_floor:.1%} of the mean TTFT", box=box.SIMPLE, pad_edge=False)
    table.add_column("policy", overflow="fold", min_width=8)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    bound = comparison.lower_bound
    table.add_row("(lower bound)", *(column.of_bound(bound) for column in columns))
    for name, found in sorted(comparison.figures.items(), key=lambda item: item[1]["ttft_ms"]["mean"] or 0.0):
        table.add_row(name, *(column.of(found) for column in columns))
    console.print(table)
    if tenancy is not None:
        _print_tenancy(console, tenancy)
    if len(columns) < len(_COLUMNS):
        _console.print(f"{len(_COLUMNS)} columns on a terminal of {_WIDE} characters; everything with -o json")


def _print_tenancy(console: Console, tenancy: Tenancy) -> None:
    quiet = tenancy["quiet"]
    table = Table(title="a quiet tenant beside a flood, and equal tenants", box=box.SIMPLE, pad_edge=False)
    for heading in ("order", "quiet p99", "noisy p99", "tokens/s", "hits", "Jain"):
        table.add_column(heading, justify="left" if heading == "order" else "right")
    for order, found in tenancy["orders"].items():
        table.add_row(
            order,
            _ms(found["quiet_ttft_p99_ms"]),
            _ms(found["noisy_ttft_p99_ms"]),
            f"{found['tokens_per_s']:,.0f}",
            _share(found["hit_ratio"]),
            _share(found["jain"], ".3f"),
        )
    console.print(table)
    for kind, ratio in quiet["ttft_p99_vs_alone"].items():
        alone, beside = quiet["ttft_p99_alone_ms"][kind], quiet["ttft_p99_ms"][kind]
        console.print(f"quiet, {kind}: p99 TTFT {alone:,.0f} ms alone, {beside:,.0f} ms beside the flood: {ratio:.2f}")
    console.print(f"shared: at most 1.5 times alone and one window, {quiet['shared_limit_ms']:,.0f} ms")
    console.print(
        f"fair share: {tenancy['throughput_vs_unfair']:.3f} of the best unfair throughput, "
        f"{tenancy['hit_points_vs_unfair']:+.1f} points of hits, Jain {tenancy['jain']:.3f}"
    )


class _Column(NamedTuple):
    """A column of `headway sim run`; `narrow`: also shown where there is little room."""

    heading: str
    of: Callable[[Figures], str]
    of_bound: Callable[[Mapping[str, Any]], str] = lambda _bound: ""
    narrow: bool = False


def _time(heading: str, what: Times, key: Statistic, *, narrow: bool = False, bounded: bool = True) -> _Column:
    def of_bound(bound: Mapping[str, Any]) -> str:  # the results' JSON
        return _ms(bound[what][key]) if bounded else ""

    return _Column(heading, lambda found: _ms(found[what][key]), of_bound, narrow)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _share(value: float | None, shown: str = ".1%") -> str:
    return "" if value is None else format(value, shown)


_WIDE: Final = 140
_COLUMNS: Final = (
    _time("TTFT ms", "ttft_ms", "mean", narrow=True),
    _time("p50", "ttft_ms", "p50"),
    _time("p99", "ttft_ms", "p99", narrow=True),
    _time("TPOT ms", "tpot_ms", "mean", narrow=True),
    _time("E2E ms", "e2e_ms", "mean"),
    _Column("hits", lambda found: _share(found["hit_ratio"]), lambda bound: _share(bound["hit_ratio"]), narrow=True),
    _Column("refused", lambda found: _share(found["rejected_ratio"]), narrow=True),
    _Column("req/s", lambda found: _share(found["requests_per_s"], ".2f")),
    _Column("KV use", lambda found: _share(found["kv_use_mean"], ".0%")),
    _Column("spread", lambda found: _share(found["spread"], ".2f")),
    _time("held p99", "hold_ms", "p99", bounded=False),
    _Column("/ round robin", lambda found: _share(found["vs_round_robin"], ".3f"), narrow=True),
)


@sim_app.callback()
def _sim() -> None:
    """Simulate a fleet in virtual time, routed by the scheduler's own objects."""
