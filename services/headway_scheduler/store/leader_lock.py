"""The one lock that leading schedulers hold: a session-level advisory lock, on a connection of its own.

Postgres itself ends a session that says nothing for a lease (`idle_session_timeout`), so a leader that hangs, or whose
cable is cut, loses the lock in bounded time, whatever TCP believes. Nothing is written to keep it: a renewal is a
question on the session that holds it.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from headway_scheduler.errors import StoreDown
from headway_scheduler.store.base import PostgresAbsent, Term

__all__ = ["LOCK_KEY", "PostgresLeaderLock"]

LOCK_KEY: Final = 0x6865616477617932  # "headway2"

_TAKE: Final = """
WITH before AS (SELECT epoch, holder, lease_s, released FROM leadership FOR UPDATE)
UPDATE leadership SET epoch = before.epoch + 1, holder = %(holder)s, released = false,
    lease_s = CASE WHEN before.released THEN %(lease_s)s ELSE greatest(%(lease_s)s, before.lease_s) END
FROM before RETURNING leadership.epoch, CASE WHEN before.released THEN 0 ELSE before.lease_s END
"""
_RELEASE: Final = "UPDATE leadership SET released = true WHERE epoch = %s"
# It takes nobody in yet, and no older session lives on. "Shutting down" is no such proof: sessions may outlive it.
_NOT_UP_YET: Final = ("the database system is starting up", "the database system is in recovery mode")
_ABSENT: Final = (ConnectionRefusedError, FileNotFoundError)

T = TypeVar("T")
Session = psycopg.AsyncConnection[tuple[Any, ...]]

log = structlog.get_logger(__name__)


class PostgresLeaderLock:
    """A LeaderLock for `holder`. It connects when used, and again after any failure."""

    def __init__(self, url: str, holder: str, lease_s: float) -> None:
        # As the store's driver reads it, several hosts too.
        _, options = PGDialect_psycopg().create_connect_args(make_url(url))  # type: ignore[no-untyped-call]
        self._conninfo = make_conninfo(**options)
        self._holder, self._lease_s = holder, lease_s
        self._session: Session | None = None
        self._pid = 0
        self._epoch = 0
        self._left: set[asyncio.Task[Any]] = set()

    async def reach(self) -> None:
        """Ask Postgres for a sign of life."""
        await self._within_lease(lambda: self._one("SELECT 1"))

    async def take(self) -> Term | None:
        """The lock, if nobody holds it."""
        return await self._within_lease(self._take)

    async def renew(self) -> None:
        """Keep it: an answer on the session that took it shows that it was never free since."""
        if self._session is None:
            raise StoreDown("the session that held the lock is gone")
        await self._within_lease(self._renew)

    async def release(self) -> None:
        """Give it up; the next one need not wait."""
        if self._session is not None and self._epoch:
            await self._within_lease(self._release)
        await self.close()

    async def close(self) -> None:
        """End the session, and with it the lock."""
        session, self._session, self._epoch = self._session, None, 0
        if session is not None:
            await session.close()

    # Inside

    async def _take(self) -> Term | None:
        held, self._pid = await self._one("SELECT pg_try_advisory_lock(%s), pg_backend_pid()", LOCK_KEY)
        if not held:
            return None
        epoch, wait_s = await self._one(_TAKE, {"holder": self._holder, "lease_s": self._lease_s})
        self._epoch = int(epoch)
        return Term(self._epoch, float(wait_s))

    async def _renew(self) -> None:
        (pid,) = await self._one("SELECT pg_backend_pid()")
        if pid != self._pid:  # a pooler between us and Postgres: the lock is another session's
            raise psycopg.OperationalError("the session is not the one that took the lock")

    async def _release(self) -> None:
        assert self._session is not None  # noqa: S101 - its caller looked
        await self._session.execute(_RELEASE, [self._epoch])
        await self._session.execute(
            "SELECT pg_advisory_unlock_all()"
        )  # at once; a closed session takes a moment to end

    async def _one(self, statement: str, values: Any = None) -> tuple[Any, ...]:  # what psycopg takes
        session = await self._connected()
        cursor = await session.execute(statement.encode(), [values] if isinstance(values, int) else values)
        row = await cursor.fetchone()
        if row is None:
            raise psycopg.DataError("leadership has no row")
        return row

    async def _connected(self) -> Session:
        if self._session is None or self._session.closed:
            milliseconds = max(1, int(self._lease_s * 1000))
            self._session = await psycopg.AsyncConnection.connect(
                self._conninfo,
                autocommit=True,
                connect_timeout=max(1, int(self._lease_s)),
                application_name="headway-leader",
                options=f"-c idle_session_timeout={milliseconds} -c statement_timeout={milliseconds}",
            )
        return self._session

    async def _within_lease(self, work: Callable[[], Awaitable[T]]) -> T:
        """Raises StoreDown after a lease: who does not answer by then is as good as away.

        The task is left behind, not waited for: a Postgres that is stopped answers no cancellation either.
        """
        task = asyncio.ensure_future(_as_coroutine(work))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._lease_s)
        except asyncio.CancelledError:
            self._left.add(task)  # it ends by itself, and whoever uses the session next waits for it
            task.add_done_callback(self._forget)
            raise
        if not done:
            self._abandon(task)
            raise StoreDown(f"Postgres does not answer within {self._lease_s:g} s")
        try:
            return task.result()
        except (psycopg.Error, OSError) as error:
            await self.close()
            if await self._is_absent(error):
                raise PostgresAbsent("no Postgres runs there") from error
            raise StoreDown("Postgres cannot be reached") from error

    def _abandon(self, task: "asyncio.Task[Any]") -> None:
        session, self._session, self._epoch = self._session, None, 0
        task.cancel()
        closing = asyncio.ensure_future(_close_after(task, session))
        self._left.add(closing)
        closing.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it

    async def _is_absent(self, error: Exception) -> bool:
        """Does Postgres run at none of the addresses it could be at?"""
        places = _places(self._conninfo)
        if len(places) == 1 and any(words in str(error) for words in _NOT_UP_YET):
            return True
        try:
            async with asyncio.timeout(self._lease_s):
                return bool(places) and all([await _refuses(*place) for place in places])
        except (TimeoutError, OSError):
            return False


async def _as_coroutine(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


async def _close_after(task: "asyncio.Task[Any]", session: Session | None) -> None:
    await asyncio.gather(task, return_exceptions=True)
    if session is not None:
        await session.close()


def _places(conninfo: str) -> list[tuple[str, str]]:
    """Every (host, port) that is named; a host may be a folder of sockets. None where libpq would choose."""
    found = conninfo_to_dict(conninfo)
    hosts = str(found.get("hostaddr") or found.get("host") or "").split(",")
    ports = str(found.get("port") or "5432").split(",")
    if not all(hosts):
        return []
    return [(host, ports[number] if len(ports) > 1 else ports[0]) for number, host in enumerate(hosts)]


async def _refuses(host: str, port: str) -> bool:
    """Is nobody listening there, at any of the name's addresses? Raises OSError where that cannot be said."""
    loop = asyncio.get_running_loop()
    if host.startswith("/"):
        return await _refuses_at(socket.AF_UNIX, f"{host}/.s.PGSQL.{port}")
    found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return bool(found) and all([await _refuses_at(family, address) for family, _, _, _, address in found])


async def _refuses_at(family: int, address: Any) -> bool:  # a socket's address, of any family
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, address)
        except _ABSENT:
            return True
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                return True  # no way for anybody on this host
            raise
    return False
