"""What breaking a constraint means, by the constraint's name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from headway_scheduler.domain.desired import (
    Binding,
    Credential,
    GpuGroup,
    Model,
    StrategyBinding,
    StrategyConfig,
    Tenant,
)
from headway_scheduler.domain.resources import Resource, name_of, resource_name, unknown
from headway_scheduler.errors import DuplicateName, HeadwayError, InUse, InvalidField

__all__ = ["broken_by_delete", "broken_by_write"]


@dataclass(frozen=True, slots=True)
class _Reference:
    """A foreign key: the field that refers, to what kind, the key referred to, and who refers."""

    field: str
    kind: type[Resource]
    target: Callable[[Resource], str]
    referrers: str


def _attribute(name: str) -> Callable[[Resource], str]:
    return lambda resource: str(getattr(resource, name))


_BINDINGS = "bindings of GPU groups"
_STRATEGY_BINDINGS = "strategy bindings"

_REFERENCES: Final[Mapping[str, _Reference]] = {
    "fk_bindings_tenant_id_tenants": _Reference("binding.name", Tenant, _attribute("tenant"), _BINDINGS),
    "fk_bindings_group_id_gpu_groups": _Reference("binding.gpu_group", GpuGroup, _attribute("group"), _BINDINGS),
    "fk_strategy_bindings_strategy_id_strategies": _Reference(
        "strategy_binding.strategy", StrategyConfig, _attribute("strategy"), _STRATEGY_BINDINGS
    ),
    "fk_strategy_bindings_tenant_id_tenants": _Reference(
        "strategy_binding.tenant", Tenant, _attribute("tenant"), _STRATEGY_BINDINGS
    ),
    "fk_strategy_bindings_model_id_models": _Reference(
        "strategy_binding.model", Model, _attribute("model"), _STRATEGY_BINDINGS
    ),
    "fk_strategy_bindings_group_id_gpu_groups": _Reference(
        "strategy_binding.gpu_group", GpuGroup, _attribute("group"), _STRATEGY_BINDINGS
    ),
}

_CHECKS: Final[Mapping[str, tuple[str, str]]] = {
    "ck_tenants_weight": ("tenant.weight", "must be > 0"),
    "ck_tenants_priority": ("tenant.priority", "must be -1, 0 or 1"),
    "ck_tenants_quotas": ("tenant.quotas", "must be >= 0"),
    "ck_tenants_routed_percent": ("tenant.routed_percent", "must be 0 to 100"),
    "ck_bindings_mode": ("binding.mode", "must be dedicated, shared or burst"),
    "ck_bindings_weight": ("binding.weight", "must be > 0"),
    "ck_models_max_context_tokens": ("model.max_context_tokens", "must be >= 0"),
    "ck_models_disruption_budget": ("model.disruption_budget", "must be >= 0, its share at most 1"),
    "ck_strategies_time_budget_us": ("strategy.time_budget_us", "must be >= 0"),
    "ck_strategy_bindings_scope": ("strategy_binding.gpu_group", "cannot be combined with a tenant or a model"),
    "ck_credentials_role": ("credential.role", "must be agent, router, admin, viewer or tenant"),
    "ck_credentials_token_sha256": ("credential.token_sha256", "must be 32 bytes"),
    "ck_credentials_previous_token_sha256": ("credential.previous_token_sha256", "must be 32 bytes"),
    "ck_credentials_previous_expire_time": ("credential.previous_expire_time", "goes with a previous token"),
}


_PRIMARY_KEYS: Final[Mapping[type[Resource], str]] = {
    Tenant: "pk_tenants",
    GpuGroup: "pk_gpu_groups",
    Binding: "pk_bindings",
    Model: "pk_models",
    StrategyConfig: "pk_strategies",
    StrategyBinding: "pk_strategy_bindings",
    Credential: "pk_credentials",
}


def broken_by_write(constraint: str, resource: Resource) -> HeadwayError | None:
    """The error for a constraint that creating or updating `resource` broke; None for one we do not know."""
    kind = type(resource)
    if constraint == _PRIMARY_KEYS[kind]:
        return DuplicateName(name_of(resource))
    if constraint in ("uq_credentials_token_sha256", "uq_credentials_previous_token_sha256"):
        return InvalidField("credential.token_sha256", "another credential has this token")
    if constraint == "uq_credentials_certificate_identity":
        return InvalidField("credential.certificate_identity", "another credential has this identity")
    if constraint == "uq_strategy_bindings_scope":
        return InUse(f"the scope of {name_of(resource)}", "another strategy binding")
    if reference := _REFERENCES.get(constraint):
        return unknown(reference.kind, reference.target(resource), reference.field)
    if check := _CHECKS.get(constraint):
        return InvalidField(*check)
    return None


def broken_by_delete(constraint: str, kind: type[object], key: str) -> HeadwayError | None:
    """The error for a constraint that deleting this resource broke; None for one we do not know."""
    reference = _REFERENCES.get(constraint)
    return InUse(resource_name(kind, key), reference.referrers) if reference else None
