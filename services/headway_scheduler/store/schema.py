"""The tables. Every constraint has a name, and `violations.py` says what breaking it means.

`version` of a resource is the version of the whole desired state that last wrote it; its etag is made from it.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

__all__ = [
    "REVISION",
    "audit",
    "bindings",
    "bypasses",
    "credentials",
    "desired_version",
    "endpoint_states",
    "gpu_groups",
    "idempotency",
    "leadership",
    "learned_state",
    "metadata",
    "models",
    "node_states",
    "strategies",
    "strategy_bindings",
    "strategy_revisions",
    "tenants",
    "usage",
    "usage_batches",
]

REVISION = "0005"
"""The migration that these tables are of."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _texts(name: str) -> Column[list[str]]:
    return Column(name, ARRAY(Text), nullable=False)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


def _whole(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _number(name: str) -> Column[float]:
    return Column(name, Double, nullable=False)


def _moment(name: str) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=False)


def _stored() -> tuple[Column[int], Column[object], Column[object]]:
    return _whole("version"), _moment("create_time"), _moment("update_time")


tenants = Table(
    "tenants",
    metadata,
    _text("id"),
    _text("display_name"),
    _text("isolation_domain"),
    _number("weight"),
    Column("priority", Integer, nullable=False),
    _whole("requests_per_minute"),
    _whole("tokens_per_minute"),
    _whole("max_inflight"),
    _texts("models"),
    # New columns have a default: a scheduler of the version before writes rows without them.
    Column("adapters", ARRAY(Text), nullable=False, server_default="{}"),
    Column("model_quotas", JSONB, nullable=False, server_default="{}"),
    Column("routed_percent", Integer, nullable=False, server_default="100"),
    *_stored(),
    PrimaryKeyConstraint("id"),
    CheckConstraint("weight > 0", name="weight"),
    CheckConstraint("priority BETWEEN -1 AND 1", name="priority"),
    CheckConstraint("requests_per_minute >= 0 AND tokens_per_minute >= 0 AND max_inflight >= 0", name="quotas"),
    CheckConstraint("routed_percent BETWEEN 0 AND 100", name="routed_percent"),
)

gpu_groups = Table(
    "gpu_groups",
    metadata,
    _text("id"),
    _text("display_name"),
    Column("selector", JSONB, nullable=False),
    _texts("nodes"),
    _texts("endpoints"),
    _flag("all"),
    *_stored(),
    PrimaryKeyConstraint("id"),
)

bindings = Table(
    "bindings",
    metadata,
    _text("tenant_id"),
    _text("group_id"),
    _text("mode"),
    Column("order", Integer, nullable=False),
    _number("weight"),
    *_stored(),
    PrimaryKeyConstraint("tenant_id", "group_id"),
    ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
    ForeignKeyConstraint(["group_id"], ["gpu_groups.id"]),
    CheckConstraint("mode IN ('dedicated', 'shared', 'burst')", name="mode"),
    CheckConstraint("weight > 0", name="weight"),
    Index(None, "group_id"),
)

models = Table(
    "models",
    metadata,
    _text("id"),
    _texts("aliases"),
    _text("tokenizer"),
    _whole("max_context_tokens"),
    _flag("discovered"),
    Column("splits", JSONB, nullable=False, server_default="{}"),
    Column("min_available", BigInteger, nullable=False, server_default="0"),
    Column("min_available_share", Double, nullable=False, server_default="0"),
    *_stored(),
    PrimaryKeyConstraint("id"),
    CheckConstraint("max_context_tokens >= 0", name="max_context_tokens"),
    CheckConstraint("min_available >= 0 AND min_available_share BETWEEN 0 AND 1", name="disruption_budget"),
)

strategies = Table(
    "strategies",
    metadata,
    _text("id"),
    _text("algorithm"),
    Column("parameters", JSONB, nullable=False),
    _flag("enabled"),
    _text("fallback_algorithm"),
    _whole("time_budget_us"),
    _text("display_name"),
    Column("revision", Integer, nullable=False),
    *_stored(),
    PrimaryKeyConstraint("id"),
    CheckConstraint("time_budget_us >= 0", name="time_budget_us"),
)

strategy_revisions = Table(
    "strategy_revisions",
    metadata,
    _text("strategy_id"),
    Column("revision", Integer, nullable=False),
    Column("config", JSONB, nullable=False),
    _moment("create_time"),
    _text("author"),
    PrimaryKeyConstraint("strategy_id", "revision"),
    ForeignKeyConstraint(["strategy_id"], ["strategies.id"], ondelete="CASCADE"),
)

