"""Bring a database to the newest schema. Synchronous: call it before the event loop, or in a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

import headway_scheduler
from headway_scheduler.errors import StoreDown
from headway_scheduler.store import schema

__all__ = ["current", "differences", "head", "upgrade"]

_LOCK_KEY: Final = 0x68656164776179  # "headway"


def upgrade(url: str, revision: str = "head") -> str:
    """Run the migrations that are missing, and return the revision reached.

    Several processes may call it at once: an advisory lock lets one work and the others find nothing left to do.
    Raises StoreDown.
    """
    with _connected(url) as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        connection.commit()
        try:
            command.upgrade(_config(connection), revision)
            connection.commit()
        finally:
            connection.rollback()
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK_KEY})
            connection.commit()
        return _revision(connection) or ""


def current(url: str) -> str | None:
    """The revision the database is at, None if it is empty. Raises StoreDown."""
    with _connected(url) as connection:
        return _revision(connection)


def head() -> str:
    """The newest revision there is."""
    return ScriptDirectory.from_config(_config(None)).get_current_head() or ""


def differences(url: str) -> list[object]:
    """What autogenerate would change in this database to match `schema.metadata`: nothing, after `upgrade`."""
    with _connected(url) as connection:
        options = {"compare_type": True, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata))


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    engine = create_engine(
        make_url(url).set(drivername="postgresql+psycopg"), poolclass=NullPool, connect_args={"connect_timeout": 10}
    )
    try:
        with engine.connect() as connection:
            yield connection
    except OperationalError as error:
        raise StoreDown("the store cannot be reached") from error
    finally:
        engine.dispose()


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _scripts() -> Path:
    """The migrations: inside the package in a wheel, at the root of the repository otherwise."""
    package = Path(headway_scheduler.__file__).parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent.parent / "migrations"
