"""Desired state: what admins configured. Kept in Postgres, held in memory as one frozen snapshot."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from headway_scheduler.domain.endpoint import SchedulingState

__all__ = [
    "EVERYBODY",
    "AuditEntry",
    "Binding",
    "BindingMode",
    "Credential",
    "DesiredState",
    "DisruptionBudget",
    "GpuGroup",
    "Model",
    "Principal",
    "Quotas",
    "Role",
    "Split",
    "StoredMeta",
    "StrategyBinding",
    "StrategyConfig",
    "StrategyRevision",
    "Tenant",
]

EVERYBODY: Final = "*"
"""In place of a tenant's id: every tenant, of today and to come."""


@dataclass(frozen=True, slots=True)
class StoredMeta:
    """What the store adds to a resource: its version and its times."""

    etag: str
    create_time: datetime
    update_time: datetime


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of a tenant, or of a tenant for one model; 0 means none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_inflight: int = 0

    def within(self, other: "Quotas") -> "Quotas":
        """Both hold."""
        return Quotas(
            _least(self.requests_per_minute, other.requests_per_minute),
            _least(self.tokens_per_minute, other.tokens_per_minute),
            _least(self.max_inflight, other.max_inflight),
        )


def _least(one: int, another: int) -> int:
    """The smaller limit, where 0 is none."""
    return min(one, another) if one and another else one or another


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends requests. `priority`: -1 best effort, 0 standard, 1 critical.

    `models`, `adapters`: those it may ask for; empty: all. `model_quotas` hold within `quotas`, by the model's id
    or an alias. `routed_percent`: how many of 100 of its requests are routed; data planes balance the others, and are
    watched.
    """

    id: str
    display_name: str = ""
    isolation_domain: str = ""
    weight: float = 1.0
    priority: int = 0
    quotas: Quotas = Quotas()
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    model_quotas: Mapping[str, Quotas] = field(default_factory=dict)
    routed_percent: int = 100
    meta: StoredMeta | None = None

    @property
    def domain(self) -> str:
        """What may share a KV cache: the isolation domain, by default the tenant alone.

        The two live in separate namespaces, so a domain named like another tenant never joins it by accident.
        """
        return f"domain/{self.isolation_domain}" if self.isolation_domain else f"tenant/{self.id}"


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """A named set of nodes or endpoints: by label selector, by name, or all."""

    id: str
    display_name: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    all: bool = False
    meta: StoredMeta | None = None

    def holds(self, endpoint: str, node: str, labels: Mapping[str, str]) -> bool:
        """Is the endpoint (its id, its node's id, the labels of both) a member?"""
        if self.all or endpoint in self.endpoints or node in self.nodes:
            return True
        return bool(self.selector) and all(labels.get(key) == value for key, value in self.selector.items())


class BindingMode(StrEnum):
    """How a tenant uses a GPU group."""

    DEDICATED = "dedicated"
    SHARED = "shared"
    BURST = "burst"


@dataclass(frozen=True, slots=True)
class Binding:
    """A tenant may use a GPU group; lower `order` first."""

    tenant: str
    group: str
    mode: BindingMode = BindingMode.SHARED
    order: int = 0
    weight: float = 1.0
    meta: StoredMeta | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """A weighted share of a model's requests, for those of its endpoints that match all that is set."""

    name: str
    weight: float = 0.0
    selector: Mapping[str, str] = field(default_factory=dict)
    engine_version: str = ""
    group: str = ""

    def holds(self, labels: Mapping[str, str], engine_version: str, groups: Collection[str]) -> bool:
        """Does an endpoint with these labels, in these groups, belong to it?"""
        return (
            all(labels.get(key) == value for key, value in self.selector.items())
            and self.engine_version in ("", engine_version)
            and (not self.group or self.group in groups)
        )


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """How many of a model's endpoints admins must leave able to serve, at least; both hold."""

    min_available: int = 0
    min_available_share: float = 0.0

    def required(self, total: int) -> int:
        """Of so many endpoints that serve the model."""
        return max(self.min_available, math.ceil(round(self.min_available_share * total, 6)))


@dataclass(frozen=True, slots=True)
class Model:
    """An entry of the catalogue. `discovered`: an agent reported it, no admin wrote it."""

    id: str
    aliases: tuple[str, ...] = ()
    tokenizer: str = ""
    max_context_tokens: int = 0
    discovered: bool = False
    splits: tuple[Split, ...] = ()
    disruption_budget: DisruptionBudget = DisruptionBudget()
    meta: StoredMeta | None = None


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """A strategy as configured: an algorithm of the catalogue, its parameters, and what stands in for it.

    `time_budget_us` 0 means the default.
    """

    id: str
    algorithm: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON values, checked by the algorithm itself
    enabled: bool = True
    fallback_algorithm: str = "least_request"
    time_budget_us: int = 0
    display_name: str = ""
    revision: int = 1
    meta: StoredMeta | None = None


@dataclass(frozen=True, slots=True)
class StrategyRevision:
    """A strategy as it was."""

    config: StrategyConfig
    create_time: datetime
    author: str


@dataclass(frozen=True, slots=True)
class StrategyBinding:
    """Where a strategy applies; all of tenant, model and group empty is the default."""

    id: str
    strategy: str
    tenant: str = ""
    model: str = ""
    group: str = ""
    shadow: bool = False
    meta: StoredMeta | None = None


class Role(StrEnum):
    """What a principal may do."""

    __hash__ = str.__hash__  # an enumeration's own is Python code, and this one is looked up at every decision

    AGENT = "agent"
    ROUTER = "router"
    ADMIN = "admin"
    VIEWER = "viewer"
    TENANT = "tenant"
    """An end user's key: calls nothing, and stands for its tenant where a data plane is shown it."""


@dataclass(frozen=True, slots=True)
class Credential:
    """Who may call. Only the token's SHA-256 is kept.

    `previous_token_sha256` is of the token before the last rotation, and counts until `previous_expire_time`; empty:
    there is none. `certificate_identity` is a URI or DNS name in client certificates that stands for it.
    """

    id: str
    role: Role
    token_sha256: bytes
    node: str = ""
    tenants: tuple[str, ...] = ()
    expire_time: datetime | None = None
    revoked: bool = False
    certificate_identity: str = ""
    previous_token_sha256: bytes = b""
    previous_expire_time: datetime | None = None
    meta: StoredMeta | None = None

    def rotated(self, token_sha256: bytes, now: datetime, overlap: timedelta) -> "Credential":
        """With another token; the one before counts for `overlap` longer.

        While one is still valid from an earlier rotation that one stays, for whoever uses it, and the newer one goes: a
        rotation whose answer was lost can be repeated. Without an overlap only the new token counts.
        """
        previous, until = self.token_sha256, now + overlap
        if self.previous_expire_time is not None and self.previous_expire_time > now:
            previous, until = self.previous_token_sha256, max(until, self.previous_expire_time)
        if not overlap:
            return replace(self, token_sha256=token_sha256, previous_token_sha256=b"", previous_expire_time=None)
        return replace(self, token_sha256=token_sha256, previous_token_sha256=previous, previous_expire_time=until)


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `tenants` holds what it may name; `*` is any, the first is its own."""

    id: str
    role: Role
    node: str = ""
    tenants: tuple[str, ...] = ("*",)

    def may_name(self, tenant: str) -> bool:
        """May it act for this tenant?"""
        return "*" in self.tenants or tenant in self.tenants


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One admin write: who, what, before, after."""

    id: int
    time: datetime
    principal: str
    method: str
    resource: str
    before: Mapping[str, Any] | None  # the resource as JSON
    after: Mapping[str, Any] | None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Everything admins configured, by id, at one moment. `version` grows with every change of the store.

    `bypassed`: ids of the tenants whose requests are left alone; `EVERYBODY`: all requests are.
    """

    version: int = 0
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    groups: Mapping[str, GpuGroup] = field(default_factory=dict)
    bindings: tuple[Binding, ...] = ()
    models: Mapping[str, Model] = field(default_factory=dict)
    strategies: Mapping[str, StrategyConfig] = field(default_factory=dict)
    strategy_bindings: tuple[StrategyBinding, ...] = ()
    credentials: Mapping[str, Credential] = field(default_factory=dict)
    node_states: Mapping[str, SchedulingState] = field(default_factory=dict)
    endpoint_states: Mapping[str, SchedulingState] = field(default_factory=dict)
    bypassed: frozenset[str] = frozenset()

    def bypasses(self, tenant: str) -> bool:
        """Are this tenant's requests left alone?"""
        return bool(self.bypassed) and (EVERYBODY in self.bypassed or tenant in self.bypassed)
