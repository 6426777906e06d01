"""How a command is declared: its example in the help, the options that all share, and errors said in one line."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.markup import escape

from headway_cli.errors import CliError, report
from headway_cli.session import DEFAULT_SCHEDULER, DEFAULT_TIMEOUT_S, Output, Session

__all__ = ["command", "group", "root_options"]

F = TypeVar("F", bound=Callable[..., None])

_PANEL: Final = "Connection"
_SCHEDULER_HELP: Final = "HOST:PORT of the scheduler."
_TOKEN_HELP: Final = "A credential's token."  # noqa: S105 -- a text
_CA_HELP: Final = "Speak TLS and trust this PEM file, or `system` for the system's roots."
_SERVER_NAME_HELP: Final = "The name in the scheduler's certificate, where it is not the address."
_CERTIFICATE_HELP: Final = "PEM file of a client certificate, with --key, where the scheduler wants one."
_KEY_HELP: Final = "PEM file of its key."
_TIMEOUT_HELP: Final = "Seconds that one call may take."

_OUTPUT: Final = {
    "output": Annotated[Output | None, typer.Option("--output", "-o", help="How to print the answer.")],
}
"""Option of every command. It may also stand before the command, like those below; those at the command win."""
_CONNECTION: Final = {
    "scheduler": Annotated[
        str | None,
        typer.Option(
            help=f"{_SCHEDULER_HELP} Default: HEADWAY_SCHEDULER or {DEFAULT_SCHEDULER}.", rich_help_panel=_PANEL
        ),
    ],
    "token": Annotated[str | None, typer.Option(help=f"{_TOKEN_HELP} Default: HEADWAY_TOKEN.", rich_help_panel=_PANEL)],
    "ca": Annotated[
        str | None, typer.Option(metavar="FILE", help=f"{_CA_HELP} Default: HEADWAY_CA.", rich_help_panel=_PANEL)
    ],
    "server_name": Annotated[
        str | None, typer.Option(help=f"{_SERVER_NAME_HELP} Default: HEADWAY_SERVER_NAME.", rich_help_panel=_PANEL)
    ],
    "certificate": Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"{_CERTIFICATE_HELP} Default: HEADWAY_CERTIFICATE.", rich_help_panel=_PANEL),
    ],
    "key": Annotated[
        str | None, typer.Option(metavar="FILE", help=f"{_KEY_HELP} Default: HEADWAY_KEY.", rich_help_panel=_PANEL)
    ],
    "timeout": Annotated[
        float | None,
        typer.Option(min=0.1, help=f"{_TIMEOUT_HELP} Default: {DEFAULT_TIMEOUT_S:g}.", rich_help_panel=_PANEL),
    ],
}
"""Options of commands that talk to a scheduler."""


def group(name: str, summary: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(name=name, help=escape(summary), no_args_is_help=True, add_completion=False)


def root_options(
    ctx: typer.Context,
    scheduler: Annotated[str, typer.Option(envvar="HEADWAY_SCHEDULER", help=_SCHEDULER_HELP)] = DEFAULT_SCHEDULER,
    token: Annotated[str, typer.Option(envvar="HEADWAY_TOKEN", help=_TOKEN_HELP)] = "",
    ca: Annotated[str, typer.Option(envvar="HEADWAY_CA", metavar="FILE", help=_CA_HELP)] = "",
    server_name: Annotated[str, typer.Option(envvar="HEADWAY_SERVER_NAME", help=_SERVER_NAME_HELP)] = "",
    certificate: Annotated[
        str, typer.Option(envvar="HEADWAY_CERTIFICATE", metavar="FILE", help=_CERTIFICATE_HELP)
    ] = "",
    key: Annotated[str, typer.Option(envvar="HEADWAY_KEY", metavar="FILE", help=_KEY_HELP)] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help=_TIMEOUT_HELP)] = DEFAULT_TIMEOUT_S,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print the answer.")] = Output.TABLE,
) -> None:
    """Headway decides which GPU serves which LLM request. This is its command line."""
    ctx.obj = Session(scheduler, token, ca, server_name, certificate, key, output, timeout)


def command(
    app: typer.Typer,
    name: str,
    *,
    help: str,  # noqa: A002 -- Typer's word
    example: str,
    offline: bool = False,
    passes_on: bool = False,
) -> Callable[[F], F]:
    """Register `function(session, …)` as a command; its other parameters are its own arguments and options.

    One that is `offline` talks to no scheduler. One that `passes_on` gets every word after it unread, in the `ctx`
    that it takes: another command line stands behind it.
    """
    shared = {} if passes_on else _OUTPUT if offline else {**_OUTPUT, **_CONNECTION}
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

    def register(function: F) -> F:
        app.command(
            name,
            help=escape(help),
            epilog=f"Example: {escape(example)}",
            no_args_is_help=False,
            add_help_option=not passes_on,
            context_settings=settings if passes_on else None,
        )(_with_session(function, shared))
        return function

    return register


def _with_session(function: Callable[..., None], shared: dict[str, Any]) -> Callable[..., None]:
    """The function as Typer shall see it: the session replaced by the options that make one."""

    def run(ctx: typer.Context, **arguments: Any) -> None:  # whatever the command declares
        session = _session(ctx, {name: arguments.pop(name) for name in shared})
        try:
            function(session, **(arguments | ({"ctx": ctx} if takes_context else {})))
        except CliError as error:
            report(error, as_json=session.output is Output.JSON)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    own = list(inspect.signature(function).parameters.values())[1:]
    takes_context = any(parameter.name == "ctx" for parameter in own)
    own = [parameter for parameter in own if parameter.name != "ctx"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("ctx", keyword, annotation=typer.Context)]
    parameters += [parameter.replace(kind=keyword) for parameter in own]
    parameters += [
        inspect.Parameter(name, keyword, annotation=annotation, default=None) for name, annotation in shared.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect itself reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _session(ctx: typer.Context, given: dict[str, Any]) -> Session:
    base = ctx.find_root().obj or Session()

    def chosen(name: str, otherwise: Any) -> Any:
        return otherwise if given.get(name) is None else given[name]

    return Session(
        scheduler=chosen("scheduler", base.scheduler),
        token=chosen("token", base.token),
        ca=chosen("ca", base.ca),
        server_name=chosen("server_name", base.server_name),
        certificate=chosen("certificate", base.certificate),
        key=chosen("key", base.key),
        output=chosen("output", base.output),
        timeout_s=chosen("timeout", base.timeout_s),
    )
