"""Tenants, groups, models, strategies, credentials; audit, idempotency, learned state, usage; and what a new
installation starts with."""

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ALGORITHMS = (
    "round_robin",
    "random",
    "least_request",
    "consistent_hash",
    "global_least_request",
    "prefix_match",
    "gpu_aware",
    "adaptive",
)

APPEND_ONLY = """
CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit is append-only';
END
$$;
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();
"""


def upgrade() -> None:
    create_tables()
    op.execute(APPEND_ONLY)
    seed()


def create_tables() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("before", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.Column("after", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "credentials",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("token_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("tenants", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("expire_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("role IN ('agent', 'router', 'admin', 'viewer')", name=op.f("ck_credentials_role")),
        sa.CheckConstraint("length(token_sha256) = 32", name=op.f("ck_credentials_token_sha256")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credentials")),
        sa.UniqueConstraint("token_sha256", name=op.f("uq_credentials_token_sha256")),
    )
    op.create_table(
        "desired_version",
        sa.Column("single", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("single", name=op.f("ck_desired_version_single")),
        sa.PrimaryKeyConstraint("single", name=op.f("pk_desired_version")),
    )
    op.create_table(
        "endpoint_states",
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("endpoint", name=op.f("pk_endpoint_states")),
    )
    op.create_table(
        "gpu_groups",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("selector", postgresql.JSONB(), nullable=False),
        sa.Column("nodes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("endpoints", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("all", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpu_groups")),
    )
    op.create_table(
        "idempotency",
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("answer", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("principal", "request_id", name=op.f("pk_idempotency")),
    )
    op.create_index(op.f("ix_idempotency_create_time"), "idempotency", ["create_time"], unique=False)
    op.create_table(
        "learned_state",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_learned_state")),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("aliases", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("tokenizer", sa.Text(), nullable=False),
        sa.Column("max_context_tokens", sa.BigInteger(), nullable=False),
        sa.Column("discovered", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("max_context_tokens >= 0", name=op.f("ck_models_max_context_tokens")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
    )
    op.create_table(
        "node_states",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_node_states")),
    )
    op.create_table(
        "strategies",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("algorithm", sa.Text(), nullable=False),
        sa.Column("parameters", postgresql.JSONB(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("fallback_algorithm", sa.Text(), nullable=False),
        sa.Column("time_budget_us", sa.BigInteger(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("time_budget_us >= 0", name=op.f("ck_strategies_time_budget_us")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_strategies")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("isolation_domain", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=False),
        sa.Column("max_inflight", sa.BigInteger(), nullable=False),
        sa.Column("models", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("priority BETWEEN -1 AND 1", name=op.f("ck_tenants_priority")),
        sa.CheckConstraint(
            "requests_per_minute >= 0 AND tokens_per_minute >= 0 AND max_inflight >= 0", name=op.f("ck_tenants_quotas")
        ),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "usage",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("minute", sa.DateTime(timezone=True), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "model", "minute", name=op.f("pk_usage")),
    )
    op.create_index(op.f("ix_usage_minute"), "usage", ["minute"], unique=False)
    op.create_table(
        "bindings",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("order", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("mode IN ('dedicated', 'shared', 'burst')", name=op.f("ck_bindings_mode")),
        sa.CheckConstraint("weight > 0", name=op.f("ck_bindings_weight")),
        sa.ForeignKeyConstraint(["group_id"], ["gpu_groups.id"], name=op.f("fk_bindings_group_id_gpu_groups")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_bindings_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("tenant_id", "group_id", name=op.f("pk_bindings")),
    )
    op.create_index(op.f("ix_bindings_group_id"), "bindings", ["group_id"], unique=False)
    op.create_table(
        "strategy_bindings",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("strategy_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("model_id", sa.Text(), nullable=True),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "group_id IS NULL OR (tenant_id IS NULL AND model_id IS NULL)", name=op.f("ck_strategy_bindings_scope")
        ),
        sa.ForeignKeyConstraint(["group_id"], ["gpu_groups.id"], name=op.f("fk_strategy_bindings_group_id_gpu_groups")),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_strategy_bindings_model_id_models")),
        sa.ForeignKeyConstraint(
            ["strategy_id"], ["strategies.id"], name=op.f("fk_strategy_bindings_strategy_id_strategies")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_strategy_bindings_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_strategy_bindings")),
    )
    op.create_index(
        "uq_strategy_bindings_scope",
        "strategy_bindings",
        ["tenant_id", "model_id", "group_id"],
        unique=True,
        postgresql_where="NOT shadow",
        postgresql_nulls_not_distinct=True,
    )
    op.create_table(
        "strategy_revisions",
        sa.Column("strategy_id", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("config", postgresql.JSONB(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["strategy_id"],
            ["strategies.id"],
            name=op.f("fk_strategy_revisions_strategy_id_strategies"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("strategy_id", "revision", name=op.f("pk_strategy_revisions")),
    )


def seed() -> None:
    """The tenant `default` on every endpoint, one strategy per algorithm, and `adaptive` for every call."""
    connection = op.get_bind()
    connection.execute(sa.text("INSERT INTO desired_version (single, version) VALUES (true, 1)"))
    connection.execute(
        sa.text(
            "INSERT INTO tenants (id, display_name, isolation_domain, weight, priority, requests_per_minute,"
            " tokens_per_minute, max_inflight, models, version, create_time, update_time)"
            " VALUES ('default', 'Default', '', 1, 0, 0, 0, 0, '{}', 1, now(), now())"
        )
    )
    connection.execute(
        sa.text(
            'INSERT INTO gpu_groups (id, display_name, selector, nodes, endpoints, "all", version, create_time,'
            " update_time) VALUES ('all', 'Every endpoint', '{}', '{}', '{}', true, 1, now(), now())"
        )
    )
    connection.execute(
        sa.text(
            'INSERT INTO bindings (tenant_id, group_id, mode, "order", weight, version, create_time, update_time)'
            " VALUES ('default', 'all', 'shared', 0, 1, 1, now(), now())"
        )
    )
    for algorithm in ALGORITHMS:
        seed_strategy(connection, algorithm)
    connection.execute(
        sa.text(
            "INSERT INTO strategy_bindings (id, strategy_id, shadow, version, create_time, update_time)"
            " VALUES ('default', 'adaptive', false, 1, now(), now())"
        )
    )


def seed_strategy(connection: sa.Connection, algorithm: str) -> None:
    config = {
        "id": algorithm,
        "algorithm": algorithm,
        "parameters": {},
        "enabled": True,
        "fallback_algorithm": "round_robin" if algorithm == "least_request" else "least_request",
        "time_budget_us": 0,
        "display_name": "",
        "revision": 1,
    }
    connection.execute(
        sa.text(
            "INSERT INTO strategies (id, algorithm, parameters, enabled, fallback_algorithm, time_budget_us,"
            " display_name, revision, version, create_time, update_time)"
            " VALUES (:id, :algorithm, '{}', true, :fallback_algorithm, 0, '', 1, 1, now(), now())"
        ),
        config,
    )
    connection.execute(
        sa.text(
            "INSERT INTO strategy_revisions (strategy_id, revision, config, create_time, author)"
            " VALUES (:id, 1, CAST(:config AS jsonb), now(), 'installation')"
        ),
        {"id": algorithm, "config": json.dumps(config)},
    )


def downgrade() -> None:
    op.drop_table("strategy_revisions")
    op.drop_table("strategy_bindings")
    op.drop_table("bindings")
    op.drop_table("usage")
    op.drop_table("tenants")
    op.drop_table("strategies")
    op.drop_table("node_states")
    op.drop_table("models")
    op.drop_table("learned_state")
    op.drop_table("idempotency")
    op.drop_table("gpu_groups")
    op.drop_table("endpoint_states")
    op.drop_table("desired_version")
    op.drop_table("credentials")
    op.drop_table("audit")
    op.execute("DROP FUNCTION refuse_audit_change()")
