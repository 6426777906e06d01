"""Domain values ↔ rows and JSON documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import Column, Row, Table

from headway_scheduler.domain.desired import (
    Binding,
    BindingMode,
    Credential,
    DisruptionBudget,
    GpuGroup,
    Model,
    Quotas,
    Role,
    Split,
    StoredMeta,
    StrategyBinding,
    StrategyConfig,
    Tenant,
)
from headway_scheduler.domain.resources import Resource
from headway_scheduler.store import schema

__all__ = ["SHAPES", "Shape", "audit_document", "document", "resource_of", "revision_document"]

R = TypeVar("R", bound=Resource)
Values = dict[str, Any]  # column values of any type


@dataclass(frozen=True, slots=True)
class Shape:
    """How one kind of resource lies in its table."""

    table: Table
    keys: tuple[Column[Any], ...]  # matched with the parts of a key; of any column type
    to_row: Callable[[Any], Values]  # takes the kind's own dataclass, which a mapping by kind cannot express
    to_resource: Callable[[Row[Any], StoredMeta], Resource]

    def read(self, row: Row[Any]) -> Resource:
        """The resource in a row of the table."""
        return self.to_resource(row, StoredMeta(_etag(row.version), row.create_time, row.update_time))

    def key_values(self, key: str) -> Values:
        """The key columns' values of the resource with this key."""
        parts = key.split("/", 1) if len(self.keys) > 1 else [key]
        return {column.name: part for column, part in zip(self.keys, parts, strict=True)}


def _etag(version: int) -> str:
    return f"W{version:x}"


def _tenant_row(tenant: Tenant) -> Values:
    return {
        "id": tenant.id,
        "display_name": tenant.display_name,
        "isolation_domain": tenant.isolation_domain,
        "weight": tenant.weight,
        "priority": tenant.priority,
        "requests_per_minute": tenant.quotas.requests_per_minute,
        "tokens_per_minute": tenant.quotas.tokens_per_minute,
        "max_inflight": tenant.quotas.max_inflight,
        "models": list(tenant.models),
        "adapters": list(tenant.adapters),
        "model_quotas": msgspec.to_builtins(tenant.model_quotas),
        "routed_percent": tenant.routed_percent,
    }


def _tenant(row: Row[Any], meta: StoredMeta) -> Tenant:
    quotas = Quotas(row.requests_per_minute, row.tokens_per_minute, row.max_inflight)
    return Tenant(
        row.id,
        row.display_name,
        row.isolation_domain,
        row.weight,
        row.priority,
        quotas,
        tuple(row.models),
        tuple(row.adapters),
        msgspec.convert(row.model_quotas, dict[str, Quotas]),
        row.routed_percent,
        meta,
    )


def _group_row(group: GpuGroup) -> Values:
    return {
        "id": group.id,
        "display_name": group.display_name,
        "selector": dict(group.selector),
        "nodes": list(group.nodes),
        "endpoints": list(group.endpoints),
        "all": group.all,
    }


def _group(row: Row[Any], meta: StoredMeta) -> GpuGroup:
    return GpuGroup(
        row.id, row.display_name, row.selector, tuple(row.nodes), tuple(row.endpoints), row._mapping["all"], meta
    )


def _binding_row(binding: Binding) -> Values:
    return {
        "tenant_id": binding.tenant,
        "group_id": binding.group,
        "mode": binding.mode.value,
        "order": binding.order,
        "weight": binding.weight,
    }


def _binding(row: Row[Any], meta: StoredMeta) -> Binding:
    return Binding(row.tenant_id, row.group_id, BindingMode(row.mode), row.order, row.weight, meta)


def _model_row(model: Model) -> Values:
    return {
        "id": model.id,
        "aliases": list(model.aliases),
        "tokenizer": model.tokenizer,
        "max_context_tokens": model.max_context_tokens,
        "discovered": model.discovered,
        "splits": {split.name: msgspec.to_builtins(split) for split in model.splits},
        "min_available": model.disruption_budget.min_available,
        "min_available_share": model.disruption_budget.min_available_share,
    }


