"""Versions of the desired state as they are committed, by any process: LISTEN on a connection of its own."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import psycopg
import structlog
from sqlalchemy import URL

from headway_scheduler.store.base import Notified
from headway_scheduler.store.connection import Availability

__all__ = ["CHANNEL", "Probe", "listen"]

CHANNEL: Final = "headway_desired"
_PROBE: Final = "headway_probe"  # another channel: schedulers of the version before read CHANNEL as numbers

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0

log = structlog.get_logger(__name__)


class Probe:
    """Whether a notification from another connection arrived here, tried once a connect.

    A pooler in transaction mode gives the session that said LISTEN to somebody else: nothing is lost, since the version
    is asked for every `poll_s`, but writes of other schedulers come that much later.
    """

    def __init__(self) -> None:
        self.notified = Notified.UNKNOWN
        self._token = ""

    async def send(self, url: URL, timeout_s: float) -> None:
        """Notify from a connection of its own."""
        self._token = secrets.token_hex(8)
        async with _connected(url, timeout_s) as connection, asyncio.timeout(timeout_s):
            await connection.execute("SELECT pg_notify(%s, %s)", (_PROBE, self._token))

    def heard(self, payload: str) -> None:
        """One came in."""
        if payload == self._token:
            self.notified = Notified.DELIVERED

    def over(self) -> None:
        """Time enough went by."""
        if self.notified is not Notified.DELIVERED:
            if self.notified is Notified.UNKNOWN:
                log.warning("store_notifications_missing", hint="connect to Postgres itself, or pool by session")
            self.notified = Notified.MISSING


async def listen(
    url: URL, *, timeout_s: float, poll_s: float, availability: Availability, probe: Probe
) -> AsyncGenerator[int]:
    """Yield the current version after every (re)connect, then each newer one.

    Every `poll_s` without news it asks for the version, so a connection that died in silence is noticed and a
    notification that was missed is made up for.
    """
    backoff_s = _FIRST_BACKOFF_S
    while True:
        try:
            async with _connected(url, timeout_s) as connection:
                await connection.execute(f"LISTEN {CHANNEL}")
                version = await _current(connection, timeout_s)
                availability.note(True)
                backoff_s = _FIRST_BACKOFF_S
                yield version
                await connection.execute(f"LISTEN {_PROBE}")
                await probe.send(url, timeout_s)
                while True:
                    newer = await _next(connection, timeout_s, poll_s, probe)
                    if newer > version:
                        version = newer
                        yield version
        except (psycopg.Error, OSError) as error:  # TimeoutError is an OSError
            log.warning("store_listener_lost", error_type=type(error).__name__, retry_s=backoff_s)
            availability.note(False)
        await asyncio.sleep(backoff_s)
        backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)


@asynccontextmanager
async def _connected(url: URL, timeout_s: float) -> AsyncIterator[psycopg.AsyncConnection]:
    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
    async with asyncio.timeout(timeout_s):
        connection = await psycopg.AsyncConnection.connect(
            conninfo, autocommit=True, connect_timeout=max(1, int(timeout_s)), application_name="headway-listener"
        )
    try:
        yield connection
    finally:
        await connection.close()


async def _current(connection: psycopg.AsyncConnection, timeout_s: float) -> int:
    async with asyncio.timeout(timeout_s):
        cursor = await connection.execute("SELECT version FROM desired_version")
        row = await cursor.fetchone()
    if row is None:
        raise psycopg.DataError("desired_version has no row")
    return int(row[0])


async def _next(connection: psycopg.AsyncConnection, timeout_s: float, poll_s: float, probe: Probe) -> int:
    newest = 0
    async for notification in connection.notifies(timeout=poll_s, stop_after=1):
        if notification.channel == _PROBE:
            probe.heard(notification.payload)
        else:
            newest = max(newest, int(notification.payload))
    if not newest:
        probe.over()
    return newest or await _current(connection, timeout_s)
