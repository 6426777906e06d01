"""`headway db`: the schema of the scheduler's Postgres. Needs the extra `scheduler`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headway_cli.command import command, group
from headway_cli.errors import CliError, NotInstalled, Unreachable
from headway_cli.output import print_plain, print_text
from headway_cli.session import Output, Session

__all__ = ["database_app"]

_Url = Annotated[
    str, typer.Option("--database-url", envvar="HEADWAY_DATABASE_URL", help="Postgres; empty: an embedded one.")
]
_DataDir = Annotated[Path, typer.Option(envvar="HEADWAY_DATA_DIR", help="Where the embedded Postgres lives.")]


def database_app() -> typer.Typer:
    """The group."""
    app = group("db", "Look after the scheduler's database.")
    command(
        app,
        "upgrade",
        help="Bring the database to the newest schema. Safe to repeat, and while schedulers run.",
        example="HEADWAY_DATABASE_URL=postgresql://headway@db/headway headway db upgrade",
        offline=True,
    )(_upgrade)
    command(
        app,
        "current",
        help="Show the database's schema revision, and the newest there is.",
        example="headway db current -o json",
        offline=True,
    )(_current)
    return app


def _upgrade(session: Session, database_url: _Url = "", data_dir: _DataDir = Path(".headway")) -> None:
    with _database(database_url, data_dir) as url:
        from headway_scheduler.store import migrate

        before = migrate.current(url)
        after = migrate.upgrade(url)
    if session.output is Output.TABLE:
        print_text(f"already at {after}" if before == after else f"upgraded from {before or 'nothing'} to {after}")
    else:
        print_plain(session, {"before": before, "after": after})


def _current(session: Session, database_url: _Url = "", data_dir: _DataDir = Path(".headway")) -> None:
    with _database(database_url, data_dir) as url:
        from headway_scheduler.store import migrate

        revision, head = migrate.current(url), migrate.head()
    if session.output is Output.TABLE:
        state = "the newest" if revision == head else f"the newest is {head}: run `headway db upgrade`"
        print_text(f"{revision or 'empty'}, {state}")
    else:
        print_plain(session, {"current": revision, "head": head, "up_to_date": revision == head})


@contextmanager
def _database(url: str, data_dir: Path) -> Iterator[str]:
    """The database's URL; an embedded one runs meanwhile. Errors of the store become ours."""
    try:
        from headway_scheduler.errors import StoreDown
        from headway_scheduler.store.embedded import EmbeddedPostgres, EmbeddedPostgresError
        from sqlalchemy.exc import ArgumentError
    except ImportError as error:
        raise NotInstalled(error, "scheduler") from None
    try:
        if url:
            yield url
            return
        embedded = EmbeddedPostgres(data_dir)
        try:
            yield embedded.start()
        finally:
            embedded.stop()
    except StoreDown as error:
        raise Unreachable(f"the database cannot be reached: {_cause(error)}") from None
    except EmbeddedPostgresError as error:
        raise CliError("EMBEDDED_POSTGRES", str(error)) from None
    except ArgumentError:
        raise CliError("INVALID_URL", "HEADWAY_DATABASE_URL is no URL like postgresql://user@host/database") from None


def _cause(error: Exception) -> str:
    """The driver's first line; it names host and port, and no password."""
    origin = getattr(error.__cause__, "orig", None)
    return str(origin or error).strip().partition("\n")[0]
