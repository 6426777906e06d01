"""Alembic's environment. `headway_scheduler.store.migrate` hands it a connection; there is no alembic.ini."""

from alembic import context
from headway_scheduler.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
