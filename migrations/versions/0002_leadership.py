"""Who leads, where several schedulers share the database."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "leadership",
        sa.Column("single", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("lease_s", sa.Double(), nullable=False),
        sa.Column("released", sa.Boolean(), nullable=False),
        sa.CheckConstraint("single", name=op.f("ck_leadership_single")),
        sa.PrimaryKeyConstraint("single", name=op.f("pk_leadership")),
    )
    op.execute("INSERT INTO leadership (single, epoch, holder, lease_s, released) VALUES (true, 0, '', 0, true)")


def downgrade() -> None:
    op.drop_table("leadership")
