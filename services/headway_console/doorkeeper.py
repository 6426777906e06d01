"""Who may come in: cookie → session → credential → principal, checked at every request."""

from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from aiohttp import web
from headway_scheduler.domain.desired import Principal, Role
from headway_scheduler.errors import ForeignOrigin, HeadwayError, NoCredential, NotPermitted
from headway_scheduler.rpc.origins import check_host, check_origin

from headway_console.sessions import Session, Sessions

__all__ = [
    "COOKIE",
    "CSRF_FIELD",
    "CSRF_HEADER",
    "PARTS",
    "PART_HEADER",
    "Authenticates",
    "Doorkeeper",
    "Visit",
]

log = structlog.get_logger()

COOKIE: Final = "headway_session"
CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "X-Headway-Csrf"
PART_HEADER: Final = "X-Headway-Part"
"""Asks for one block of a page, to put in the place of what is shown."""

PARTS: Final = frozenset({"glance", "endpoints", "body"})
"""Blocks that pages load anew."""

_MAY_ENTER: Final = frozenset({Role.VIEWER, Role.ADMIN})


class Authenticates(Protocol):
    """What tells who shows a token."""

    def authenticate(self, authorization: str | None) -> Principal:
        """The principal, or the one that stands for nobody in particular. Raises NoCredential."""
        ...

    def refusal(self, error: NoCredential, address: str) -> HeadwayError:
        """What a peer is told whose credential does not count; it is counted and, if there are many, slowed down."""
        ...


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of someone who may be here."""

    request: web.Request
    principal: Principal
    session: Session
    fresh: bool = False
    """The session began with this request: its cookie must be sent."""

    @property
    def may_change(self) -> bool:
        """Does the role allow writes?"""
        return self.principal.role is Role.ADMIN

    @property
    def part(self) -> str:
        """The block of the page that is asked for; empty: all of it."""
        wanted = self.request.headers.get(PART_HEADER, "")
        return wanted if wanted in PARTS else ""

    @property
    def query(self) -> "dict[str, str]":
        """The address's parameters, the last of each."""
        return dict(self.request.query)


class Doorkeeper:
    """Lets viewers and admins in.

    `required`: everyone must sign in. Else whoever reaches the port may do anything, as over the API, so that only
    requests to this host's own names are answered: a foreign page whose name resolves to 127.0.0.1 is not.
    `private`: tokens may travel over this port. `certificate_required`: of a browser without one nothing is heard.
    """

    def __init__(
        self,
        authenticator: Authenticates,
        sessions: Sessions,
        *,
        required: bool,
        private: bool,
        certificate_required: bool = False,
    ) -> None:
        self._authenticator, self.sessions = authenticator, sessions
        self.required, self.private, self._certificate_required = required, private, certificate_required

    def sign_in(self, token: str, request: web.Request) -> Session:
        """A session for whoever has this token. Raises NoCredential, TooManyFailures, NotPermitted."""
        self.check_certificate(request)
        self.check_private()
        authorization = f"Bearer {token.strip()}"
        try:
            principal = self._enter(authorization)
        except NoCredential as error:
            raise self._authenticator.refusal(error, request.remote or "") from None
        log.info("console_signed_in", principal=principal.id, peer=request.remote)
        return self.sessions.open(authorization)

    def admit(self, request: web.Request) -> Visit | None:
        """Who asks; None: they must sign in first. Raises NotPermitted, ForeignOrigin."""
        self.check_host(request)
        self.check_certificate(request)
        session = self.sessions.find(request.cookies.get(COOKIE, ""))
        if session is None:
            if self.required:
                return None
            self.check_private()
            return Visit(request, self._enter(None), self.sessions.open(None), fresh=True)
        try:
            return Visit(request, self._enter(session.authorization), session)
        except HeadwayError:  # revoked, expired, or of another role now: the session ends with it
            self.sessions.close(session.id)
            return None

    def check_write(self, visit: Visit, token: str) -> None:
        """Raises ForeignOrigin unless a page of ours sent it."""
        self.check_origin(visit.request)
        if not visit.session.proves(visit.request.headers.get(CSRF_HEADER, "") or token):
            raise ForeignOrigin("this form is not from your session; load the page again and repeat what you did")

    def check_origin(self, request: web.Request) -> None:
        """Raises ForeignOrigin where the browser says that another site sent it."""
        self.check_host(request)
        check_origin(request)

    def check_host(self, request: web.Request) -> None:
        """Raises ForeignOrigin where nobody must sign in, and the browser asked for another host's name."""
        if not self.required:
            check_host(request)

    def check_private(self) -> None:
        """Raises NotPermitted where what is said could be overheard."""
        if not self.private:
            raise NotPermitted("beyond loopback, the console needs http_tls or insecure=true")

    def check_certificate(self, request: web.Request) -> None:
        """Raises NoCredential where the browser must show a certificate, and did not."""
        if self._certificate_required and not request.get_extra_info("peercert"):
            raise NoCredential("a client certificate is required")

    def _enter(self, authorization: str | None) -> Principal:
        principal = self._authenticator.authenticate(authorization)
        if principal.role not in _MAY_ENTER:
            words = f"{principal.id!r} has the role {principal.role.value}; the console is for viewers and admins"
            raise NotPermitted(words, principal=principal.id, role=principal.role.value)
        if authorization is None and self.required:
            raise NoCredential("a token is required")
        return principal
