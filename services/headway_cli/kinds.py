"""The seven kinds of resource that admins write, as one table: a new kind is one entry here."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headway.admin.v1 import admin_pb2 as pb

__all__ = [
    "BINDINGS",
    "CREDENTIALS",
    "GPU_GROUPS",
    "KINDS",
    "MODELS",
    "OUTPUTS",
    "STRATEGIES",
    "STRATEGY_BINDINGS",
    "TENANTS",
    "Kind",
    "by_name",
    "qualified",
]

Resource = Any  # a message of one of the seven kinds

OUTPUTS: Final = frozenset(
    {"etag", "create_time", "update_time", "revision", "discovered", "revoked", "previous_token_expire_time"}
)
"""Fields that only the scheduler sets."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind.

    `name` is the message's and what YAML calls it; `references` are the fields that name other resources; `defaults`
    what zero or an absent field means where that is not zero; `initial` what a new one starts with; `kept` tells which
    resources `apply --prune` never deletes.
    """

    name: str
    plural: str
    command: str
    collection: str
    message: Callable[..., Resource]
    what: str
    example: str
    columns: tuple[str, ...]
    references: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the fields' own types
    initial: Mapping[str, Any] = field(default_factory=dict)  # what a new one starts with; of the fields' own types
    complete: Callable[[Resource], None] = lambda _: None
    kept: Callable[[Resource], bool] = lambda _: False
    list_arguments: Mapping[str, str] = field(default_factory=dict)
    can_force: bool = False

    @property
    def noun(self) -> str:
        """The field of requests that holds it: `gpu_group`."""
        return _snake(self.name)

    @property
    def list_field(self) -> str:
        """The field of list responses: `gpu_groups`."""
        return _snake(self.plural)

    @property
    def singular(self) -> str:
        """For people: `GPU group`."""
        return self.noun.replace("_", " ").replace("gpu", "GPU")

    @property
    def fields(self) -> tuple[str, ...]:
        """What an admin may set, the name left out."""
        names = (each.name for each in self.message().DESCRIPTOR.fields)
        return tuple(name for name in names if name not in OUTPUTS and name != "name")

    def new(self, name: str) -> Resource:
        """A message to fill."""
        return self.message(name=name, **self.initial)

    def full_name(self, name: str) -> str:
        """`tenants/acme` of `acme`; a binding is `acme/gold` for short."""
        if self.collection != "bindings":
            return qualified(self.collection, name)
        tenant, _, group = name.partition("/")
        short = tenant and group and "/" not in group
        return f"tenants/{tenant}/bindings/{group}" if short else name

    def normalize(self, message: Resource) -> None:
        """Write it as the scheduler answers it: names in full, absent fields with what they mean."""
        message.name = self.full_name(message.name)
        for name, collection in self.references.items():
            value = getattr(message, name)
            if not isinstance(value, str):
                value[:] = [each.removeprefix(f"{collection}/") for each in value]
            elif value:
                setattr(message, name, qualified(collection, value))
        for name, default in self.defaults.items():
            if not getattr(message, name):
                setattr(message, name, default)
        self.complete(message)


def qualified(collection: str, name: str) -> str:
    """`strategies/adaptive` of either `adaptive` or itself."""
    return name if name.startswith(f"{collection}/") else f"{collection}/{name}"


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _identifier(message: Resource) -> str:
    return str(message.name.partition("/")[2])


def _complete_tenant(tenant: pb.Tenant) -> None:
    if tenant.routed_percent == 100:
        tenant.ClearField("routed_percent")


def _complete_model(model: pb.Model) -> None:
    for split in model.splits.values():
        split.gpu_group = split.gpu_group and qualified("gpuGroups", split.gpu_group)
    if model.disruption_budget == pb.DisruptionBudget():
        model.ClearField("disruption_budget")


def _complete_binding(binding: pb.Binding) -> None:
    binding.gpu_group = binding.gpu_group or f"gpuGroups/{binding.name.rpartition('/')[2]}"


def _complete_strategy(strategy: pb.Strategy) -> None:
    if strategy.algorithm and not strategy.fallback_algorithm:
        strategy.fallback_algorithm = "round_robin" if strategy.algorithm == "least_request" else "least_request"


MODELS: Final = Kind(
    name="Model",
    plural="Models",
    command="models",
    collection="models",
    message=pb.Model,
    what="models of the catalogue",
    example="llama-3-8b aliases=llama,small max_context_tokens=8192",
    columns=("name", "aliases", "tokenizer", "max_context_tokens", "splits", "disruption_budget", "discovered"),
    complete=_complete_model,
    kept=lambda model: bool(model.discovered),
)
GPU_GROUPS: Final = Kind(
    name="GpuGroup",
    plural="GpuGroups",
    command="groups",
    collection="gpuGroups",
    message=pb.GpuGroup,
    what="GPU groups: named sets of nodes or endpoints",
    example="gold selector.tier=gold",
    columns=("name", "display_name", "all", "selector", "nodes", "endpoints"),
    references={"nodes": "nodes", "endpoints": "endpoints"},
    kept=lambda group: _identifier(group) == "all",
    can_force=True,
)
TENANTS: Final = Kind(
    name="Tenant",
    plural="Tenants",
    command="tenants",
    collection="tenants",
    message=pb.Tenant,
    what="tenants: who sends requests",
    example="acme weight=2 quotas.requests_per_minute=600",
    columns=("name", "display_name", "weight", "priority", "quotas", "models"),
    references={"models": "models"},
    defaults={"weight": 1.0},
    complete=_complete_tenant,
    kept=lambda tenant: _identifier(tenant) == "default",
    can_force=True,
)
BINDINGS: Final = Kind(
    name="Binding",
    plural="Bindings",
    command="bindings",
    collection="bindings",
    message=pb.Binding,
    what="bindings: which tenant may use which GPU group",
    example="acme/gold mode=dedicated",
    columns=("name", "gpu_group", "mode", "order", "weight"),
    references={"gpu_group": "gpuGroups"},
    defaults={"weight": 1.0, "mode": pb.BINDING_MODE_SHARED},
    complete=_complete_binding,
    list_arguments={"parent": "tenants/-"},
)
STRATEGIES: Final = Kind(
    name="Strategy",
    plural="Strategies",
    command="strategies",
    collection="strategies",
    message=pb.Strategy,
    what="strategies: policies that price endpoints",
    example="careful algorithm=gpu_aware parameters.memory_weight=8",
    columns=("name", "algorithm", "enabled", "parameters", "fallback_algorithm", "revision"),
    initial={"enabled": True},
    complete=_complete_strategy,
    # The installation makes one of each algorithm, named like it.
    kept=lambda strategy: _identifier(strategy) == strategy.algorithm,
    can_force=True,
)
STRATEGY_BINDINGS: Final = Kind(
    name="StrategyBinding",
    plural="StrategyBindings",
    command="strategy-bindings",
    collection="strategyBindings",
    message=pb.StrategyBinding,
    what="strategy bindings: where a strategy applies",
    example="acme strategy=careful tenant=acme",
    columns=("name", "strategy", "tenant", "model", "gpu_group", "shadow"),
    references={"strategy": "strategies", "tenant": "tenants", "model": "models", "gpu_group": "gpuGroups"},
    kept=lambda binding: _identifier(binding) == "default",
)
CREDENTIALS: Final = Kind(
    name="Credential",
    plural="Credentials",
    command="credentials",
    collection="credentials",
    message=pb.Credential,
    what="credentials: who may call",
    example="gateway-1 role=router tenants=acme,globex",
    columns=(
        "name",
        "role",
        "node",
        "tenants",
        "certificate_identity",
        "expire_time",
        "previous_token_expire_time",
        "revoked",
    ),
    references={"node": "nodes", "tenants": "tenants"},
    kept=lambda _: True,  # whoever prunes must not lock everyone out
)

KINDS: Final = (GPU_GROUPS, MODELS, TENANTS, BINDINGS, STRATEGIES, STRATEGY_BINDINGS, CREDENTIALS)
"""In the order in which one may refer to another."""


def by_name(name: str) -> Kind | None:
    """The kind that YAML calls so."""
    return next((kind for kind in KINDS if kind.name == name), None)
