"""Every refusal and failure the scheduler can answer, one class each.

A class names its `status` (a gRPC status code's name), its `reason` (ErrorInfo.reason) and carries its facts as
fields; `rpc.interceptors` turns it into a status with exactly one ErrorInfo. An HTTP data plane maps the status by
the table in docs/refusals.md.
"""

from collections.abc import Mapping
from typing import ClassVar

__all__ = [
    "AdapterNotAllowed",
    "AllDraining",
    "AllEjected",
    "AllUnhealthy",
    "CredentialChanged",
    "DisruptionBudgetBroken",
    "DuplicateName",
    "DuplicateNode",
    "ForeignOrigin",
    "GroupNotFree",
    "HeadwayError",
    "HoldExpired",
    "InUse",
    "InvalidField",
    "ModelNotAllowed",
    "NoCredential",
    "NoEndpoints",
    "NotPermitted",
    "QueueFull",
    "RequestIdInUse",
    "RetryBudgetSpent",
    "Saturated",
    "Shed",
    "ShuttingDown",
    "StaleEtag",
    "Standby",
    "StoreDown",
    "TenantInflight",
    "TenantNotAllowed",
    "TenantRequests",
    "TenantTokens",
    "TokenShownOnce",
    "TooManyFailures",
    "TooManyStreams",
    "UnknownModel",
    "UnknownResource",
    "UnknownTenant",
]


class HeadwayError(Exception):
    """Base of every answer that is not a success.

    `facts` become ErrorInfo.metadata: short strings, never a prompt or a secret. `retry_after_s` becomes RetryInfo.
    """

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **facts: str) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.facts: Mapping[str, str] = facts

    def add_facts(self, facts: Mapping[str, str]) -> None:
        """Say more."""
        self.facts = {**self.facts, **facts}


class InvalidField(HeadwayError):
    """The caller sent something wrong; `field` is its path in the request."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, field: str, problem: str, **facts: str) -> None:
        super().__init__(f"{field}: {problem}", retry_after_s=None, field=field, **facts)
        self.field = field
        self.problem = problem


class RequestIdInUse(HeadwayError):
    """A live request has this id and another prompt or model."""

    status = "ALREADY_EXISTS"
    reason = "REQUEST_ID_IN_USE"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id: {request_id!r} is in flight for a different request", field="request_id")


class UnknownResource(HeadwayError):
    """Nothing has this name."""

    status = "NOT_FOUND"
    reason = "UNKNOWN_RESOURCE"

    def __init__(self, name: str, field: str = "name") -> None:
        super().__init__(f"{field}: {name!r} does not exist", field=field, resource=name)
        self.name = name


class UnknownModel(UnknownResource):
    """The catalogue has no such model or alias."""

    reason = "UNKNOWN_MODEL"

    def __init__(self, model: str, field: str = "model") -> None:
        super().__init__(model, field)


class UnknownTenant(UnknownResource):
    """There is no such tenant."""

    reason = "UNKNOWN_TENANT"

    def __init__(self, tenant: str, field: str = "tenant") -> None:
        super().__init__(tenant, field)


class DuplicateName(HeadwayError):
    """A resource of this name exists."""

    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_NAME"

    def __init__(self, name: str) -> None:
        super().__init__(f"name: {name!r} exists already", field="name", resource=name)


class DuplicateNode(HeadwayError):
    """Another live agent streams under this node name."""

    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_NODE"

    def __init__(self, node: str) -> None:
        super().__init__(f"hello.node: another agent is connected as {node!r}", field="hello.node", node=node)


class TokenShownOnce(HeadwayError):
    """An earlier try made this token and answered it; it is not kept."""

    status = "ALREADY_EXISTS"
    reason = "TOKEN_SHOWN_ONCE"

    def __init__(self, name: str) -> None:
        message = f"name: an earlier try made a token of {name!r}, which is not kept; rotate it for another"
        super().__init__(message, field="name", resource=name)


class StaleEtag(HeadwayError):
    """The resource changed since the caller read it."""

    status = "ABORTED"
    reason = "STALE_ETAG"

    def __init__(self, name: str) -> None:
        super().__init__(f"etag: {name!r} has changed since you read it; read it again", field="etag", resource=name)


class InUse(HeadwayError):
    """Something still depends on the resource."""

    status = "FAILED_PRECONDITION"
    reason = "IN_USE"

    def __init__(self, name: str, user: str) -> None:
        super().__init__(f"name: {name!r} is in use by {user}", field="name", resource=name, user=user)


class GroupNotFree(InUse):
    """A GPU group, or an endpoint in it, would belong to one tenant alone and to another as well."""

    reason = "GROUP_NOT_FREE"

    def __init__(self, name: str, user: str, field: str, problem: str = "") -> None:
        HeadwayError.__init__(
            self,
            f"{field}: {name!r} cannot be one tenant's alone: {problem or f'{user!r} binds it too'}",
            field=field,
            resource=name,
            user=user,
        )


class DisruptionBudgetBroken(HeadwayError):
    """Too few of a model's endpoints would be left able to serve."""

    status = "FAILED_PRECONDITION"
    reason = "DISRUPTION_BUDGET"

    def __init__(self, name: str, model: str, left: int, required: int) -> None:
        message = f"name: without {name!r}, {left} of the endpoints of {model!r} could serve; its disruption budget"
        super().__init__(
            f"{message} wants {required}",
            field="name",
            resource=name,
            model=model,
            left=str(left),
            required=str(required),
        )


