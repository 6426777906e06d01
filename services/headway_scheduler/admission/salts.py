"""Cache salts: what keeps isolation domains apart inside one engine."""

import hmac
from hashlib import sha256
from typing import Final

__all__ = ["Salts"]

HONOURED_BY: Final = frozenset({"vllm", "emulator"})
"""THE list of engines known to mix the request field `cache_salt` into their prefix hashes."""


class Salts:
    """Derives a domain's salt from this installation's secret: the same after a restart, unguessable outside."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._salts: dict[str, str] = {}

    def set_secret(self, secret: bytes) -> None:
        """Derive from this secret from now on."""
        self._secret = secret
        self._salts.clear()

    def honoured_by(self, engine: str) -> bool:
        """Does this engine keep salts apart?"""
        return engine in HONOURED_BY

    def salt(self, domain: str, engine: str) -> str:
        """The salt to send along, or nothing where the engine would not understand it."""
        return self.of(domain) if engine in HONOURED_BY else ""

    def of(self, domain: str) -> str:
        """The domain's salt."""
        found = self._salts.get(domain)
        if found is None:
            found = self._salts[domain] = hmac.new(self._secret, domain.encode(), sha256).hexdigest()[:32]
        return found
