"""The command line put together: every group of commands is one line here."""

import typer

from headway_cli.apply import add_file_commands
from headway_cli.auth import add_token_verbs, auth_app
from headway_cli.benchmark import add_benchmarks
from headway_cli.command import root_options
from headway_cli.configuration import configuration_app
from headway_cli.database import database_app
from headway_cli.decisions import decisions_app
from headway_cli.doctor.command import add_doctor
from headway_cli.fleet import fleet_app
from headway_cli.live import add_audit, live_apps
from headway_cli.local.commands import add_local_commands
from headway_cli.resources import resource_apps
from headway_cli.routing import add_routing_commands
from headway_cli.safe_way_in import bypass_app, observe_app
from headway_cli.simulate import add_simulator
from headway_cli.strategies import add_strategy_verbs
from headway_cli.top import add_top
from headway_cli.usage import add_usage

__all__ = ["build"]


def build() -> typer.Typer:
    """The command `headway`."""
    app = typer.Typer(
        name="headway",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 120},
    )
    app.callback()(root_options)
    resources = resource_apps()
    add_strategy_verbs(resources["strategies"])
    add_usage(resources["tenants"])
    add_token_verbs(resources["credentials"], "credentials")
    for group in (
        *resources.values(),
        *live_apps().values(),
        auth_app(),
        fleet_app(),
        decisions_app(),
        database_app(),
        configuration_app(),
        bypass_app(),
        observe_app(),
    ):
        app.add_typer(group)
    add_file_commands(app)
    add_routing_commands(app)
    add_audit(app)
    add_doctor(app)
    add_top(app)
    add_local_commands(app)
    add_simulator(app)
    add_benchmarks(app)
    return app