class NoCredential(HeadwayError):
    """No credential, or one that is unknown, expired or revoked."""

    status = "UNAUTHENTICATED"
    reason = "NO_CREDENTIAL"


class TooManyFailures(HeadwayError):
    """This peer showed too many wrong credentials of late. A right one is never refused for it."""

    status = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_FAILURES"


class CredentialChanged(HeadwayError):
    """An admin changed what the credential of an open stream may do; a new stream finds out."""

    status = "UNAVAILABLE"
    reason = "CREDENTIAL_CHANGED"


class TooManyStreams(HeadwayError):
    """This principal has as many streams open as one may."""

    status = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_STREAMS"


class NotPermitted(HeadwayError):
    """The principal's role does not allow the method or the resource."""

    status = "PERMISSION_DENIED"
    reason = "NOT_PERMITTED"


class ForeignOrigin(NotPermitted):
    """A page of another site sent this, or may have: who shows no token must come from this host, by its own names."""

    reason = "FOREIGN_ORIGIN"


class TenantNotAllowed(HeadwayError):
    """The principal may not name this tenant."""

    status = "PERMISSION_DENIED"
    reason = "TENANT_NOT_ALLOWED"

    def __init__(self, tenant: str) -> None:
        super().__init__(f"tenant: this credential may not act for {tenant!r}", field="tenant", tenant=tenant)


class ModelNotAllowed(HeadwayError):
    """The tenant may not use this model."""

    status = "PERMISSION_DENIED"
    reason = "MODEL_NOT_ALLOWED"

    def __init__(self, tenant: str, model: str) -> None:
        super().__init__(f"model: {tenant!r} may not use {model!r}", field="model", tenant=tenant, model=model)


class AdapterNotAllowed(HeadwayError):
    """The tenant may not use this adapter."""

    status = "PERMISSION_DENIED"
    reason = "ADAPTER_NOT_ALLOWED"

    def __init__(self, tenant: str, adapter: str) -> None:
        super().__init__(
            f"adapter: {tenant!r} may not use {adapter!r}", field="adapter", tenant=tenant, adapter=adapter
        )


class Saturated(HeadwayError):
    """There is capacity, all of it is busy, and the call may not be held."""

    status = "RESOURCE_EXHAUSTED"
    reason = "SATURATED"


class HoldExpired(Saturated):
    """The call was held as long as it allowed, and nothing became free."""

    reason = "HOLD_EXPIRED"


class QueueFull(Saturated):
    """Too many calls are held already."""

    reason = "QUEUE_FULL"


class Shed(Saturated):
    """It was held as best effort, the queue was full, and a call of a higher priority took its place."""

    reason = "SHED"


class TenantRequests(Saturated):
    """The tenant's requests per minute are used up."""

    reason = "TENANT_REQUESTS"


class TenantTokens(Saturated):
    """The tenant's tokens per minute are used up."""

    reason = "TENANT_TOKENS"


class TenantInflight(Saturated):
    """The tenant has as many requests in flight as it may."""

    reason = "TENANT_INFLIGHT"


class RetryBudgetSpent(Saturated):
    """As many retries for this model are in progress as may be."""

    reason = "RETRY_BUDGET"


class NoEndpoints(HeadwayError):
    """The model is in the catalogue and no endpoint within the tenant's groups and the subset serves it."""

    status = "UNAVAILABLE"
    reason = "NO_ENDPOINTS"


class AllUnhealthy(NoEndpoints):
    """Every endpoint that could serve it is unhealthy, lost or stale."""

    reason = "ALL_UNHEALTHY"


class AllEjected(AllUnhealthy):
    """Every endpoint that could serve it keeps failing, and is ejected or probed."""

    reason = "ALL_EJECTED"


class AllDraining(NoEndpoints):
    """Every endpoint that could serve it is cordoned or draining."""

    reason = "ALL_DRAINING"


class ShuttingDown(HeadwayError):
    """This scheduler is going away; ask another."""

    status = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"


class Standby(HeadwayError):
    """Another scheduler leads, or this one cannot know that it still does; ask another."""

    status = "UNAVAILABLE"
    reason = "STANDBY"


class StoreDown(HeadwayError):
    """Postgres cannot be reached; Route goes on, writes do not."""

    status = "UNAVAILABLE"
    reason = "STORE_DOWN"
