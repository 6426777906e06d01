"""`headway bench …` on the command line."""

import asyncio
import json
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from headway_bench.envoy import BenchError, EnvoyBench, EnvoySettings
from headway_bench.takeover import How, TakeoverBench, TakeoverSettings

__all__ = ["bench_app"]

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


@bench_app.callback()
def _bench() -> None:
    """Each benchmark is a command."""


@bench_app.command()
def envoy(
    endpoints: Annotated[int, typer.Option(min=1, max=250, help="Engines in the fleet.")] = 100,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="Of the loaded runs.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each loaded run.")] = 5.0,
    prompt_bytes: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 2048,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TABLE,
) -> None:
    """Envoy with one worker, straight and with Headway as its picker: requests a second, latency, CPU a request."""
    settings = EnvoySettings(endpoints, connections, seconds, prompt_bytes)
    try:
        found = asyncio.run(EnvoyBench(settings).run())
    except BenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if output is Output.JSON:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(_table(found))


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


def _table(found: dict[str, dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(column for name, row in found.items() if name != "settings" for column in row))
    table = Table("", *columns, box=box.SIMPLE)
    for name, row in found.items():
        if name != "settings":
            table.add_row(name, *(str(row.get(column, "")) for column in columns))
    return table
