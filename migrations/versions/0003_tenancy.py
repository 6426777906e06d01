"""Adapters and quotas by model of a tenant; splits and disruption budget of a model; more of usage, added once."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

USAGE = ("refusals", "failures", "fail_open")


def upgrade() -> None:
    empty_list, empty_object, zero = sa.text("'{}'"), sa.text("'{}'"), sa.text("'0'")
    texts, json = postgresql.ARRAY(sa.Text()), postgresql.JSONB()
    op.add_column("tenants", sa.Column("adapters", texts, server_default=empty_list, nullable=False))
    op.add_column("tenants", sa.Column("model_quotas", json, server_default=empty_object, nullable=False))
    op.add_column("models", sa.Column("splits", json, server_default=empty_object, nullable=False))
    op.add_column("models", sa.Column("min_available", sa.BigInteger(), server_default=zero, nullable=False))
    op.add_column("models", sa.Column("min_available_share", sa.Double(), server_default=zero, nullable=False))
    op.create_check_constraint(
        op.f("ck_models_disruption_budget"), "models", "min_available >= 0 AND min_available_share BETWEEN 0 AND 1"
    )
    for amount in USAGE:
        op.add_column("usage", sa.Column(amount, sa.BigInteger(), server_default=zero, nullable=False))
    op.create_table(
        "usage_batches",
        sa.Column("batch", sa.Text(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("batch", name=op.f("pk_usage_batches")),
    )
    op.create_index(op.f("ix_usage_batches_create_time"), "usage_batches", ["create_time"], unique=False)


def downgrade() -> None:
    op.drop_table("usage_batches")
    for amount in reversed(USAGE):
        op.drop_column("usage", amount)
    op.drop_constraint(op.f("ck_models_disruption_budget"), "models")
    for column in ("min_available_share", "min_available", "splits"):
        op.drop_column("models", column)
    for column in ("model_quotas", "adapters"):
        op.drop_column("tenants", column)
