"""The seven kinds of resource that admins write: what they are called, how they are named, what not having one is."""

from collections.abc import Mapping
from typing import Final

from headway_scheduler.domain import names
from headway_scheduler.domain.desired import (
    Binding,
    Credential,
    DesiredState,
    GpuGroup,
    Model,
    StrategyBinding,
    StrategyConfig,
    Tenant,
)
from headway_scheduler.errors import UnknownModel, UnknownResource, UnknownTenant

__all__ = ["Resource", "by_key", "key_of", "name_of", "noun_of", "resource_name", "unknown"]

Resource = Tenant | GpuGroup | Binding | Model | StrategyConfig | StrategyBinding | Credential

_COLLECTIONS: Final[Mapping[type[object], str]] = {
    Tenant: names.TENANTS,
    GpuGroup: names.GPU_GROUPS,
    Binding: names.BINDINGS,
    Model: names.MODELS,
    StrategyConfig: names.STRATEGIES,
    StrategyBinding: names.STRATEGY_BINDINGS,
    Credential: names.CREDENTIALS,
}
_NOUNS: Final[Mapping[type[object], str]] = {
    Tenant: "tenant",
    GpuGroup: "gpu_group",
    Binding: "binding",
    Model: "model",
    StrategyConfig: "strategy",
    StrategyBinding: "strategy_binding",
    Credential: "credential",
}


def noun_of(kind: type[object]) -> str:
    """The field that holds such a resource in a request: `gpu_group`. Errors name fields by it."""
    return _NOUNS[kind]


def key_of(resource: Resource) -> str:
    """The resource's id; a binding's is `tenant/group`."""
    if isinstance(resource, Binding):
        return f"{resource.tenant}/{resource.group}"
    return resource.id


def resource_name(kind: type[object], key: str) -> str:
    """The full name of the resource with this key: `gpuGroups/gold`, `tenants/acme/bindings/gold`."""
    if kind is Binding:
        tenant, _, group = key.partition("/")
        return f"{names.TENANTS}/{tenant}/{names.BINDINGS}/{group}"
    return f"{_COLLECTIONS[kind]}/{key}"


def name_of(resource: Resource) -> str:
    """The resource's full name."""
    return resource_name(type(resource), key_of(resource))


def unknown(kind: type[object], key: str, field: str = "name") -> UnknownResource:
    """The error for a resource that is not there."""
    classes: Mapping[type[object], type[UnknownTenant] | type[UnknownModel]]
    classes = {Tenant: UnknownTenant, Model: UnknownModel}
    return classes.get(kind, UnknownResource)(resource_name(kind, key), field)


def by_key(state: DesiredState, kind: type[object]) -> Mapping[str, Resource]:
    """All resources of one kind in a snapshot, by key."""
    every: Mapping[type[object], Mapping[str, Resource] | tuple[Resource, ...]] = {
        Tenant: state.tenants,
        GpuGroup: state.groups,
        Binding: state.bindings,
        Model: state.models,
        StrategyConfig: state.strategies,
        StrategyBinding: state.strategy_bindings,
        Credential: state.credentials,
    }
    held = every[kind]
    return held if isinstance(held, Mapping) else {key_of(resource): resource for resource in held}
