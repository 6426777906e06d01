"""`headway up`, `demo` and `replay`: Headway on this machine."""

import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from headway_sim.driver import Summary, Target, summarise
from headway_sim.traces import TraceError, load_trace
from headway_sim.workloads import ArticleWorkload
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headway_cli.local.demo import DemoOptions, run_demo
from headway_cli.local.load import replay as replay_trace
from headway_cli.local.load import reservations_left, target_of
from headway_cli.local.processes import LocalStackError
from headway_cli.local.stack import LocalStack, NodeOptions, StackOptions

__all__ = ["register"]

_FLIP_WORKLOAD: Final = ArticleWorkload(sessions=30, turns=4, output_tokens=200, seed=2)

DataDir = Annotated[
    Path | None,
    typer.Option(envvar="HEADWAY_DATA_DIR", help="Where Postgres, logs and ports go; demo and replay clean theirs up"),
]
Output = Annotated[str, typer.Option("-o", "--output", help="table or json", metavar="table|json")]
Speedup = Annotated[float, typer.Option(min=0.1, max=1000, help="How much faster than life the engines run")]


def register(app: typer.Typer) -> None:
    """Add the commands to the `headway` command line."""
    app.command()(up)
    app.command()(demo)
    app.command()(replay)


def up(
    data_dir: DataDir = None,
    engines: Annotated[int, typer.Option(min=1, max=64, help="Emulated engines on each of the two nodes")] = 4,
    hardware: Annotated[str, typer.Option(help="Key of the emulated hardware")] = "a100-40g-8b",
    model: Annotated[str, typer.Option(help="Name of the model they serve")] = "demo-8b",
    speedup: Speedup = 1.0,
    scheduler_port: Annotated[int, typer.Option(min=0, max=65535)] = 7070,
    gateway_port: Annotated[int, typer.Option(min=0, max=65535)] = 8080,
) -> None:
    """Start the local stack and keep it until Ctrl-C.

    Postgres, scheduler, two agents with simulated GPUs, emulated engines and a gateway.

    Example: headway up --speedup 4
    """
    console = Console(stderr=True)
    options = StackOptions(
        data_dir or Path(".headway"),
        nodes=(NodeOptions("node-a", "gold", engines), NodeOptions("node-b", "silver", engines)),
        hardware=hardware,
        model=model,
        speedup=speedup,
        scheduler_port=scheduler_port,
        gateway_port=gateway_port,
    )
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stopped.set())
    with _told(console), LocalStack(options) as stack:
        console.print(f"gateway    {stack.gateway_url}/v1   model {model}, no key needed", highlight=False)
        console.print(f"scheduler  {stack.scheduler_address}   gRPC, for `headway` and data planes", highlight=False)
        console.print(f"metrics    http://127.0.0.1:{stack.http_port}/metrics", highlight=False)
        console.print(f"logs       {stack.run_dir}", highlight=False)
        console.print("Ctrl-C stops everything.")
        while not stopped.wait(0.5):
            for process in stack.processes:
                process.check()


def demo(
    output: Output = "table",
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png")] = Path("build/demo"),
    data_dir: DataDir = None,
    speedup: Speedup = 4.0,
    sessions: Annotated[int, typer.Option(min=2, max=62)] = 60,
    turns: Annotated[int, typer.Option(min=1, max=20)] = 5,
    concurrency: Annotated[int, typer.Option(min=1, max=200)] = 20,
    output_tokens: Annotated[int, typer.Option(min=1, max=4000)] = 800,
) -> None:
    """Show what Headway is worth: the article's load under round robin, then adaptive, on eight emulated GPUs.

    Then the strategy is changed again and again under load, and nothing may be lost.

    Example: headway demo -o json
    """
    _check_output(output)
    console = Console(stderr=True)
    workload = ArticleWorkload(sessions=sessions, turns=turns, concurrency=concurrency, output_tokens=output_tokens)
    with _told(console), _directory(data_dir) as directory:
        options = DemoOptions(directory, out, speedup, workload, _FLIP_WORKLOAD)
        raise typer.Exit(run_demo(options, output, console))


def replay(
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="Mooncake, Azure, ShareGPT or plain JSONL; may be .gz")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests")] = None,
    rate: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Arrivals this much denser, in the engines' time")
    ] = 1,
    output: Output = "table",
    strategy: Annotated[str, typer.Option(help="Strategy to route with")] = "adaptive",
    engines: Annotated[int, typer.Option(min=1, max=64, help="Emulated engines in all")] = 8,
    hardware: Annotated[str, typer.Option(help="Key of the emulated hardware")] = "a100-40g-8b",
    speedup: Speedup = 4.0,
    data_dir: DataDir = None,
) -> None:
    """Send a trace's requests through gateway, scheduler and emulated engines.

    Example: headway replay conversation.jsonl --limit 300 --rate 0.5 -o json
    """
    _check_output(output)
    console = Console(stderr=True)
    try:
        requests = load_trace(trace, limit=limit)
    except (TraceError, OSError) as error:
        console.print(f"[red]trace:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    with _told(console), _directory(data_dir) as directory:
        nodes = (NodeOptions("node-a", "gold", engines),)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with (
            Progress(*columns, console=console) as progress,
            LocalStack(StackOptions(directory, nodes=nodes, hardware=hardware, speedup=speedup)) as stack,
        ):
            stack.use_strategy(strategy)
            bar = progress.add_task(f"replaying {trace.name}", total=len(requests))
            target: Target = target_of(stack)
            result = replay_trace(target, requests, rate * speedup, lambda _: progress.advance(bar))
            left = reservations_left(lambda: stack.status().reservations)
    summary = summarise(result, speedup=speedup)
    _print_replay(summary, left, output)
    raise typer.Exit(0 if summary["lost"] == 0 and left == 0 else 1)


def _print_replay(summary: Summary, left: int, output: str) -> None:
    names = ("requests", "ok", "refused", "lost")
    if output == "json":
        figures = {name: summary[name] for name in names}  # type: ignore[literal-required]
        figures |= {"reservations_left": left}
        figures |= {name: summary[name] for name in ("ttft_ms", "hit_ratio", "requests_per_s", "statuses")}
        print(json.dumps(figures, indent=2))
        return
    table = Table()
    for name in (*names, "reservations left", "TTFT mean / p50 / p99, ms", "KV hit ratio, %"):
        table.add_column(name, justify="right")
    ttft = summary["ttft_ms"]
    table.add_row(
        *(str(summary[name]) for name in names),  # type: ignore[literal-required]
        str(left),
        " / ".join("-" if value is None else f"{value:,.0f}" for value in (ttft["mean"], ttft["p50"], ttft["p99"])),
        "unknown" if summary["hit_ratio"] is None else f"{100 * summary['hit_ratio']:.1f}",
    )
    Console().print(table)


def _check_output(output: str) -> None:
    if output not in ("table", "json"):
        raise typer.BadParameter(f"{output!r} is neither table nor json", param_hint="--output")


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """Say in one line why the local stack failed, and exit with 1."""
    try:
        yield
    except LocalStackError as error:
        console.print(f"[red]local stack:[/] {error}", highlight=False)
        raise typer.Exit(1) from None


@contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    """The folder given, or one that lives as long as the command."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="headway-") as made:
        yield Path(made)