strategy_bindings = Table(
    "strategy_bindings",
    metadata,
    _text("id"),
    _text("strategy_id"),
    Column("tenant_id", Text),
    Column("model_id", Text),
    Column("group_id", Text),
    _flag("shadow"),
    *_stored(),
    PrimaryKeyConstraint("id"),
    ForeignKeyConstraint(["strategy_id"], ["strategies.id"]),
    ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
    ForeignKeyConstraint(["model_id"], ["models.id"]),
    ForeignKeyConstraint(["group_id"], ["gpu_groups.id"]),
    CheckConstraint("group_id IS NULL OR (tenant_id IS NULL AND model_id IS NULL)", name="scope"),
    # One strategy obeyed and any number of shadows for a scope.
    Index(
        "uq_strategy_bindings_scope",
        "tenant_id",
        "model_id",
        "group_id",
        unique=True,
        postgresql_where="NOT shadow",
        postgresql_nulls_not_distinct=True,
    ),
)

credentials = Table(
    "credentials",
    metadata,
    _text("id"),
    _text("role"),
    Column("token_sha256", LargeBinary, nullable=False),
    _text("node"),
    _texts("tenants"),
    Column("expire_time", DateTime(timezone=True)),
    _flag("revoked"),
    Column("certificate_identity", Text),
    Column("previous_token_sha256", LargeBinary),
    Column("previous_expire_time", DateTime(timezone=True)),
    *_stored(),
    PrimaryKeyConstraint("id"),
    UniqueConstraint("token_sha256"),
    UniqueConstraint("previous_token_sha256"),
    UniqueConstraint("certificate_identity"),
    CheckConstraint("role IN ('agent', 'router', 'admin', 'viewer', 'tenant')", name="role"),
    CheckConstraint("length(token_sha256) = 32", name="token_sha256"),
    CheckConstraint("length(previous_token_sha256) = 32", name="previous_token_sha256"),
    CheckConstraint("(previous_token_sha256 IS NULL) = (previous_expire_time IS NULL)", name="previous_expire_time"),
)

node_states = Table("node_states", metadata, _text("node"), _text("state"), PrimaryKeyConstraint("node"))

endpoint_states = Table(
    "endpoint_states", metadata, _text("endpoint"), _text("state"), PrimaryKeyConstraint("endpoint")
)

# `*`: everybody's requests.
bypasses = Table("bypasses", metadata, _text("tenant"), PrimaryKeyConstraint("tenant"))

# One row. Its lock serialises the writers, so versions are committed in order.
desired_version = Table(
    "desired_version",
    metadata,
    Column("single", Boolean, nullable=False),
    _whole("version"),
    PrimaryKeyConstraint("single"),
    CheckConstraint("single", name="single"),
)

# Append-only: a trigger refuses UPDATE, DELETE and TRUNCATE.
audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    _moment("time"),
    _text("principal"),
    _text("method"),
    _text("resource"),
    Column("before", JSONB(none_as_null=True)),
    Column("after", JSONB(none_as_null=True)),
    _text("request_id"),
    PrimaryKeyConstraint("id"),
)

# What a write answered, for a day.
idempotency = Table(
    "idempotency",
    metadata,
    _text("principal"),
    _text("request_id"),
    _text("method"),
    _text("fingerprint"),
    Column("answer", JSONB(none_as_null=True)),
    _moment("create_time"),
    PrimaryKeyConstraint("principal", "request_id"),
    Index(None, "create_time"),
)

# One row: who took the leader's lock last, and whether it gave it up itself. Written at each change, not to keep it.
leadership = Table(
    "leadership",
    metadata,
    Column("single", Boolean, nullable=False),
    _whole("epoch"),
    _text("holder"),
    _number("lease_s"),
    _flag("released"),
    PrimaryKeyConstraint("single"),
    CheckConstraint("single", name="single"),
)

learned_state = Table(
    "learned_state",
    metadata,
    _text("key"),
    Column("state", LargeBinary, nullable=False),
    _moment("update_time"),
    PrimaryKeyConstraint("key"),
)

usage = Table(
    "usage",
    metadata,
    _text("tenant"),
    _text("model"),
    _moment("minute"),
    _whole("requests"),
    _whole("prompt_tokens"),
    _whole("cached_tokens"),
    _whole("completion_tokens"),
    Column("refusals", BigInteger, nullable=False, server_default="0"),
    Column("failures", BigInteger, nullable=False, server_default="0"),
    Column("fail_open", BigInteger, nullable=False, server_default="0"),
    PrimaryKeyConstraint("tenant", "model", "minute"),
    Index(None, "minute"),
)

# The batches of usage added, for a day: one whose answer was lost is sent again, and added once.
usage_batches = Table(
    "usage_batches",
    metadata,
    _text("batch"),
    _moment("create_time"),
    PrimaryKeyConstraint("batch"),
    Index(None, "create_time"),
)