def _model(row: Row[Any], meta: StoredMeta) -> Model:
    return Model(
        row.id,
        tuple(row.aliases),
        row.tokenizer,
        row.max_context_tokens,
        row.discovered,
        tuple(msgspec.convert(row.splits[name], Split) for name in sorted(row.splits)),
        DisruptionBudget(row.min_available, row.min_available_share),
        meta,
    )


def _strategy_row(strategy: StrategyConfig) -> Values:
    return {
        "id": strategy.id,
        "algorithm": strategy.algorithm,
        "parameters": dict(strategy.parameters),
        "enabled": strategy.enabled,
        "fallback_algorithm": strategy.fallback_algorithm,
        "time_budget_us": strategy.time_budget_us,
        "display_name": strategy.display_name,
        "revision": strategy.revision,
    }


def _strategy(row: Row[Any], meta: StoredMeta) -> StrategyConfig:
    return StrategyConfig(
        row.id,
        row.algorithm,
        row.parameters,
        row.enabled,
        row.fallback_algorithm,
        row.time_budget_us,
        row.display_name,
        row.revision,
        meta,
    )


def _strategy_binding_row(binding: StrategyBinding) -> Values:
    return {
        "id": binding.id,
        "strategy_id": binding.strategy,
        "tenant_id": binding.tenant or None,
        "model_id": binding.model or None,
        "group_id": binding.group or None,
        "shadow": binding.shadow,
    }


def _strategy_binding(row: Row[Any], meta: StoredMeta) -> StrategyBinding:
    return StrategyBinding(
        row.id, row.strategy_id, row.tenant_id or "", row.model_id or "", row.group_id or "", row.shadow, meta
    )


def _credential_row(credential: Credential) -> Values:
    return {
        "id": credential.id,
        "role": credential.role.value,
        "token_sha256": credential.token_sha256,
        "node": credential.node,
        "tenants": list(credential.tenants),
        "expire_time": credential.expire_time,
        "revoked": credential.revoked,
        "certificate_identity": credential.certificate_identity or None,
        "previous_token_sha256": credential.previous_token_sha256 or None,
        "previous_expire_time": credential.previous_expire_time,
    }


def _credential(row: Row[Any], meta: StoredMeta) -> Credential:
    return Credential(
        row.id,
        Role(row.role),
        bytes(row.token_sha256),
        row.node,
        tuple(row.tenants),
        row.expire_time,
        row.revoked,
        row.certificate_identity or "",
        bytes(row.previous_token_sha256 or b""),
        row.previous_expire_time,
        meta,
    )


def _shape(
    table: Table, to_row: Callable[[Any], Values], to_resource: Callable[[Row[Any], StoredMeta], Resource]
) -> Shape:
    return Shape(table, tuple(table.primary_key.columns), to_row, to_resource)


SHAPES: Final[Mapping[type[object], Shape]] = {
    Tenant: _shape(schema.tenants, _tenant_row, _tenant),
    GpuGroup: _shape(schema.gpu_groups, _group_row, _group),
    Binding: _shape(schema.bindings, _binding_row, _binding),
    Model: _shape(schema.models, _model_row, _model),
    StrategyConfig: _shape(schema.strategies, _strategy_row, _strategy),
    StrategyBinding: _shape(schema.strategy_bindings, _strategy_binding_row, _strategy_binding),
    Credential: _shape(schema.credentials, _credential_row, _credential),
}


def document(resource: Resource) -> Values:
    """The whole resource as JSON; `resource_of` reads it back."""
    made: Values = msgspec.to_builtins(resource)
    return made


def resource_of(kind: type[R], made: Mapping[str, Any]) -> R:
    """The resource in a document."""
    return msgspec.convert(made, kind)


def audit_document(resource: Resource | None) -> Values | None:
    """The resource as the audit trail keeps it: no secrets, not even their hashes."""
    if resource is None:
        return None
    made = document(resource)
    for secret in ("token_sha256", "previous_token_sha256"):
        made.pop(secret, None)
    return made


def revision_document(strategy: StrategyConfig) -> Values:
    """The strategy as a revision keeps it: without what the store adds."""
    return document(replace(strategy, meta=None))
