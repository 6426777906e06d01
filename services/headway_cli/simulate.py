"""`headway sim …`: the simulator's own command line, imported when it is used, since it needs the extra `sim`."""

from typing import Final

import typer

from headway_cli.command import command
from headway_cli.errors import NotInstalled
from headway_cli.session import Session

__all__ = ["add_simulator"]

_EXTRA: Final = "sim,scheduler"
_EXAMPLE: Final = "headway sim run --workload article --policies round_robin,adaptive"


def add_simulator(app: typer.Typer) -> None:
    """Add it to the command line."""
    command(
        app,
        "sim",
        help="Simulate a fleet in virtual time, routed by the scheduler's own objects: run, goodput, tune, decisions.",
        example=_EXAMPLE,
        offline=True,
        passes_on=True,
    )(_sim)


def _sim(_session: Session, ctx: typer.Context) -> None:
    try:
        from headway_sim.commands import sim_app
    except ImportError as error:
        raise NotInstalled(error, _EXTRA) from None
    sim_app.info.epilog = f"Example: {_EXAMPLE}"
    typer.main.get_command(sim_app).main([*ctx.args], prog_name="headway sim")
