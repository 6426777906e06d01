"""`headway up`, `demo` and `replay`: Headway on this machine.

What they need beyond the command line (engines, embedded Postgres, plots) is imported when they run.
"""

import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import grpc
import typer
from rich.console import Console

from headway_cli.command import command
from headway_cli.errors import NotInstalled, from_rpc
from headway_cli.local.processes import Process
from headway_cli.session import Session

__all__ = ["add_local_commands"]

_EXTRA: Final = "local"
_WATCH_S: Final = 0.5

DataDir = Annotated[
    Path | None,
    typer.Option(envvar="HEADWAY_DATA_DIR", help="Where Postgres, logs and ports go. Absent: a folder that goes away."),
]
Hardware = Annotated[str, typer.Option(help="Key of the emulated hardware.")]
Speedup = Annotated[float, typer.Option(min=0.1, max=1000, help="How much faster than life the engines run.")]


def add_local_commands(app: typer.Typer) -> None:
    """Add them to the command line."""
    command(
        app,
        "up",
        help="Start Postgres, scheduler, agents with simulated GPUs, engines and gateway; keep them until Ctrl-C.",
        example="headway up --speedup 4",
        offline=True,
    )(_up)
    command(
        app,
        "demo",
        help="Show what Headway is worth: the article's load under round robin, then adaptive, on eight emulated GPUs; "
        "then change the strategy under load and lose nothing.",
        example="headway demo -o json",
        offline=True,
    )(_demo)
    command(
        app,
        "replay",
        help="Send a trace's requests through gateway, scheduler and emulated engines.",
        example="headway replay conversation.jsonl --limit 300 --rate 0.5 -o json",
        offline=True,
    )(_replay)


def _up(
    _session: Session,
    data_dir: DataDir = None,
    engines: Annotated[int, typer.Option(min=1, max=64, help="Emulated engines on each of the two nodes.")] = 4,
    hardware: Hardware = "a100-40g-8b",
    model: Annotated[str, typer.Option(help="Name of the model they serve.")] = "demo-8b",
    speedup: Speedup = 1.0,
    scheduler_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7070,
    gateway_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
) -> None:
    with _installed():
        from headway_cli.local.stack import LocalStack, NodeOptions, StackOptions

    options = StackOptions(
        data_dir or Path(".headway"),
        nodes=(NodeOptions("node-a", "gold", engines), NodeOptions("node-b", "silver", engines)),
        hardware=hardware,
        model=model,
        speedup=speedup,
        scheduler_port=scheduler_port,
        gateway_port=gateway_port,
    )
    console = Console(stderr=True, highlight=False)
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stopped.set())
    with _calls_told(), LocalStack(options) as stack:
        for line in (
            f"gateway    {stack.gateway_url}/v1   model {model}, no key needed",
            f"scheduler  {stack.scheduler_address}   gRPC, for `headway` and data planes",
            f"console    http://127.0.0.1:{stack.http_port}/console   the fleet and its traffic, in a browser",
            f"metrics    http://127.0.0.1:{stack.http_port}/metrics",
            f"logs       {stack.run_dir}",
            "Ctrl-C stops everything.",
        ):
            console.print(line, soft_wrap=True, markup=False)
        told: set[str] = set()
        while not stopped.wait(_WATCH_S):
            for line in _newly_ended(stack.processes, told):
                console.print(line, soft_wrap=True, markup=False)


def _newly_ended(processes: Sequence[Process], told: set[str]) -> Iterator[str]:
    """A line for each that has ended and is not among the names `told`, which it joins."""
    for process in processes:
        if process.name not in told and not process.running:
            told.add(process.name)
            yield f"{process.name} ended with status {process.status}; its log is at {process.log}"


def _demo(
    session: Session,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("build/demo"),
    data_dir: DataDir = None,
    speedup: Speedup = 4.0,
    sessions: Annotated[int, typer.Option(min=2, max=62, help="Conversations.")] = 60,
    turns: Annotated[int, typer.Option(min=1, max=20, help="Requests of each.")] = 5,
    concurrency: Annotated[int, typer.Option(min=1, max=200, help="Conversations at a time.")] = 20,
    output_tokens: Annotated[int, typer.Option(min=1, max=4000, help="Of each request.")] = 800,
) -> None:
    with _installed():
        from headway_sim.workloads import ArticleWorkload

        from headway_cli.local.demo import DemoOptions, run_demo

    workload = ArticleWorkload(sessions=sessions, turns=turns, concurrency=concurrency, output_tokens=output_tokens)
    flip = ArticleWorkload(sessions=30, turns=4, output_tokens=200, seed=2)
    with _calls_told(), _directory(data_dir) as directory:
        options = DemoOptions(directory, out, speedup, workload, flip)
        status = run_demo(options, session, Console(stderr=True))
    raise typer.Exit(status)


def _replay(
    session: Session,
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="Mooncake, Azure, ShareGPT or plain JSONL; may be .gz")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, max=1000, help="Arrivals so much denser.")] = 1.0,
    strategy: Annotated[str, typer.Option(help="Strategy to route with.")] = "adaptive",
    engines: Annotated[int, typer.Option(min=1, max=64, help="Emulated engines.")] = 8,
    hardware: Hardware = "a100-40g-8b",
    speedup: Speedup = 4.0,
    data_dir: DataDir = None,
) -> None:
    with _installed():
        from headway_cli.local.replay import ReplayOptions, run_replay

    with _calls_told(), _directory(data_dir) as directory:
        options = ReplayOptions(directory, trace, limit, rate, strategy, engines, hardware, speedup)
        status = run_replay(options, session, Console(stderr=True))
    raise typer.Exit(status)


@contextmanager
def _installed() -> Iterator[None]:
    """Say which extra is missing where an import fails."""
    try:
        yield
    except ImportError as error:
        raise NotInstalled(error, _EXTRA) from None


@contextmanager
def _calls_told() -> Iterator[None]:
    """Say what a call to the stack's scheduler was refused for."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error, "the local stack") from None


@contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    """The folder given, or one that lives as long as the command."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="headway-") as made:
        yield Path(made)
