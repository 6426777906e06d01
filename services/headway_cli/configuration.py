"""`headway config validate`: each process's configuration, checked by its own module."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headway_cli.command import command, group
from headway_cli.errors import FileProblems, NotInstalled, Problem, UsageProblem
from headway_cli.output import print_plain, print_text
from headway_cli.session import Output, Session

__all__ = ["configuration_app"]


class Process(StrEnum):
    """What is configured."""

    SCHEDULER = "scheduler"
    AGENT = "agent"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class _Loader:
    """Where a process reads its configuration: imported only when asked for, since each has its own extra."""

    module: str
    function: str
    takes_file: bool


_LOADERS: Final[Mapping[Process, _Loader]] = {
    Process.SCHEDULER: _Loader("headway_scheduler.config", "load", takes_file=False),
    Process.AGENT: _Loader("headway_agent.config", "load", takes_file=True),
    Process.GATEWAY: _Loader("headway_gateway.config", "load_settings", takes_file=True),
}


def configuration_app() -> typer.Typer:
    """The group."""
    app = group("config", "Check configurations.")
    command(
        app,
        "validate",
        help="Check the configuration of a process, from its file and this environment, as the process itself would.",
        example="headway config validate agent --file /etc/headway/agent.toml",
        offline=True,
    )(_validate)
    return app


def _validate(
    session: Session,
    processes: Annotated[list[Process], typer.Argument(metavar="PROCESS…", help="scheduler, agent, gateway.")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The file to check, of a process that reads one.")
    ] = None,
) -> None:
    if file is not None and (len(processes) != 1 or not _LOADERS[processes[0]].takes_file):
        raise UsageProblem("--file goes with exactly one of agent and gateway")
    problems = [problem for process in processes for problem in _problems(process, file)]
    if problems:
        raise FileProblems(problems)
    if session.output is not Output.TABLE:
        print_plain(session, [{"process": process.value, "valid": True} for process in processes])
        return
    for process in processes:
        print_text(f"{process.value}: the configuration is valid")


def _problems(process: Process, file: Path | None) -> list[Problem]:
    loader = _LOADERS[process]
    try:
        module: Any = importlib.import_module(loader.module)
    except ImportError as error:
        raise NotInstalled(error, process.value) from None
    load: Callable[..., object] = getattr(module, loader.function)
    try:
        load(*([file] if loader.takes_file else []))
    except module.ConfigError as error:
        return [Problem(process.value, "", "", line) for line in str(error).splitlines()]
    return []
