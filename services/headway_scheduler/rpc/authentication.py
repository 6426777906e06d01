"""Who calls: a bearer token, or a client certificate, → principal."""

import hmac
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TypeAlias

from grpc.aio import ServicerContext

from headway_scheduler.domain.desired import Credential, DesiredState, Principal, Role
from headway_scheduler.domain.tokens import token_sha256
from headway_scheduler.errors import HeadwayError, NoCredential
from headway_scheduler.rpc.failures import Failures

__all__ = [
    "LOCAL",
    "Authenticator",
    "Identity",
    "Proof",
    "Shown",
    "current_identity",
    "current_principal",
    "principal_of",
    "set_identity",
    "set_principal",
]

Proof: TypeAlias = str | tuple[str, ...] | None
"""What a caller shows: its `authorization`, or the names in its certificate, or nothing."""
Context = ServicerContext[Any, Any]  # a context of any method's messages

LOCAL: Final = Principal(id="local", role=Role.ADMIN)
"""Who calls without a credential where none is required: someone on this machine."""

_SCHEME: Final = "bearer "
_LONGEST_TOKEN: Final = 512
_LONGEST_CACHE: Final = 65_536
_NAMES_IN_CERTIFICATE: Final = ("peer_uri", "peer_dns")


class Shown(StrEnum):
    """By what a caller was known."""

    TOKEN = "token"  # noqa: S105 -- a word
    PREVIOUS_TOKEN = "previous_token"  # noqa: S105 -- a word
    CERTIFICATE = "certificate"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, by what it was known, and until when that counts; None: as long as the credential is there."""

    principal: Principal
    shown: Shown = Shown.NONE
    expires: datetime | None = None
    proof: Proof = field(default=None, repr=False)


_LOCAL: Final = Identity(LOCAL)
_identity: ContextVar[Identity] = ContextVar("headway_identity")


def current_principal() -> Principal:
    """Who makes the call that is being handled. Only inside a handler of a method that needs a role."""
    return _identity.get().principal


def current_identity() -> Identity:
    """The same, and how it was known."""
    return _identity.get()


def set_identity(identity: Identity) -> None:
    """Say who makes the call that this task handles. For interceptors."""
    _identity.set(identity)


def set_principal(principal: Principal) -> None:
    """The same, for what stands in for an interceptor."""
    _identity.set(Identity(principal))


def principal_of(credential: Credential) -> Principal:
    """The principal that a credential makes. An admin, or a viewer, that is bound to no tenant may name any."""
    tenants = credential.tenants
    if credential.role in (Role.ADMIN, Role.VIEWER) and not tenants:
        tenants = ("*",)
    return Principal(credential.id, credential.role, credential.node, tenants)


class Authenticator:
    """Finds a call's principal among the credentials of the newest snapshot.

    Tokens are looked up by their SHA-256, so no comparison's time says anything about a token. What it found is kept
    until the snapshot is replaced; expiry is checked on every call. `certificates`: look at client certificates, too.
    """

    def __init__(
        self,
        state: Callable[[], DesiredState],
        *,
        required: bool,
        clock: Callable[[], datetime],
        certificates: bool = False,
        failures: Failures | None = None,
    ) -> None:
        self._state = state
        self._required = required
        self._clock = clock
        self._certificates = certificates
        self._failures = failures
        self._indexed: DesiredState | None = None
        self._by_hash: dict[bytes, Credential] = {}
        self._by_name: dict[str, Credential] = {}
        self._found: dict[Proof, Identity] = {}

    # Calls

    def identify_call(self, context: Context) -> Identity:
        """Who makes a gRPC call. Raises NoCredential, and TooManyFailures for a peer with too many of them."""
        proof: Proof = None
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                proof = value if isinstance(value, str) else value.decode("latin-1")
                break
        else:
            if self._certificates:
                proof = _names_in(context)
        try:
            return self.identify(proof)
        except NoCredential as error:
            raise self.refusal(error, _address_of(context.peer())) from None

    def refusal(self, error: NoCredential, address: str) -> HeadwayError:
        """What a peer is answered whose credential does not count."""
        return error if self._failures is None else self._failures.note(error, address)

    # What is shown

    def identify(self, proof: Proof) -> Identity:
        """Who shows this. Raises NoCredential; also where none is required, if it is a wrong one."""
        if proof is None:
            if self._required:
                raise NoCredential("authorization: a bearer token is required")
            return _LOCAL
        self._follow_snapshot()
        found = self._found.get(proof)
        if found is None:
            found = self._remember(proof)
        if found.expires is not None and found.expires <= self._clock():
            raise NoCredential("authorization: the credential has expired")
        return found

    def authenticate(self, authorization: str | None) -> Principal:
        """The principal of a call with this `authorization` value. Raises NoCredential."""
        return self.identify(authorization).principal

    def snapshot(self) -> DesiredState:
        """What it goes by: another one may have other credentials."""
        return self._state()

    # End users' keys

    def tenant_of(self, key_sha256: bytes) -> str:
        """The tenant that an end user's key is of; empty: the key is unknown, expired, revoked, or no user's."""
        self._follow_snapshot()
        credential = self._by_hash.get(key_sha256)
        if credential is None or credential.role is not Role.TENANT or credential.revoked or not credential.tenants:
            return ""
        expires = _expiry(credential, previous=credential.token_sha256 != key_sha256)
        return "" if expires is not None and expires <= self._clock() else credential.tenants[0]

    def user_tenant(self, authorization: str) -> str:
        """The tenant of the end user who shows this `authorization`. Raises NoCredential."""
        principal = self.identify(authorization).principal
        if principal.role is not Role.TENANT or not principal.tenants:
            raise NoCredential("authorization: this is no end user's key")
        return principal.tenants[0]

    # The index

    def _follow_snapshot(self) -> None:
        state = self._state()
        if state is not self._indexed:
            self._indexed = state
            held = state.credentials.values()
            self._by_hash = {c.previous_token_sha256: c for c in held if c.previous_token_sha256}
            self._by_hash.update((c.token_sha256, c) for c in held)
            self._by_name = {c.certificate_identity: c for c in held if c.certificate_identity}
            self._found = {}

    def _remember(self, proof: str | tuple[str, ...]) -> Identity:
        if len(self._found) >= _LONGEST_CACHE:  # bounded by spellings of valid tokens, still bounded
            self._found.clear()
        found = self._by_token(proof) if isinstance(proof, str) else self._by_certificate(proof)
        self._found[proof] = found
        return found

    def _by_token(self, authorization: str) -> Identity:
        token = authorization[len(_SCHEME) :].strip()
        if authorization[: len(_SCHEME)].lower() != _SCHEME or not token or len(token) > _LONGEST_TOKEN:
            raise NoCredential("authorization: must be `Bearer TOKEN`")
        digest = token_sha256(token)
        credential = self._by_hash.get(digest)
        if credential is None:
            raise NoCredential("authorization: the token is unknown")
        _check_revoked(credential)
        previous = not hmac.compare_digest(credential.token_sha256, digest)
        shown = Shown.PREVIOUS_TOKEN if previous else Shown.TOKEN
        return Identity(principal_of(credential), shown, _expiry(credential, previous=previous), authorization)

    def _by_certificate(self, names: tuple[str, ...]) -> Identity:
        meant = {credential.id: credential for name in names if (credential := self._by_name.get(name)) is not None}
        if len(meant) != 1:
            which = "more than one credential" if meant else "no credential"
            raise NoCredential(f"authorization: there is no token, and the certificate stands for {which}")
        (credential,) = meant.values()
        _check_revoked(credential)
        return Identity(principal_of(credential), Shown.CERTIFICATE, credential.expire_time, names)


def _check_revoked(credential: Credential) -> None:
    if credential.revoked:
        raise NoCredential("authorization: the credential is revoked")


def _expiry(credential: Credential, *, previous: bool) -> datetime | None:
    times = (credential.expire_time, credential.previous_expire_time if previous else None)
    return min((time for time in times if time is not None), default=None)


def _names_in(context: Context) -> tuple[str, ...] | None:
    """The URIs and DNS names in the certificate that the peer proved to own; None: it showed none."""
    told = context.auth_context()
    names = [name for kind in _NAMES_IN_CERTIFICATE for name in told.get(kind, ())]
    return tuple(name.decode("utf-8", "replace") for name in names) or None


def _address_of(peer: str) -> str:
    """The host in gRPC's `ipv4:10.0.0.1:4711`; all of it where it has no port."""
    kind, _, place = peer.partition(":")
    return place.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
