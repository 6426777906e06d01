"""The schema is what the migrations make of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.postgres import connect
from headway_scheduler.errors import HeadwayError, StoreDown
from headway_scheduler.store import migrate, schema, violations
from headway_scheduler.store.rows import SHAPES
from sqlalchemy import CheckConstraint, ForeignKeyConstraint, PrimaryKeyConstraint, UniqueConstraint


def test_upgrade_makes_the_schema_and_nothing_is_left_to_do(empty_database_url: str) -> None:
    assert migrate.current(empty_database_url) is None
    assert migrate.upgrade(empty_database_url) == migrate.head()
    assert migrate.current(empty_database_url) == migrate.head()
    assert migrate.differences(empty_database_url) == []
    assert migrate.upgrade(empty_database_url) == migrate.head()


def test_differences_sees_a_difference(database_url: str) -> None:
    with connect(database_url) as connection:
        connection.execute("ALTER TABLE tenants DROP COLUMN weight")
    assert len(migrate.differences(database_url)) == 1


def test_schedulers_that_start_together_do_not_collide(empty_database_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        reached = list(pool.map(lambda _: migrate.upgrade(empty_database_url), range(4)))
    assert reached == [migrate.head()] * 4
    with connect(empty_database_url) as connection:
        assert connection.execute("SELECT count(*) FROM tenants").fetchone() == (1,)


def test_every_constraint_in_the_database_has_its_conventional_name(database_url: str) -> None:
    named = {
        str(constraint.name)
        for table in schema.metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, PrimaryKeyConstraint | ForeignKeyConstraint | UniqueConstraint | CheckConstraint)
    }
    assert "None" not in named
    assert all(name.startswith(("pk_", "fk_", "uq_", "ck_")) for name in named)
    with connect(database_url) as connection:
        rows = connection.execute(
            "SELECT conname FROM pg_constraint WHERE contype <> 'n' AND connamespace = 'public'::regnamespace"
            " AND conrelid <> 'alembic_version'::regclass"
        ).fetchall()
    assert {row[0] for row in rows} == named


def test_every_constraint_of_a_resource_means_something() -> None:
    """A new constraint without a meaning would answer INTERNAL."""
    for kind, shape in SHAPES.items():
        resource = _any(kind)
        indexes = [str(index.name) for index in shape.table.indexes if index.unique]
        for name in [*indexes, *(str(constraint.name) for constraint in shape.table.constraints)]:
            assert isinstance(violations.broken_by_write(name, resource), HeadwayError), name
            if name.startswith("fk_"):
                assert isinstance(violations.broken_by_delete(name, kind, "a/b"), HeadwayError)
    assert violations.broken_by_write("nonsense", _any(next(iter(SHAPES)))) is None


def _any(kind: type[object]) -> object:
    from headway_scheduler.domain import desired

    examples = [
        desired.Tenant("a"), desired.GpuGroup("a"), desired.Binding("a", "b"), desired.Model("a"),
        desired.StrategyConfig("a", "random"), desired.StrategyBinding("a", "b"),
        desired.Credential("a", desired.Role.VIEWER, b""),
    ]  # fmt: skip
    return next(example for example in examples if type(example) is kind)


def test_a_database_that_is_not_there_is_said_to_be_down() -> None:
    with pytest.raises(StoreDown):
        migrate.current("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
