"""From what a caller names to what the scheduler knows: tenant, model, priority, task class."""

from dataclasses import dataclass, field, replace

from headway_scheduler.domain.desired import DesiredState, Principal, Quotas, Tenant
from headway_scheduler.domain.names import DEFAULT_TENANT, TENANTS, short
from headway_scheduler.domain.request import BlocksPrompt, Prompt, Request, TextPrompt, TokensPrompt
from headway_scheduler.errors import (
    AdapterNotAllowed,
    HeadwayError,
    InvalidField,
    ModelNotAllowed,
    TenantNotAllowed,
    UnknownModel,
    UnknownTenant,
)
from headway_scheduler.learning.history import History

__all__ = ["Intake"]


@dataclass(slots=True)
class Intake:
    """Resolves names against the desired state of the moment."""

    history: History
    desired: DesiredState = field(default_factory=DesiredState)
    _models: dict[str, str] = field(default_factory=dict)
    _allowed: dict[str, frozenset[str]] = field(default_factory=dict)

    def set_desired(self, desired: DesiredState) -> None:
        """Take over tenants and the catalogue."""
        self._models = {alias: model.id for model in desired.models.values() for alias in model.aliases}
        self._models.update((model, model) for model in desired.models)
        self.desired = replace(desired, tenants={t.id: self._with_ids(t) for t in desired.tenants.values()})
        limited = (tenant for tenant in desired.tenants.values() if tenant.models)
        self._allowed = {t.id: frozenset(self._models.get(name, name) for name in t.models) for t in limited}

    def _with_ids(self, tenant: Tenant) -> Tenant:
        """Its quotas by the models' ids; of two names of one model, all limits hold."""
        if all(self._models.get(name, name) == name for name in tenant.model_quotas):
            return tenant
        found: dict[str, Quotas] = {}
        for name, quotas in tenant.model_quotas.items():
            model = self._models.get(name, name)
            found[model] = quotas.within(found[model]) if model in found else quotas
        return replace(tenant, model_quotas=found)

    def tenant(self, principal: Principal, name: str) -> Tenant:
        """The tenant a call acts for: the one named, else the principal's own.

        Whether the principal may name it is checked before whether it exists.
        """
        if name:
            tenant_id = short(TENANTS, name, "tenant")
        elif principal.tenants and principal.tenants[0] != "*":
            tenant_id = principal.tenants[0]
        else:
            tenant_id = DEFAULT_TENANT
        if not principal.may_name(tenant_id):
            raise TenantNotAllowed(tenant_id)
        tenant = self.desired.tenants.get(tenant_id)
        if tenant is None:
            raise UnknownTenant(tenant_id)
        return tenant

    def model(self, tenant: Tenant, name: str) -> str:
        """The catalogue's model behind a name or an alias."""
        if not name:
            raise InvalidField("model", "is required")
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(name)
        if not self.allows(tenant, model):
            raise ModelNotAllowed(tenant.id, model)
        return model

    def allows(self, tenant: Tenant, model: str) -> bool:
        """May the tenant use this model of the catalogue?"""
        allowed = self._allowed.get(tenant.id)
        return allowed is None or model in allowed

    def check_adapter(self, tenant: Tenant, adapter: str) -> None:
        """Raise AdapterNotAllowed if the tenant may not ask for this adapter."""
        if adapter and tenant.adapters and adapter not in tenant.adapters:
            raise AdapterNotAllowed(tenant.id, adapter)

    def problem(self, request: Request) -> HeadwayError | None:
        """Why what was admitted before may not be asked any more; None: it may."""
        tenant = self.desired.tenants.get(request.tenant)
        if tenant is None:
            return UnknownTenant(request.tenant)
        try:
            self.model(tenant, request.model)
            self.check_adapter(tenant, request.adapter)
        except HeadwayError as error:
            return error
        return None

    def prompt_tokens(self, model: str, prompt: Prompt) -> int:
        """How many tokens a prompt is: exact for ids, estimated for text; block hashes do not tell."""
        if isinstance(prompt, TokensPrompt):
            return len(prompt.data) // 4
        if isinstance(prompt, TextPrompt):
            return max(1, round(len(prompt.data) / self.history.bytes_per_token(model)))
        if isinstance(prompt, BlocksPrompt) or prompt is None:
            return 0
        raise TypeError(type(prompt))
