"""Who sends a request: an API key's tenant, or a header where it is trusted."""

import hashlib
from collections.abc import Mapping

from headway_openai.errors import ApiError

from headway_gateway.config import GatewaySettings
from headway_gateway.keys import UserKeys

__all__ = ["TENANT_HEADER", "Identities"]

TENANT_HEADER = "x-headway-tenant"


class Identities:
    """Maps requests to tenants. Keys are kept as digests, so that a look-up's time tells nothing of them.

    `keys`: where those are looked up that the settings do not list.
    """

    def __init__(self, settings: GatewaySettings, keys: UserKeys | None = None) -> None:
        self._keys = keys
        self._tenants = {_digest(key): tenant for key, tenant in settings.api_keys.items()}
        self._trust_header = settings.trust_tenant_header
        self._anonymous = settings.anonymous_tenant

    async def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Return the tenant. Raises ApiError 401, and 503 where nobody can say whose key it is."""
        if self._trust_header and (named := headers.get(TENANT_HEADER)):
            return named
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key and (self._tenants or self._keys):
            digest = _digest(key.strip())
            tenant = self._tenants.get(digest)
            if tenant is None and self._keys is not None:
                tenant = await self._keys.tenant_of(digest)
            if not tenant:
                raise ApiError(401, "invalid_api_key", "the API key is not known", reason="NO_CREDENTIAL")
            return tenant
        if self._anonymous:
            return self._anonymous
        raise ApiError(401, "missing_api_key", "an API key is required", reason="NO_CREDENTIAL")

    async def close(self) -> None:
        """Look nothing up any more."""
        if self._keys is not None:
            await self._keys.close()


def _digest(key: str) -> bytes:
    """Also of what is no UTF-8: it stands for nobody."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
