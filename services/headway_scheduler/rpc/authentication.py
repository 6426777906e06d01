"""Bearer token → principal."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Final

from headway_scheduler.domain.desired import Credential, DesiredState, Principal, Role
from headway_scheduler.errors import NoCredential

__all__ = ["LOCAL", "Authenticator", "current_principal", "principal_of", "set_principal"]

LOCAL: Final = Principal(id="local", role=Role.ADMIN)
"""Who calls without a credential where none is required: someone on this machine."""

_principal: ContextVar[Principal] = ContextVar("headway_principal")

_SCHEME: Final = "bearer "
_LONGEST_TOKEN: Final = 512
_LONGEST_CACHE: Final = 65_536


def current_principal() -> Principal:
    """Who makes the call that is being handled. Only inside a handler of a method that needs a role."""
    return _principal.get()


def set_principal(principal: Principal) -> None:
    """Say who makes the call that this task handles. For interceptors, and for what stands in for one."""
    _principal.set(principal)


def principal_of(credential: Credential) -> Principal:
    """The principal that a credential makes. An admin that is bound to no tenant may name any."""
    tenants = credential.tenants
    if credential.role is Role.ADMIN and not tenants:
        tenants = ("*",)
    return Principal(credential.id, credential.role, credential.node, tenants)


class Authenticator:
    """Finds a call's principal among the credentials of the newest snapshot.

    Tokens are looked up by their SHA-256, so no comparison's time says anything about a token. What it found is kept
    until the snapshot is replaced; expiry is checked on every call.
    """

    def __init__(self, state: Callable[[], DesiredState], *, required: bool, clock: Callable[[], datetime]) -> None:
        self._state = state
        self._required = required
        self._clock = clock
        self._indexed: DesiredState | None = None
        self._by_hash: dict[bytes, Credential] = {}
        self._found: dict[str, tuple[Principal, datetime | None]] = {}

    def authenticate(self, authorization: str | None) -> Principal:
        """The principal of a call with this `authorization` value. Raises NoCredential.

        A wrong credential is refused even where none is required.
        """
        if authorization is None:
            if self._required:
                raise NoCredential("authorization: a bearer token is required")
            return LOCAL
        self._follow_snapshot()
        found = self._found.get(authorization)
        if found is None:
            found = self._remember(authorization, self._credential(authorization))
        principal, expires = found
        if expires is not None and expires <= self._clock():
            raise NoCredential("authorization: the credential has expired")
        return principal

    def authenticate_metadata(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Principal:
        """The principal of a call with this gRPC metadata. Raises NoCredential."""
        for key, value in metadata or ():
            if key == "authorization":
                return self.authenticate(value if isinstance(value, str) else value.decode("latin-1"))
        return self.authenticate(None)

    def _follow_snapshot(self) -> None:
        state = self._state()
        if state is not self._indexed:
            self._indexed = state
            self._by_hash = {credential.token_sha256: credential for credential in state.credentials.values()}
            self._found = {}

    def _credential(self, authorization: str) -> Credential:
        token = authorization[len(_SCHEME) :].strip()
        if authorization[: len(_SCHEME)].lower() != _SCHEME or not token or len(token) > _LONGEST_TOKEN:
            raise NoCredential("authorization: must be `Bearer TOKEN`")
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        credential = self._by_hash.get(digest)
        if credential is None or not hmac.compare_digest(credential.token_sha256, digest):
            raise NoCredential("authorization: the token is unknown")
        if credential.revoked:
            raise NoCredential("authorization: the credential is revoked")
        return credential

    def _remember(self, authorization: str, credential: Credential) -> tuple[Principal, datetime | None]:
        if len(self._found) >= _LONGEST_CACHE:  # bounded by spellings of valid tokens, still bounded
            self._found.clear()
        found = (principal_of(credential), credential.expire_time)
        self._found[authorization] = found
        return found
