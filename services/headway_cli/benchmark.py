"""`headway bench …`: the benchmarks' own command line, imported when it is used: it needs the extra `bench`."""

from typing import Final

import typer

from headway_cli.command import command
from headway_cli.errors import NotInstalled
from headway_cli.session import Session

__all__ = ["add_benchmarks"]

_EXTRA: Final = "bench"
_EXAMPLE: Final = "headway bench route --mode stream -o json"


def add_benchmarks(app: typer.Typer) -> None:
    """Add them to the command line."""
    command(
        app,
        "bench",
        help="Measure real processes on this machine: envoy, route, index, telemetry, idle, mixed, takeover, vllm.",
        example=_EXAMPLE,
        offline=True,
        passes_on=True,
    )(_bench)


def _bench(_session: Session, ctx: typer.Context) -> None:
    try:
        from headway_bench.commands import bench_app
    except ImportError as error:
        raise NotInstalled(error, _EXTRA) from None
    bench_app.info.epilog = f"Example: {_EXAMPLE}"
    typer.main.get_command(bench_app).main([*ctx.args], prog_name="headway bench")
