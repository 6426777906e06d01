"""Admin's messages ↔ domain values. Every fault found here names its field: `tenant.weight: must be > 0`."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from headway.admin.v1 import admin_pb2

from headway_scheduler.domain import names
from headway_scheduler.domain.desired import (
    EVERYBODY,
    AuditEntry,
    Binding,
    BindingMode,
    Credential,
    DesiredState,
    DisruptionBudget,
    GpuGroup,
    Model,
    Quotas,
    Role,
    Split,
    StoredMeta,
    StrategyBinding,
    StrategyConfig,
    StrategyRevision,
    Tenant,
)
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.fleet_view import EndpointView, NodeView
from headway_scheduler.domain.resources import Resource, name_of, noun_of
from headway_scheduler.errors import InvalidField
from headway_scheduler.rpc.convert.numbers import uint32

__all__ = [
    "BINDINGS",
    "CREDENTIALS",
    "GPU_GROUPS",
    "MODELS",
    "STRATEGIES",
    "STRATEGY_BINDINGS",
    "TENANTS",
    "Kind",
    "audit_message",
    "bypassed_names",
    "endpoint_message",
    "moment",
    "node_message",
    "revision_message",
    "scheduling_state",
]

R = TypeVar("R", bound=Resource)
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=StrEnum)
Json = Mapping[str, Any]  # a JSON object

_OUTPUTS: Final = frozenset({"name", "etag", "create_time", "update_time"})
_LONGEST_TEXT: Final = 253
_LONGEST_LIST: Final = 1000
_LARGEST_WEIGHT: Final = 1_000_000.0
_LARGEST_INTEGER: Final = 2**63 - 1
_LARGEST_EXACT: Final = 2**53
_LARGEST_PARAMETERS: Final = 65_536
_IDENTITY: Final = re.compile(
    r"[a-z][a-z0-9+.-]*://[!-~]{1,2000}|(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*"
)
_SPLIT_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Kind(Generic[R, M]):
    """How one kind of resource travels.

    `to_resource` takes the message and, in an update, what is stored: fields that only the scheduler sets come from
    there. `fixed` are the fields that no update changes.
    """

    resource: type[R]
    message: type[M]
    key: Callable[[str, str], str]
    to_resource: Callable[[M, R | None], R]
    fill: Callable[[M, R], None]
    fixed: frozenset[str] = _OUTPUTS

    @property
    def noun(self) -> str:
        """The field of requests that holds it: `gpu_group`."""
        return noun_of(self.resource)

    def to_message(self, resource: R) -> M:
        """The message of a resource."""
        message = self.message()
        self.fill(message, resource)
        _set_meta(message, name_of(resource), resource.meta)
        return message

    def updated(self, stored: R, message: M, mask: FieldMask) -> R:
        """`stored` with the masked fields of `message`. Raises InvalidField for a path that names no such field."""
        merged = self.to_message(stored)
        chosen = FieldMask(paths=self._paths(message, mask))
        chosen.MergeMessage(message, merged, True, True)
        return self.to_resource(merged, stored)

    def _paths(self, message: M, mask: FieldMask) -> Sequence[str]:
        if not mask.paths:
            return [field.name for field, _ in message.ListFields() if field.name not in self.fixed]
        if "*" in mask.paths:
            return [field.name for field in message.DESCRIPTOR.fields if field.name not in self.fixed]
        for path in mask.paths:
            if not _is_path(message.DESCRIPTOR, path):
                raise InvalidField("update_mask", f"{path!r} is not a field of {self.noun}")
            if path.partition(".")[0] in self.fixed:
                raise InvalidField("update_mask", f"{path!r} cannot be changed by an update")
        return mask.paths


def _is_path(descriptor: Any, path: str) -> bool:  # a message descriptor: of one class per protobuf runtime
    head, _, rest = path.partition(".")
    field = descriptor.fields_by_name.get(head)
    if field is None or not rest:
        return field is not None
    nested = field.message_type
    ours = nested is not None and nested.full_name.startswith("headway.") and not field.is_repeated
    return bool(ours) and _is_path(nested, rest)


def _set_meta(message: Any, name: str, meta: StoredMeta | None) -> None:  # any of the seven messages
    message.name = name
    if meta is not None:
        message.etag = meta.etag
        message.create_time.FromDatetime(meta.create_time)
        message.update_time.FromDatetime(meta.update_time)


# Checks shared by the kinds


def _in(collection: str) -> Callable[[str, str], str]:
    return lambda name, field: names.parse_name(collection, name, field)


def _text(value: str, field: str) -> str:
    if len(value) > _LONGEST_TEXT:
        raise InvalidField(field, f"must be at most {_LONGEST_TEXT} characters")
    if not value.isprintable():
        raise InvalidField(field, "must hold no control characters")
    return value


def _each(values: Sequence[str], field: str, check: Callable[[str, str], str]) -> tuple[str, ...]:
    """The values, checked one by one, duplicates refused."""
    if len(values) > _LONGEST_LIST:
        raise InvalidField(field, f"must hold at most {_LONGEST_LIST}")
    checked = tuple(check(value, f"{field}[{index}]") for index, value in enumerate(values))
    for index, value in enumerate(checked):
        if value in checked[:index]:
            raise InvalidField(f"{field}[{index}]", f"{value!r} is there twice")
    return checked


def _ids(values: Sequence[str], field: str, collection: str) -> tuple[str, ...]:
    return _each(values, field, lambda value, where: names.short(collection, value, where))


def _weight(value: float, field: str) -> float:
    if value == 0:
        return 1.0
    if not value > 0:
        raise InvalidField(field, "must be > 0")
    if value > _LARGEST_WEIGHT:
        raise InvalidField(field, f"must be at most {_LARGEST_WEIGHT:g}")
    return value


def _optional(collection: str, value: str, field: str) -> str:
    return names.short(collection, value, field) if value else ""


def _enum(
    name_of_value: Callable[[Any], str],  # its argument is the enum's own integer type
    prefix: str,
    kind: type[E],
    value: int,
    field: str,
) -> E:
    try:
        return kind[name_of_value(value).removeprefix(prefix)]
    except (KeyError, ValueError):
        choices = ", ".join(f"{prefix}{member.name}" for member in kind)
        raise InvalidField(field, f"must be one of {choices}") from None


def bypassed_names(desired: DesiredState) -> list[str]:
    """What is bypassed: tenants by their names, `*` for everybody."""
    return sorted(each if each == EVERYBODY else f"{names.TENANTS}/{each}" for each in desired.bypassed)


def scheduling_state(value: int, field: str) -> SchedulingState:
    """The state an admin asks for. Raises InvalidField."""
    return _enum(admin_pb2.SchedulingState.Name, "SCHEDULING_STATE_", SchedulingState, value, field)


def _state_value(state: SchedulingState) -> admin_pb2.SchedulingState.ValueType:
    return admin_pb2.SchedulingState.Value(f"SCHEDULING_STATE_{state.name}")


# Tenants


def _tenant(message: admin_pb2.Tenant, _stored: Tenant | None) -> Tenant:
    if not -1 <= message.priority <= 1:
        raise InvalidField("tenant.priority", "must be -1, 0 or 1")
    if len(message.model_quotas) > _LONGEST_LIST:
        raise InvalidField("tenant.model_quotas", f"must hold at most {_LONGEST_LIST}")
    return Tenant(
        id=names.parse_name(names.TENANTS, message.name, "tenant.name"),
        display_name=_text(message.display_name, "tenant.display_name"),
        isolation_domain=_text(message.isolation_domain, "tenant.isolation_domain"),
        weight=_weight(message.weight, "tenant.weight"),
        priority=message.priority,
        quotas=_quotas(message.quotas, "tenant.quotas"),
        models=_ids(message.models, "tenant.models", names.MODELS),
        adapters=_each(message.adapters, "tenant.adapters", _adapter),
        model_quotas={
            names.short(names.MODELS, model, f"tenant.model_quotas[{model}]"): _quotas(
                message.model_quotas[model], f"tenant.model_quotas[{model}]"
            )
            for model in sorted(message.model_quotas)
        },
        routed_percent=_percent(message),
    )


def _percent(message: admin_pb2.Tenant) -> int:
    if not message.HasField("routed_percent"):
        return 100
    if message.routed_percent > 100:
        raise InvalidField("tenant.routed_percent", "must be at most 100")
    return message.routed_percent


def _quotas(message: admin_pb2.Quotas, field: str) -> Quotas:
    if message.tokens_per_minute > _LARGEST_INTEGER:
        raise InvalidField(f"{field}.tokens_per_minute", f"must be at most {_LARGEST_INTEGER}")
    return Quotas(message.requests_per_minute, message.tokens_per_minute, message.max_inflight)


def _adapter(value: str, field: str) -> str:
    if not value:
        raise InvalidField(field, "must not be empty")
    return _text(value, field)


def _fill_quotas(message: admin_pb2.Quotas, quotas: Quotas) -> None:
    message.requests_per_minute = quotas.requests_per_minute
    message.tokens_per_minute = quotas.tokens_per_minute
    message.max_inflight = quotas.max_inflight


def _fill_tenant(message: admin_pb2.Tenant, tenant: Tenant) -> None:
    message.display_name = tenant.display_name
    message.isolation_domain = tenant.isolation_domain
    message.weight = tenant.weight
    message.priority = tenant.priority
    _fill_quotas(message.quotas, tenant.quotas)
    message.models.extend(tenant.models)
    message.adapters.extend(tenant.adapters)
    if tenant.routed_percent < 100:
        message.routed_percent = tenant.routed_percent
    for model, quotas in tenant.model_quotas.items():
        _fill_quotas(message.model_quotas[model], quotas)


TENANTS: Final = Kind(Tenant, admin_pb2.Tenant, _in(names.TENANTS), _tenant, _fill_tenant)


# GPU groups


def _gpu_group(message: admin_pb2.GpuGroup, _stored: GpuGroup | None) -> GpuGroup:
    return GpuGroup(
        id=names.parse_name(names.GPU_GROUPS, message.name, "gpu_group.name"),
        display_name=_text(message.display_name, "gpu_group.display_name"),
        selector=_selector(message.selector, "gpu_group.selector"),
        nodes=_ids(message.nodes, "gpu_group.nodes", names.NODES),
        endpoints=_ids(message.endpoints, "gpu_group.endpoints", names.ENDPOINTS),
        all=message.all,
    )


def _selector(labels: Mapping[str, str], field: str) -> dict[str, str]:
    if len(labels) > _LONGEST_LIST:
        raise InvalidField(field, f"must hold at most {_LONGEST_LIST}")
    for key, value in labels.items():
        if not key:
            raise InvalidField(field, "a label's key must not be empty")
        _text(key, field)
        _text(value, f"{field}[{key}]")
    return dict(sorted(labels.items()))


def _fill_gpu_group(message: admin_pb2.GpuGroup, group: GpuGroup) -> None:
    message.display_name = group.display_name
    message.selector.update(group.selector)
    message.nodes.extend(group.nodes)
    message.endpoints.extend(group.endpoints)
    message.all = group.all


GPU_GROUPS: Final = Kind(GpuGroup, admin_pb2.GpuGroup, _in(names.GPU_GROUPS), _gpu_group, _fill_gpu_group)


# Bindings


def _binding_key(name: str, field: str) -> str:
    """`acme/gold` of `tenants/acme/bindings/gold`."""
    if not name:
        raise InvalidField(field, "is required")
    tenant, separator, group = name.partition(f"/{names.BINDINGS}/")
    if not separator:
        raise InvalidField(field, f"{name!r} must look like tenants/TENANT/bindings/GROUP")
    return f"{names.parse_name(names.TENANTS, tenant, field)}/{names.check_id(names.GPU_GROUPS, group, field)}"


def _binding(message: admin_pb2.Binding, _stored: Binding | None) -> Binding:
    tenant, _, group = _binding_key(message.name, "binding.name").partition("/")
    if message.gpu_group and names.short(names.GPU_GROUPS, message.gpu_group, "binding.gpu_group") != group:
        raise InvalidField("binding.gpu_group", f"must be gpuGroups/{group}, as the name says")
    mode = BindingMode.SHARED
    if message.mode:
        mode = _enum(admin_pb2.BindingMode.Name, "BINDING_MODE_", BindingMode, message.mode, "binding.mode")
    return Binding(tenant, group, mode, message.order, _weight(message.weight, "binding.weight"))


def _fill_binding(message: admin_pb2.Binding, binding: Binding) -> None:
    message.gpu_group = f"{names.GPU_GROUPS}/{binding.group}"
    message.mode = admin_pb2.BindingMode.Value(f"BINDING_MODE_{binding.mode.name}")
    message.order = binding.order
    message.weight = binding.weight


BINDINGS: Final = Kind(
    Binding, admin_pb2.Binding, _binding_key, _binding, _fill_binding, fixed=_OUTPUTS | {"gpu_group"}
)


# Models


def _model(message: admin_pb2.Model, stored: Model | None) -> Model:
    identifier = names.parse_name(names.MODELS, message.name, "model.name")

    def alias(value: str, field: str) -> str:
        if value == identifier:
            raise InvalidField(field, f"{value!r} is the model's own name")
        return names.check_id(names.MODELS, value, field)

    return Model(
        id=identifier,
        aliases=_each(message.aliases, "model.aliases", alias),
        tokenizer=_text(message.tokenizer, "model.tokenizer"),
        max_context_tokens=message.max_context_tokens,
        discovered=stored.discovered if stored else False,
        splits=_splits(message.splits),
        disruption_budget=_budget(message.disruption_budget),
    )


def _splits(messages: Mapping[str, admin_pb2.Split]) -> tuple[Split, ...]:
    if len(messages) > _LONGEST_LIST:
        raise InvalidField("model.splits", f"must hold at most {_LONGEST_LIST}")
    found = tuple(_split(name, messages[name]) for name in sorted(messages))
    if found and not any(split.weight for split in found):
        raise InvalidField("model.splits", "one must have a weight, or nothing would get requests")
    return found


def _split(name: str, message: admin_pb2.Split) -> Split:
    field = f"model.splits[{name}]"
    if not _SPLIT_NAME.fullmatch(name):
        raise InvalidField(field, "a split's name must look like stable or canary-2")
    if not 0 <= message.weight <= _LARGEST_WEIGHT:
        raise InvalidField(f"{field}.weight", f"must be in 0 to {_LARGEST_WEIGHT:g}")
    split = Split(
        name=name,
        weight=message.weight,
        selector=_selector(message.selector, f"{field}.selector"),
        engine_version=_text(message.engine_version, f"{field}.engine_version"),
        group=_optional(names.GPU_GROUPS, message.gpu_group, f"{field}.gpu_group"),
    )
    if not (split.selector or split.engine_version or split.group):
        raise InvalidField(field, "needs a selector, an engine_version or a gpu_group: which endpoints are meant?")
    return split


def _budget(message: admin_pb2.DisruptionBudget) -> DisruptionBudget:
    if not 0 <= message.min_available_share <= 1:
        raise InvalidField("model.disruption_budget.min_available_share", "must be in 0 to 1")
    return DisruptionBudget(message.min_available, message.min_available_share)


def _fill_model(message: admin_pb2.Model, model: Model) -> None:
    message.aliases.extend(model.aliases)
    message.tokenizer = model.tokenizer
    message.max_context_tokens = model.max_context_tokens
    message.discovered = model.discovered
    for split in model.splits:
        filled = message.splits[split.name]
        filled.weight = split.weight
        filled.selector.update(split.selector)
        filled.engine_version = split.engine_version
        filled.gpu_group = f"{names.GPU_GROUPS}/{split.group}" if split.group else ""
    if model.disruption_budget != DisruptionBudget():
        message.disruption_budget.min_available = model.disruption_budget.min_available
        message.disruption_budget.min_available_share = model.disruption_budget.min_available_share


MODELS: Final = Kind(Model, admin_pb2.Model, _in(names.MODELS), _model, _fill_model, fixed=_OUTPUTS | {"discovered"})


# Strategies


def _strategy(message: admin_pb2.Strategy, stored: StrategyConfig | None) -> StrategyConfig:
    if not message.algorithm:
        raise InvalidField("strategy.algorithm", "is required")
    fallback = message.fallback_algorithm or (
        "round_robin" if message.algorithm == "least_request" else "least_request"
    )
    return StrategyConfig(
        id=names.parse_name(names.STRATEGIES, message.name, "strategy.name"),
        algorithm=_text(message.algorithm, "strategy.algorithm"),
        parameters=_parameters(message.parameters),
        enabled=message.enabled,
        fallback_algorithm=_text(fallback, "strategy.fallback_algorithm"),
        time_budget_us=message.time_budget_us,
        display_name=_text(message.display_name, "strategy.display_name"),
        revision=stored.revision if stored else 1,
    )


def _parameters(struct: Struct) -> Json:
    if struct.ByteSize() > _LARGEST_PARAMETERS:
        raise InvalidField("strategy.parameters", f"must be at most {_LARGEST_PARAMETERS} bytes")
    try:
        parameters: Json = MessageToDict(struct)
    except ValueError:
        raise InvalidField("strategy.parameters", "every number must be finite") from None
    checked: Json = _json_value(parameters, "strategy.parameters")
    return checked


def _json_value(value: Any, field: str) -> Any:  # a JSON value
    """The value as it was meant: a Struct knows only doubles, so whole numbers become integers again."""
    if isinstance(value, dict):
        return {_plain(key, field): _json_value(inner, f"{field}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_json_value(inner, f"{field}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, str):
        return _plain(value, field)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidField(field, "must be finite")
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        return int(value)
    return value


def _plain(value: str, field: str) -> str:
    if "\0" in value:
        raise InvalidField(field, "must hold no NUL character")
    return value


def _fill_strategy(message: admin_pb2.Strategy, strategy: StrategyConfig) -> None:
    message.algorithm = strategy.algorithm
    message.parameters.update(strategy.parameters)
    message.enabled = strategy.enabled
    message.fallback_algorithm = strategy.fallback_algorithm
    message.time_budget_us = strategy.time_budget_us
    message.display_name = strategy.display_name
    message.revision = strategy.revision


STRATEGIES: Final = Kind(
    StrategyConfig,
    admin_pb2.Strategy,
    _in(names.STRATEGIES),
    _strategy,
    _fill_strategy,
    fixed=_OUTPUTS | {"revision"},
)


def revision_message(revision: StrategyRevision) -> admin_pb2.StrategyRevision:
    """A strategy as it was."""
    message = admin_pb2.StrategyRevision(
        revision=revision.config.revision, strategy=STRATEGIES.to_message(revision.config), author=revision.author
    )
    message.create_time.FromDatetime(revision.create_time)
    return message


# Strategy bindings


def _strategy_binding(message: admin_pb2.StrategyBinding, _stored: StrategyBinding | None) -> StrategyBinding:
    if not message.strategy:
        raise InvalidField("strategy_binding.strategy", "is required")
    if message.gpu_group and (message.tenant or message.model):
        raise InvalidField("strategy_binding.gpu_group", "cannot be combined with a tenant or a model")
    return StrategyBinding(
        id=names.parse_name(names.STRATEGY_BINDINGS, message.name, "strategy_binding.name"),
        strategy=names.short(names.STRATEGIES, message.strategy, "strategy_binding.strategy"),
        tenant=_optional(names.TENANTS, message.tenant, "strategy_binding.tenant"),
        model=_optional(names.MODELS, message.model, "strategy_binding.model"),
        group=_optional(names.GPU_GROUPS, message.gpu_group, "strategy_binding.gpu_group"),
        shadow=message.shadow,
    )


def _fill_strategy_binding(message: admin_pb2.StrategyBinding, binding: StrategyBinding) -> None:
    message.strategy = f"{names.STRATEGIES}/{binding.strategy}"
    message.tenant = f"{names.TENANTS}/{binding.tenant}" if binding.tenant else ""
    message.model = f"{names.MODELS}/{binding.model}" if binding.model else ""
    message.gpu_group = f"{names.GPU_GROUPS}/{binding.group}" if binding.group else ""
    message.shadow = binding.shadow


STRATEGY_BINDINGS: Final = Kind(
    StrategyBinding,
    admin_pb2.StrategyBinding,
    _in(names.STRATEGY_BINDINGS),
    _strategy_binding,
    _fill_strategy_binding,
)


# Credentials


def _credential(message: admin_pb2.Credential, stored: Credential | None) -> Credential:
    """A new credential has no token yet: whoever creates it puts the hash in."""
    role = _enum(admin_pb2.Role.Name, "ROLE_", Role, message.role, "credential.role")
    if role is Role.AGENT and not message.node:
        raise InvalidField("credential.node", "is required for an agent: the only node it may speak for")
    if role is not Role.AGENT and message.node:
        raise InvalidField("credential.node", "is only for agents")
    if role is Role.ROUTER and not message.tenants:
        raise InvalidField("credential.tenants", "is required for a router: the tenants it may name, `*` for any")
    if role in {Role.AGENT, Role.VIEWER} and message.tenants:
        raise InvalidField("credential.tenants", "is only for routers, admins and end users' keys")
    if role is Role.TENANT and (len(message.tenants) != 1 or "*" in message.tenants):
        raise InvalidField("credential.tenants", "an end user's key is of exactly one tenant")
    return Credential(
        id=names.parse_name(names.CREDENTIALS, message.name, "credential.name"),
        role=role,
        token_sha256=stored.token_sha256 if stored else b"",
        node=_optional(names.NODES, message.node, "credential.node"),
        tenants=_each(message.tenants, "credential.tenants", _tenant_or_any),
        expire_time=moment(message.expire_time, "credential.expire_time") if message.HasField("expire_time") else None,
        revoked=stored.revoked if stored else False,
        certificate_identity=_certificate_identity(message.certificate_identity, role),
        previous_token_sha256=stored.previous_token_sha256 if stored else b"",
        previous_expire_time=stored.previous_expire_time if stored else None,
    )


def _certificate_identity(value: str, role: Role) -> str:
    field = "credential.certificate_identity"
    if value and role is Role.TENANT:
        raise InvalidField(field, "an end user's key has none")
    if value and not _IDENTITY.fullmatch(value):
        raise InvalidField(field, "must be a URI like spiffe://domain/path, or a DNS name")
    return value


def _tenant_or_any(value: str, field: str) -> str:
    return value if value == "*" else names.short(names.TENANTS, value, field)


def moment(value: Timestamp, field: str) -> datetime:
    """The time in a message. Raises InvalidField."""
    try:
        return value.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidField(field, "is no valid time") from None


def _fill_credential(message: admin_pb2.Credential, credential: Credential) -> None:
    message.role = admin_pb2.Role.Value(f"ROLE_{credential.role.name}")
    message.node = f"{names.NODES}/{credential.node}" if credential.node else ""
    message.tenants.extend(credential.tenants)
    if credential.expire_time is not None:
        message.expire_time.FromDatetime(credential.expire_time)
    message.revoked = credential.revoked
    message.certificate_identity = credential.certificate_identity
    if credential.previous_expire_time is not None:
        message.previous_token_expire_time.FromDatetime(credential.previous_expire_time)


CREDENTIALS: Final = Kind(
    Credential,
    admin_pb2.Credential,
    _in(names.CREDENTIALS),
    _credential,
    _fill_credential,
    fixed=_OUTPUTS | {"revoked", "previous_token_expire_time"},
)


# The live side, and the audit trail


def node_message(node: NodeView, state: SchedulingState) -> admin_pb2.Node:
    """A node as an admin sees it."""
    return admin_pb2.Node(
        name=f"{names.NODES}/{node.name}",
        state=_state_value(state),
        labels=node.labels,
        connected=node.connected,
        agent_version=node.agent_version,
        endpoints=node.endpoints,
        devices=node.devices,
        inflight=uint32(node.inflight),
        clock_skew_s=node.clock_skew_s,
    )


def endpoint_message(endpoint: EndpointView, state: SchedulingState) -> admin_pb2.Endpoint:
    """An endpoint as an admin sees it."""
    return admin_pb2.Endpoint(
        name=f"{names.ENDPOINTS}/{endpoint.id}",
        state=_state_value(state),
        node=f"{names.NODES}/{endpoint.node}" if endpoint.node else "",
        labels=endpoint.labels,
        models=[f"{names.MODELS}/{model}" for model in endpoint.models],
        healthy=endpoint.healthy,
        inflight=uint32(endpoint.inflight),
    )


def audit_message(entry: AuditEntry) -> admin_pb2.AuditEntry:
    """One admin write."""
    message = admin_pb2.AuditEntry(
        id=entry.id,
        principal=entry.principal,
        method=entry.method,
        resource=entry.resource,
        request_id=entry.request_id,
    )
    message.time.FromDatetime(entry.time)
    if entry.before is not None:
        message.before.update(entry.before)
    if entry.after is not None:
        message.after.update(entry.after)
    return message
