"""The console's composition root: its parts, its addresses, and what runs while the scheduler does."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import structlog
from aiohttp import web
from headway_scheduler.app import Scheduler
from headway_scheduler.errors import ForeignOrigin, HeadwayError, NoCredential
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.failures import Failures
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.live import admin_service

from headway_console import history
from headway_console.decisions import DecisionLog
from headway_console.doorkeeper import COOKIE, CSRF_FIELD, Doorkeeper, Visit
from headway_console.effects import Effects
from headway_console.fleet import FleetPages
from headway_console.history import History
from headway_console.live import Live
from headway_console.pages import PREFIX, Pages, harden, see_other, static_file
from headway_console.record import SchedulerRecord
from headway_console.sessions import Sessions
from headway_console.strategies import StrategyPages
from headway_console.tenants import TenantPages
from headway_console.traffic import TrafficPages
from headway_console.writing import Admin

__all__ = ["Console"]

log = structlog.get_logger()

Reader = Callable[[Visit], Awaitable[web.StreamResponse]]
Writer = Callable[[Visit, "dict[str, str]"], Awaitable[web.StreamResponse]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_VISIT: Final = web.RequestKey("headway_visit", Visit)
_LARGEST_FORM: Final = 64 * 1024
_FORM_S: Final = 10.0


class Console:
    """The console of one scheduler. `add_to` an HTTP server's addresses, then `start`; `stop` before the server."""

    def __init__(self, scheduler: Scheduler, record: DecisionLog | None = None) -> None:
        """`record`: another than the scheduler's own."""
        config = scheduler.config
        record = record or SchedulerRecord(scheduler.record)
        authenticator = Authenticator(
            lambda: scheduler.desired,
            required=config.credentials_required,
            clock=lambda: datetime.now(UTC),
            failures=Failures(config.authentication_failures_per_minute, time.monotonic, scheduler.authentication),
        )
        self.doorkeeper = Doorkeeper(
            authenticator,
            Sessions(time.monotonic),
            required=config.credentials_required,
            private=config.http_is_private,
            certificate_required=config.certificate_required,
        )
        admin = Admin(admin_service(scheduler))
        self.pages = Pages(config.name, secure=config.http_tls)
        self.history = History(scheduler)
        self.effects = Effects(lambda: scheduler.desired, record, time.time)
        self.live = Live(scheduler.fleet, self._still_in)
        self._fleet = FleetPages(scheduler, self.history, self.live, self.pages, admin)
        self._traffic = TrafficPages(scheduler, self.history, record, self.pages, time.time)
        self._strategies = StrategyPages(scheduler, record, self.effects, self.pages, admin)
        self._tenants = TenantPages(scheduler, self.pages, admin, lambda: datetime.now(UTC))
        self._sampling: asyncio.Task[None] | None = None

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Serve it there, below `/console`."""
        router.add_get("/", self._home)
        router.add_get(PREFIX, self._home)
        router.add_get(f"{PREFIX}/", self._home)
        router.add_get(f"{PREFIX}/static/{{name}}", self._answering(self._static))
        router.add_get(f"{PREFIX}/sign-in", self._answering(self._show_sign_in))
        router.add_post(f"{PREFIX}/sign-in", self._answering(self._sign_in))
        readers: dict[str, Reader] = {
            "/fleet": self._fleet.overview,
            "/fleet/nodes/{node}": self._fleet.node,
            "/fleet/endpoints/{endpoint}": self._fleet.endpoint,
            "/live": self.live.stream,
            "/traffic": self._traffic.overview,
            "/traffic/{request_id:.+}": self._traffic.decision,
            "/strategies": self._strategies.overview,
            "/strategies/{strategy}": self._strategies.strategy,
            "/tenants": self._tenants.overview,
            "/tenants/{tenant}": self._tenants.tenant,
            "/audit": self._tenants.audit,
        }
        writers: dict[str, Writer] = {
            "/sign-out": self._sign_out,
            "/fleet/state": self._fleet.set_state,
            "/strategies/bind": self._strategies.bind,
            "/strategies/unbind": self._strategies.unbind,
            "/strategies/{strategy}/switch": self._strategies.switch,
            "/strategies/{strategy}/tune": self._strategies.tune,
            "/strategies/{strategy}/roll-back": self._strategies.roll_back,
            "/tenants/{tenant}/quotas": self._tenants.set_quotas,
        }
        for path, reader in readers.items():
            router.add_get(PREFIX + path, self._answering(self._reading(reader)), allow_head=False)
        for path, writer in writers.items():
            router.add_post(PREFIX + path, self._answering(self._writing(writer)))
        router.add_get(f"{PREFIX}/{{rest:.*}}", self._answering(self._reading(self._nothing)))

    def start(self) -> None:
        """Keep ten minutes of history, and notice what is changed."""
        self._sampling = asyncio.create_task(self._sample())

    async def stop(self) -> None:
        """Stop what runs beside the pages."""
        await self.live.stop()
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            try:
                self.effects.look()
                await self.history.sample()
            except Exception as error:  # a fault in one sample must not end the history
                unexpected(error, method="console_sample")
            await asyncio.sleep(history.SAMPLE_S)

    # How every address is answered

    def _answering(self, handler: Handler) -> Handler:
        """Refusals and faults become pages for people, and every answer carries the headers of a careful one."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                response = await handler(request)
            except web.HTTPException:
                raise
            except Exception as error:
                response = await self._failed(request, error)
            if not response.prepared:
                harden(response)
            return response

        return answer

    def _reading(self, reader: Reader) -> Handler:
        async def read(request: web.Request) -> web.StreamResponse:
            visit = self.doorkeeper.admit(request)
            if visit is None:
                return see_other(f"{PREFIX}/sign-in")
            request[_VISIT] = visit
            return await reader(visit)

        return read

    def _writing(self, writer: Writer) -> Handler:
        async def write(request: web.Request) -> web.StreamResponse:
            self.doorkeeper.check_origin(request)
            visit = self.doorkeeper.admit(request)
            if visit is None:
                return see_other(f"{PREFIX}/sign-in")
            request[_VISIT] = visit
            form = await _form(request)
            self.doorkeeper.check_write(visit, form.get(CSRF_FIELD, ""))
            return await writer(visit, form)

        return write

    async def _failed(self, request: web.Request, error: Exception) -> web.Response:
        known = error if isinstance(error, HeadwayError) else unexpected(error, method=f"console {request.method}")
        status, visit = api_error(known).status, request.get(_VISIT)
        values = {"error": known, "status": status, "back": _came_from(request)}
        if visit is None:
            return await self.pages.bare(request, "error.html", status, **values)
        return await self.pages.page(visit, "error.html", status, **values)

    async def _nothing(self, visit: Visit) -> web.StreamResponse:
        return await self.pages.page(visit, "missing.html", 404)

    async def _home(self, _request: web.Request) -> web.StreamResponse:
        return see_other(f"{PREFIX}/fleet")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        return static_file(request)

    def _still_in(self, request: web.Request) -> bool:
        """Does the session behind an open stream count still?"""
        try:
            visit = self.doorkeeper.admit(request) if request.cookies.get(COOKIE) else None
        except HeadwayError:
            return False
        return visit is not None and not visit.fresh

    # Signing in and out

    async def _show_sign_in(self, request: web.Request) -> web.StreamResponse:
        if self.doorkeeper.admit(request) is not None:
            return see_other(f"{PREFIX}/fleet")
        return await self.pages.bare(request, "sign_in.html", problem="", private=self.doorkeeper.private)

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        self.doorkeeper.check_origin(request)
        form = await _form(request)
        try:
            session = self.doorkeeper.sign_in(form.get("token", ""), request)
        except HeadwayError as error:
            unknown = isinstance(error, NoCredential)
            problem = "This token is not known, or does not count any more." if unknown else error.message
            log.warning("console_sign_in_failed", peer=request.remote, reason=error.reason)
            return await self.pages.bare(
                request, "sign_in.html", api_error(error).status, problem=problem, private=self.doorkeeper.private
            )
        response = see_other(f"{PREFIX}/fleet")
        self.pages.keep_session(response, session.id)
        return response

    async def _sign_out(self, visit: Visit, _form: "dict[str, str]") -> web.StreamResponse:
        self.doorkeeper.sessions.close(visit.session.id)
        response = see_other(f"{PREFIX}/sign-in")
        response.del_cookie(COOKIE, path=PREFIX)
        return response


async def _form(request: web.Request) -> "dict[str, str]":
    """A form's fields, the last of each name. Raises ForeignOrigin for what no form of ours sends."""
    if request.content_type != "application/x-www-form-urlencoded" or (request.content_length or 0) > _LARGEST_FORM:
        raise ForeignOrigin("this is no form of the console")
    try:
        async with asyncio.timeout(_FORM_S):
            fields = await request.post()
    except (LookupError, ValueError, TimeoutError):  # an unknown charset, or bytes that it does not have
        raise ForeignOrigin("this is no form of the console") from None
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def _came_from(request: web.Request) -> str:
    """The page to go back to: the one above what was asked for."""
    above = request.path.rpartition("/")[0]
    return above if request.method == "POST" and above.startswith(f"{PREFIX}/") else f"{PREFIX}/fleet"
