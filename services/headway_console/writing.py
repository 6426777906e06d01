"""Writes: the Admin service's own methods, so that checks, audit trail and refusals are those of every other client."""

from typing import Any

from headway_scheduler.domain.desired import Principal
from headway_scheduler.rpc.admin import AdminService
from headway_scheduler.rpc.authentication import set_principal
from headway_scheduler.rpc.authorization import authorize

__all__ = ["Admin"]

_SERVICE = "/headway.admin.v1.Admin"


class Admin:
    """The Admin service, called in this process."""

    def __init__(self, service: AdminService) -> None:
        self._service = service

    async def call(self, principal: Principal, method: str, request: Any) -> Any:  # a method's own messages
        """What `method` answers to `principal`. Raises what it refuses with, NotPermitted among it."""
        authorize(principal, f"{_SERVICE}/{method}")
        set_principal(principal)
        return await getattr(self._service, method)(request, None)
