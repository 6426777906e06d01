"""One engine, every operation within a deadline, every driver error turned into ours."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import psycopg
import structlog
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from headway_scheduler.errors import StoreDown

__all__ = ["Availability", "Database"]

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]

RETRY_AFTER_S: Final = 1.0

log = structlog.get_logger(__name__)


class Availability:
    """Can Postgres be reached? Tells `changed` when the answer changes."""

    def __init__(self, changed: Callable[[bool], None]) -> None:
        self.available = True
        self._changed = changed

    def note(self, available: bool) -> None:
        """Remember how the latest attempt went."""
        if available == self.available:
            return
        self.available = available
        log.info("store_available" if available else "store_unavailable")
        self._changed(available)


class Database:
    """Runs transactions. Raises StoreDown when Postgres does not answer within `timeout_s`."""

    def __init__(self, url: str, *, timeout_s: float, availability: Availability) -> None:
        self.url = make_url(url).set(drivername="postgresql+psycopg")
        self._timeout_s = timeout_s
        self._availability = availability
        self._abandoned: set[asyncio.Task[object]] = set()
        milliseconds = int(timeout_s * 1000)
        self._engine = create_async_engine(
            self.url,
            pool_size=4,
            max_overflow=4,
            pool_pre_ping=True,
            pool_timeout=timeout_s,
            hide_parameters=True,
            connect_args={
                "connect_timeout": max(1, int(timeout_s)),
                "application_name": "headway-scheduler",
                "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
            },
        )

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one consistent snapshot, and write nothing."""

        async def attempt(_given_up: asyncio.Event) -> T:
            async with self._engine.connect() as connection:
                await connection.execution_options(isolation_level="REPEATABLE READ")
                return await work(connection)

        return await self._within_deadline(attempt)

    async def write(self, work: Work[T], *, keep: bool = True) -> T:
        """Run `work` in a transaction: committed if `keep` and it raises nothing."""

        async def attempt(given_up: asyncio.Event) -> T:
            async with self._engine.connect() as connection:
                result = await work(connection)
                if keep and not given_up.is_set():
                    await connection.commit()
                return result

        return await self._within_deadline(attempt)

    async def write_once(self, work: Work[T]) -> T:
        """Run `work`, one statement, which Postgres commits by itself: a client that stops leaves no lock behind."""

        async def attempt(_given_up: asyncio.Event) -> T:
            async with self._engine.connect() as connection:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                return await work(connection)

        return await self._within_deadline(attempt)

    async def close(self) -> None:
        """Close every connection."""
        abandoned = list(self._abandoned)
        if abandoned:
            await asyncio.wait(abandoned, timeout=self._timeout_s)
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        await self._engine.dispose()

    async def _within_deadline(self, attempt: Callable[[asyncio.Event], Awaitable[T]]) -> T:
        # A stopped Postgres answers neither the statement nor its cancellation, so the caller does not wait for the
        # task to end: it is cancelled and left behind.
        given_up = asyncio.Event()
        task: asyncio.Task[T] = asyncio.ensure_future(_as_coroutine(attempt, given_up))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            # Cancelled while it takes a connection out of the pool, it would never put it back: it may end by itself,
            # and commits nothing that it has not begun to commit.
            given_up.set()
            self._leave(task)
            raise
        if not done:
            self._abandon(task)
            raise self._down(f"no answer within {self._timeout_s:g} s")
        try:
            result = task.result()
        except (DBAPIError, PoolTimeout, psycopg.Error, OSError) as error:
            if not _is_unreachable(error):
                self._availability.note(True)
                raise
            raise self._down(_cause(error)) from error
        self._availability.note(True)
        return result

    def _abandon(self, task: "asyncio.Task[T]") -> None:
        task.cancel()
        self._leave(task)

    def _leave(self, task: "asyncio.Task[T]") -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[object]") -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it: its caller has had its answer

    def _down(self, cause: str) -> StoreDown:
        log.warning("store_unreachable", cause=cause)
        self._availability.note(False)
        # No promise about a write: its commit may be what was cut off.
        message = "Postgres cannot be reached; try again, a write with the same request_id"
        return StoreDown(message, retry_after_s=RETRY_AFTER_S)


async def _as_coroutine(attempt: Callable[[asyncio.Event], Awaitable[T]], given_up: asyncio.Event) -> T:
    return await attempt(given_up)


def _is_unreachable(error: Exception) -> bool:
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error.orig, psycopg.OperationalError | psycopg.InterfaceError)
    return isinstance(error, PoolTimeout | psycopg.OperationalError | psycopg.InterfaceError | OSError)


def _cause(error: Exception) -> str:
    original = error.orig if isinstance(error, DBAPIError) else error
    return f"{type(original).__name__}: {str(original).splitlines()[0] if str(original) else ''}"
