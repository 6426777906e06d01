"""The share of a tenant's requests that is routed, and whose requests are left alone."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A scheduler of the version before writes tenants without it: they are routed as ever.
    op.add_column("tenants", sa.Column("routed_percent", sa.Integer(), server_default=sa.text("'100'"), nullable=False))
    op.create_check_constraint(op.f("ck_tenants_routed_percent"), "tenants", "routed_percent BETWEEN 0 AND 100")
    op.create_table(
        "bypasses",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_bypasses")),
    )


def downgrade() -> None:
    op.drop_table("bypasses")
    op.drop_constraint(op.f("ck_tenants_routed_percent"), "tenants")
    op.drop_column("tenants", "routed_percent")
