"""Rotation with overlap, certificates in place of tokens, and end users' keys."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("credentials", sa.Column("certificate_identity", sa.Text(), nullable=True))
    op.add_column("credentials", sa.Column("previous_token_sha256", sa.LargeBinary(), nullable=True))
    op.add_column("credentials", sa.Column("previous_expire_time", sa.DateTime(timezone=True), nullable=True))
    for column in ("certificate_identity", "previous_token_sha256"):
        op.create_unique_constraint(op.f(f"uq_credentials_{column}"), "credentials", [column])
    checks = {
        "previous_token_sha256": "length(previous_token_sha256) = 32",
        "previous_expire_time": "(previous_token_sha256 IS NULL) = (previous_expire_time IS NULL)",
    }
    for name, condition in checks.items():
        op.create_check_constraint(op.f(f"ck_credentials_{name}"), "credentials", condition)
    _set_roles("'agent', 'router', 'admin', 'viewer', 'tenant'")


def downgrade() -> None:
    op.execute("DELETE FROM credentials WHERE role = 'tenant'")
    _set_roles("'agent', 'router', 'admin', 'viewer'")
    for column in ("previous_expire_time", "previous_token_sha256", "certificate_identity"):
        op.drop_column("credentials", column)


def _set_roles(roles: str) -> None:
    op.drop_constraint(op.f("ck_credentials_role"), "credentials", type_="check")
    op.create_check_constraint(op.f("ck_credentials_role"), "credentials", f"role IN ({roles})")
