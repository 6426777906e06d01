"""`headway sim decisions`: the whole table, in minutes."""

import json
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from headway_sim.decisions.report import markdown, write
from headway_sim.decisions.run import GOODPUT, Results, measure
from headway_sim.decisions.setups import Traces, setups
from headway_sim.simulation.parallel import ProcessRunner, cores

__all__ = ["decisions"]

_LIMIT: Final = 4000


def decisions(
    traces: Annotated[
        Path | None,
        typer.Option(envvar="HEADWAY_TRACES", help="A folder with the Mooncake and Azure traces by their own names."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for decisions.json, decisions.md and pictures.")] = Path(
        "build/decisions"
    ),
    limit: Annotated[
        int, typer.Option(min=0, help="Requests of Mooncake's trace; half of the others'; 0: all.")
    ] = _LIMIT,
    only: Annotated[str, typer.Option(help="Only setups whose name is like this, such as 'mooncake*'.")] = "*",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; as many as there are cores by default.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Run adaptive against every peer on every setup that docs/benchmarks.md shows, and judge the results."""
    console, started = Console(stderr=True, highlight=False), time.monotonic()
    at_hand = Traces.of(traces)
    chosen = [setup for setup in setups(at_hand, limit or None) if fnmatch(setup.name, only)]
    goodput = fnmatch(GOODPUT, only)
    if not chosen and not goodput:
        raise typer.BadParameter(f"no setup is like {only!r}", param_hint="--only")
    missing = [name for name in Traces.__slots__ if getattr(at_hand, name) is None]
    latest = Results()

    def keep(results: Results) -> None:
        nonlocal latest
        latest = results
        write(out, results)
        console.print(f"{time.monotonic() - started:,.0f} s: {', '.join(results.setups)}", soft_wrap=True)

    with ProcessRunner(jobs or cores(), quiet=quiet) as runner:
        measure(chosen, with_goodput=goodput, run=runner.run, on_change=keep)
    if as_json:
        typer.echo(json.dumps(latest.document()["rows"], indent=1))
        return
    typer.echo(markdown(latest.table), nl=False)
    if missing:
        typer.echo(f"Not run, for want of their traces: {', '.join(missing)}. Give --traces or HEADWAY_TRACES.")
    if not all(row.met for row in latest.table):
        console.print("Some rows are not met.")
