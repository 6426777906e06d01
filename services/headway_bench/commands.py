"""`headway bench …` on the command line."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from headway_cli.local.processes import LocalStackError
from headway_scheduler.native import VARIABLE, why_interpreted
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from headway_bench.console import ConsoleSettings, measure_console
from headway_bench.envoy import EnvoyBench, EnvoySettings
from headway_bench.figures import BenchError, Json
from headway_bench.flame import Stack, flame_graph, sampled
from headway_bench.idle_fleet import IdleSettings, measure_idle
from headway_bench.inproc import InprocSettings, measure_inproc
from headway_bench.kv import KvSettings, measure_kv
from headway_bench.processes import run_json
from headway_bench.real.run import RealSettings, run_real, shortcomings
from headway_bench.route import RouteSettings, measure_route
from headway_bench.takeover import How, TakeoverBench, TakeoverSettings
from headway_bench.telemetry import MixedSettings, TelemetrySettings, measure_mixed, measure_telemetry
from headway_bench.tenancy import TenancySettings, measure_tenancy

__all__ = ["bench_app"]

T = TypeVar("T")

_WIDE: Final = Console(width=10_000)
"""Shows how wide a table would like to be."""

bench_app = typer.Typer(
    name="bench",
    help="Measure whole processes on this machine: what a request costs, by their own accounting.",
    no_args_is_help=True,
    add_completion=False,
)


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


class Mode(StrEnum):
    """How requests come to the scheduler."""

    UNARY = "unary"
    CONNECT = "connect"
    STREAM = "stream"
    INPROC = "inproc"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print it.")]
PromptOption = Annotated[int, typer.Option(min=1, max=16_000_000, help="Of each prompt.")]
SecondsOption = Annotated[float, typer.Option(min=0.1, max=600.0, help="Of each loaded run.")]
NodesOption = Annotated[int, typer.Option(min=1, max=10_000, help="Agents.")]
DevicesOption = Annotated[int, typer.Option(min=1, max=64, help="Of each agent.")]
EnginesOption = Annotated[int, typer.Option(min=1, max=64, help="Of each agent, on its devices.")]


@bench_app.command()
def envoy(
    endpoints: Annotated[int, typer.Option(min=1, max=250, help="Engines in the fleet.")] = 100,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="Of the loaded runs.")] = 16,
    seconds: SecondsOption = 5.0,
    prompt_bytes: PromptOption = 2048,
    output: OutputOption = Output.TABLE,
) -> None:
    """Envoy with one worker, straight and with Headway as its picker: requests a second, latency, CPU a request."""
    settings = EnvoySettings(endpoints, connections, seconds, prompt_bytes)
    _print(_found(EnvoyBench(settings).run()), output)


@bench_app.command()
def route(
    mode: Annotated[
        Mode, typer.Option(help="A call each, by gRPC or by Connect, one coalesced stream, or no wire at all.")
    ] = Mode.STREAM,
    endpoints: Annotated[int, typer.Option(min=1, max=50_000, help="Engines in the fleet.")] = 100,
    prompt_bytes: PromptOption = 2048,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Requests in flight.")] = 64,
    strategy: Annotated[str, typer.Option(help="What decides.")] = "adaptive",
    auth: Annotated[bool, typer.Option(help="Ask callers for credentials.")] = True,
    observability: Annotated[
        bool | None, typer.Option(help="inproc: with record and metrics, or without; by default both, in turns.")
    ] = None,
    flame: Annotated[Path | None, typer.Option(help="inproc: where to write a flame graph (SVG).")] = None,
    seconds: SecondsOption = 6.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Requests routed, reported first-token and finished, beside a bare gRPC echo of the same messages."""
    if mode is Mode.INPROC:
        if flame and not why_interpreted():
            raise typer.BadParameter(f"it is drawn of Python's frames: set {VARIABLE}=1", param_hint="--flame")
        inproc = InprocSettings(endpoints, prompt_bytes, concurrency, strategy, seconds, observability)
        with sampled("run") if flame else nullcontext(Counter[Stack]()) as stacks:
            _print(_checked(lambda: measure_inproc(inproc)), output)
        if flame:
            flame.write_text(flame_graph(stacks, f"A routed request in process, {endpoints} endpoints"))
    else:
        settings = RouteSettings(mode.value, endpoints, prompt_bytes, concurrency, strategy, auth, seconds)
        _print(_found(measure_route(settings)), output)


