"""Who sends a request: an API key's tenant, or a header where it is trusted."""

import hashlib
from collections.abc import Mapping

from headway_openai.errors import ApiError

from headway_gateway.config import GatewaySettings

__all__ = ["TENANT_HEADER", "Identities"]

TENANT_HEADER = "x-headway-tenant"


class Identities:
    """Maps requests to tenants. Keys are kept as digests, so that a look-up's time tells nothing of them."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._tenants = {_digest(key): tenant for key, tenant in settings.api_keys.items()}
        self._trust_header = settings.trust_tenant_header
        self._anonymous = settings.anonymous_tenant

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Return the tenant. Raises ApiError 401."""
        if self._trust_header and (named := headers.get(TENANT_HEADER)):
            return named
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key and self._tenants:
            tenant = self._tenants.get(_digest(key.strip()))
            if tenant is None:
                raise ApiError(401, "invalid_api_key", "the API key is not known", reason="NO_CREDENTIAL")
            return tenant
        if self._anonymous:
            return self._anonymous
        raise ApiError(401, "missing_api_key", "an API key is required", reason="NO_CREDENTIAL")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
