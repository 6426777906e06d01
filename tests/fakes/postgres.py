"""One real Postgres per test session, one migrated database per test."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from headway_scheduler.store import migrate
from headway_scheduler.store.embedded import EmbeddedPostgres

_TEMPLATE = "migrated"
_numbers = itertools.count(1)

# Nothing here outlives the machine, so nothing needs to reach the disk; a commit still outlives a kill -9.
FAST = {"fsync": "off"}


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A running server with an empty database for each caller of `create_database`, and a migrated template."""
    with tempfile.TemporaryDirectory(prefix="hw-pg-") as directory:
        server = EmbeddedPostgres(Path(directory), settings=FAST)
        server.start()
        try:
            create_database(server, _TEMPLATE)
            migrate.upgrade(server.url_of(_TEMPLATE))
            yield server
        finally:
            server.stop()


@pytest.fixture
def postgres_dir() -> Iterator[Path]:
    """A folder for a server of the test's own. Not tmp_path: pytest closes its parent to the user that Postgres is."""
    with tempfile.TemporaryDirectory(prefix="hw-pg-") as directory:
        yield Path(directory)


@pytest.fixture
def database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A fresh migrated database."""
    name = create_database(postgres, f"test_{next(_numbers)}", template=_TEMPLATE)
    yield postgres.url_of(name)
    _execute(postgres, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A fresh database without tables."""
    name = create_database(postgres, f"test_{next(_numbers)}")
    yield postgres.url_of(name)
    _execute(postgres, f'DROP DATABASE "{name}" WITH (FORCE)')


def create_database(server: EmbeddedPostgres, name: str, template: str = "template0") -> str:
    _execute(server, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return name


def connect(url: str) -> psycopg.Connection:
    """A plain connection, for looking behind the store's back."""
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


def _execute(server: EmbeddedPostgres, statement: str) -> None:
    with connect(server.url) as connection:
        connection.execute(statement.encode())
