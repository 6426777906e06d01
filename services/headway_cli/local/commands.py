"""`headway up`, `demo` and `replay`: Headway on this machine."""

import json
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Final

import typer
from headway_sim.driver import summarise
from headway_sim.traces import TraceError, load_trace
from headway_sim.workloads import ArticleWorkload
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway_cli.local.demo import DemoOptions, run_demo
from headway_cli.local.load import replay as replay_trace
from headway_cli.local.load import reservations_left, target_of
from headway_cli.local.processes import LocalStackError
from headway_cli.local.stack import LocalStack, NodeOptions, StackOptions

__all__ = ["register"]

_DATA_DIR: Final = "HEADWAY_DATA_DIR"

Output = Annotated[str, typer.Option("-o", "--output", help="table or json")]
DataDir = Annotated[Path | None, typer.Option(envvar=_DATA_DIR, help="Where Postgres, logs and ports go")]
Speedup = Annotated[float, typer.Option(min=0.1, max=1000, help="How much faster than life the engines run")]


def register(app: typer.Typer) -> None:
    """Add the commands to the `headway` command line."""
    app.command()(up)
    app.command()(demo)
    app.command()(replay)