@bench_app.command()
def index(
    blocks: Annotated[int, typer.Option(min=1000, max=20_000_000, help="In all.")] = 1_000_000,
    endpoints: Annotated[int, typer.Option(min=1, max=50_000, help="That hold them.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """The prefix index: memory, matches, inserts, and how long dropping an endpoint stops everything else."""
    _print({"index": _found(run_json("headway_bench.index", blocks, endpoints))}, output)


@bench_app.command()
def kv(
    blocks_per_s: Annotated[float, typer.Option(min=0.0, max=1e6, help="Engine blocks stored by all.")] = 30_000.0,
    endpoints: Annotated[int, typer.Option(min=1, max=10_000, help="Engines in the fleet.")] = 100,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Agents.")] = 10,
    rate: Annotated[float, typer.Option(min=1.0, max=100_000.0, help="Routes a second.")] = 100.0,
    prompt_bytes: PromptOption = 2048,
    seconds: Annotated[float, typer.Option(min=0.5, max=600.0, help="Of all loaded rounds together.")] = 20.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """KV events into a scheduler: its CPU, and Routes of token ids with and without them, in turns."""
    _print(_found(measure_kv(KvSettings(blocks_per_s, endpoints, nodes, rate, prompt_bytes, seconds))), output)


@bench_app.command()
def tenancy(
    mode: Annotated[Mode, typer.Option(help="How requests come: stream or unary.")] = Mode.STREAM,
    endpoints: Annotated[int, typer.Option(min=1, max=50_000, help="Engines in the fleet.")] = 100,
    prompt_bytes: PromptOption = 2048,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Requests in flight.")] = 64,
    seconds: SecondsOption = 14.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """What credentials, quotas and fair shares cost a request: two schedulers, without and with them, in turns."""
    if mode is Mode.INPROC:
        raise typer.BadParameter("inproc knows no credentials", param_hint="--mode")
    settings = TenancySettings(mode.value, endpoints, prompt_bytes, concurrency, seconds)
    _print({"request": _found(measure_tenancy(settings))}, output)


@bench_app.command()
def soak(
    routes: Annotated[int, typer.Option(min=1000, max=100_000_000, help="In all.")] = 5_000_000,
    endpoints: Annotated[int, typer.Option(min=1, max=50_000, help="Engines in the fleet.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """Millions of requests that end in every way there is: memory stays flat, and nothing stays counted. No wire."""
    _print({"soak": _found(run_json("headway_bench.soak", routes, endpoints))}, output)


@bench_app.command()
def telemetry(
    nodes: NodesOption = 1250,
    devices: DevicesOption = 8,
    engines: EnginesOption = 8,
    hz: Annotated[float, typer.Option(min=0.01, max=100.0, help="Samples a second of each agent.")] = 1.0,
    seconds: SecondsOption = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """A fleet of agents on one scheduler: its cores and memory, and how long samples take to be acknowledged."""
    _print(_found(measure_telemetry(TelemetrySettings(nodes, devices, engines, hz, seconds))), output)


@bench_app.command()
def console(
    nodes: NodesOption = 125,
    devices: DevicesOption = 8,
    rate: Annotated[float, typer.Option(min=1.0, max=100_000.0, help="Routes a second.")] = 500.0,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="With and without, in turns.")] = 3,
    seconds: SecondsOption = 6.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """What an open console adds to the scheduler's CPU a request, while a fleet streams."""
    _print(_found(measure_console(ConsoleSettings(nodes, devices, rate, rounds, seconds))), output)


@bench_app.command()
def idle(
    endpoints: Annotated[int, typer.Option(min=1, max=250, help="Idle vLLM engines.")] = 100,
    per_agent: Annotated[int, typer.Option(min=1, max=64, help="Engines that each agent watches.")] = 8,
    interval_s: Annotated[float, typer.Option(min=0.05, max=60.0, help="Between samples.")] = 1.0,
    seconds: SecondsOption = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Real agents that watch idle engines: the CPU of all of them and of the scheduler together."""
    _print(_found(measure_idle(IdleSettings(endpoints, per_agent, interval_s, seconds))), output)


@bench_app.command()
def mixed(
    nodes: NodesOption = 1250,
    devices: DevicesOption = 8,
    engines: EnginesOption = 8,
    rate: Annotated[float, typer.Option(min=1.0, max=100_000.0, help="Routes a second.")] = 1000.0,
    mode: Annotated[
        Mode, typer.Option(help="One coalesced stream, or calls: Route and Report for each.")
    ] = Mode.STREAM,
    prompt_bytes: PromptOption = 2048,
    seconds: SecondsOption = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Routes at a fixed rate, while a fleet of agents streams and an admin writes: their latency, and the machine's."""
    if mode is Mode.INPROC:
        raise typer.BadParameter("inproc has no agents", param_hint="--mode")
    settings = MixedSettings(nodes, devices, engines, rate, mode.value, prompt_bytes, seconds)
    _print(_found(measure_mixed(settings)), output)


def _found(measuring: Awaitable[T]) -> T:
    async def run() -> T:
        return await measuring

    return _checked(lambda: asyncio.run(run()))


def _checked(measure: Callable[[], T]) -> T:
    try:
        return measure()
    except BenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _print(found: Json, output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(_table(found))


@bench_app.command()
def vllm(
    python: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="An interpreter that has vLLM for CPUs.")],
    engines: Annotated[int, typer.Option(min=1, max=16, help="Each takes some 2.4 GB of memory.")] = 4,
    sessions: Annotated[int, typer.Option(min=1, help="Of each measurement.")] = 10,
    turns: Annotated[int, typer.Option(min=1, max=20, help="Of each session.")] = 5,
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 2,
    opening_tokens: Annotated[int, typer.Option(min=128, max=6000, help="That a session opens with.")] = 4096,
    keep: Annotated[Path | None, typer.Option(help="A folder for logs and the engines' metrics.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TABLE,
) -> None:
    """Real vLLM engines: TTFT under round_robin and adaptive, through gateway and Envoy, without and with KV events."""
    settings = RealSettings(engines, sessions, turns, concurrency, opening_tokens)
    try:
        # As it was given: a virtual environment's interpreter is a link, and what it leads to has no vLLM.
        found = run_real(python.absolute(), settings, keep, lambda line: typer.echo(line, err=True))
    except LocalStackError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if output is Output.JSON:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(_real_table(found))
    lacking = shortcomings(found)
    for line in lacking:
        typer.echo(line, err=True)
    raise typer.Exit(1 if lacking else 0)


def _real_table(found: Json) -> Table:
    settings = found["settings"]
    title = (
        f"{settings['engines']} engines; {settings['sessions']} sessions of {settings['turns']} turns, "
        f"{settings['concurrency']} at a time, "
        f"opening with {settings['opening_tokens']} tokens"
    )
    known = found["known_after_scheduler_restart"]
    caption = f"Cached tokens known after a restart of the scheduler: {known['approximate']} without KV events, "
    caption += f"{known['kv_events']} of {known['of']} with them."
    columns = ("plane", "KV events", "strategy", "TTFT, ms", "p50", "p99", "hits", "gain")
    table = Table(*columns, title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    for row in found["measurements"]:
        times = row["ttft_ms"]
        figures = (times["mean"], times["p50"], times["p99"], row["hit_ratio"])
        events = "yes" if row["index"] == "kv_events" else "no"
        table.add_row(row["plane"], events, row["strategy"], *map(str, figures), str(row.get("gain", "")))
    return table


@bench_app.command()
def takeover(
    kills: Annotated[int, typer.Option(min=1, help="How often the leader is lost.")] = 20,
    how: Annotated[How, typer.Option(help="What happens to it.")] = How.KILL,
    lease_s: Annotated[float, typer.Option(min=0.2, max=60, help="The schedulers' lease.")] = 0.8,
    callers: Annotated[int, typer.Option(min=1, help="Who route one request after another.")] = 8,
    held: Annotated[int, typer.Option(min=1, help="Reservations that stay open all the time.")] = 20,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TABLE,
) -> None:
    """A leader killed, or stopped, under load: how long until its standby answers, and what is lost: nothing."""
    settings = TakeoverSettings(kills, how, lease_s, callers, held)
    found = asyncio.run(TakeoverBench(settings).run())
    if output is Output.JSON:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(_table(found))


def _table(found: Json) -> Table:
    """Each part that has figures of its own, and those that belong to none together: the way that is narrower."""
    parts = {name: part for name, part in found.items() if isinstance(part, dict) and name != "settings"}
    single = {name: value for name, value in found.items() if not isinstance(value, dict)}
    if single:
        parts["together"] = single
    figures = list(dict.fromkeys(figure for part in parts.values() for figure in part))
    downwards = _lined({figure: {name: part.get(figure, "") for name, part in parts.items()} for figure in figures})
    across = _lined({name: {figure: part.get(figure, "") for figure in figures} for name, part in parts.items()})
    return min(downwards, across, key=lambda table: Measurement.get(_WIDE, _WIDE.options, table).maximum)


def _lined(rows: dict[str, dict[str, object]]) -> Table:
    table = Table("", box=box.SIMPLE)
    for column in dict.fromkeys(column for row in rows.values() for column in row):
        table.add_column(column, justify="right", overflow="fold")
    for name, row in rows.items():
        table.add_row(name, *map(str, row.values()))
    return table
