"""Who answers: one scheduler of those that share a database, and no second one, also not for a moment.

The leader holds a lock in Postgres and a lease by its own clock. The lease runs from before a renewal was sent, so it
ends before Postgres can have given the lock to another; the clock is looked at before anything is answered, so a leader
that was stopped, or cut off, refuses from its first moment on. A successor waits out the lease of the one before, and
answers once a renewal sent after that came back.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import Final

import structlog

from headway_scheduler.errors import HeadwayError, StoreDown
from headway_scheduler.store.base import LeaderLock, PostgresAbsent, Term

__all__ = ["Leadership", "LeadershipThread", "Standing", "lease_clock"]

_POLLS: Final = 8
"""How often in a lease a standby asks for the lock."""
_RENEWALS: Final = 5
"""How often in a lease a leader renews it."""

lease_clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds; where the system offers it (Linux), of a clock that goes on while the machine sleeps."""

_RESTART_S: Final = 1.0

log = structlog.get_logger(__name__)


class Standing(StrEnum):
    """What a scheduler is to the others."""

    LEADER = "leader"
    TAKING_OVER = "taking_over"
    """It has the lock, and waits until nobody else can believe to have it."""
    STANDBY = "standby"


class Leadership:
    """One scheduler's part. Without a lock it is alone, and leads.

    `prepare` is awaited once the lock is had, with the new epoch, and `retire` called when leading is over. `on_change`
    is told of each new standing. A leader that is not `alive` gives up.
    """

    def __init__(
        self,
        lock: LeaderLock | None,
        lease_s: float,
        *,
        prepare: Callable[[int], Awaitable[None]],
        retire: Callable[[], None],
        clock: Callable[[], float] = lease_clock,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.standing = Standing.LEADER if lock is None else Standing.STANDBY
        self.epoch: int | None = None
        """Of the newest leadership that was this one's; None while alone."""
        self.on_change: list[Callable[[], None]] = []
        self._lock, self._lease_s, self._clock = lock, lease_s, clock
        self._prepare, self._retire, self._alive = prepare, retire, alive
        self._until = float("inf" if lock is None else "-inf")

    def leads(self) -> bool:
        """May it answer now? Ask anew after every wait."""
        return self._clock() < self._until

    async def run(self) -> None:
        """Wait for the lock, lead, lose it, and again, until cancelled. Nothing to do for one that is alone."""
        if (lock := self._lock) is None:
            await asyncio.Event().wait()
            return
        try:
            while True:
                await self._succeed(lock, await self._win(lock))
                if self.standing is Standing.LEADER:
                    await self._reign(lock)
                await self._stand_down(lock)
        except Exception:
            await self._stand_down(lock)
            raise

    async def resign(self) -> None:
        """Answer nothing more, and let another take over at once. `run` must have ended."""
        if self._lock is None:
            return
        led = self.leads()
        self._until = float("-inf")
        self._become(Standing.STANDBY)
        with contextlib.suppress(StoreDown):
            # One that only waited for its turn cannot speak for the one before.
            await (self._lock.release() if led else self._lock.close())

    # Inside

    async def _win(self, lock: LeaderLock) -> Term:
        """Ask for the lock until it is had. After an outage whoever led before it comes first."""
        shy_until, reached = float("-inf"), True
        while True:
            try:
                if not reached or self._clock() < shy_until or not self._alive():
                    await lock.reach()
                    if not reached:
                        reached, shy_until = True, self._clock() + self._lease_s
                elif (term := await lock.take()) is not None:
                    log.info("leader_lock_taken", epoch=term.epoch, wait_s=term.wait_s)
                    return term
            except StoreDown as error:
                reached = False
                log.debug("leader_lock_unreachable", problem=error.message)
            await asyncio.sleep(self._lease_s / _POLLS)

    async def _succeed(self, lock: LeaderLock, term: Term) -> None:
        """Prepare, wait out the lease of the one before, and lead; or lose the lock again meanwhile."""
        renew_s = self._lease_s / _RENEWALS
        free_at = self._clock() + term.wait_s
        self._become(Standing.TAKING_OVER)
        preparing = asyncio.ensure_future(self._prepare(term.epoch))
        try:
            while True:
                sent = self._clock()
                await lock.renew()
                # Only a renewal sent after the wait shows that the lock was held all through it.
                if sent >= free_at and preparing.done():
                    preparing.result()
                    self.epoch, self._until = term.epoch, sent + self._lease_s
                    self._become(Standing.LEADER)
                    return
                if preparing.done():
                    await asyncio.sleep(min(renew_s, max(0.0, free_at - self._clock())))
                else:
                    await asyncio.wait({preparing}, timeout=renew_s)
        except HeadwayError as error:
            log.warning("takeover_failed", epoch=term.epoch, reason=error.reason, problem=error.message)
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _reign(self, lock: LeaderLock) -> None:
        """Renew the lease; returns when it has run out, or who leads does not live."""
        while self._alive():
            await asyncio.sleep(self._lease_s / _RENEWALS)
            sent = self._clock()
            try:
                await lock.renew()
            except StoreDown as error:
                log.warning("leader_lock_lost", epoch=self.epoch, problem=error.message)
                if not await self._regain(lock):
                    return
            else:
                self._until = sent + self._lease_s

    async def _regain(self, lock: LeaderLock) -> bool:
        """Take the lock again before the lease runs out, and before anybody else did.

        While Postgres proves to run nowhere, nobody can have it: that is as good as a renewal.
        """
        while (sent := self._clock()) < self._until:
            try:
                term = await lock.take()
            except PostgresAbsent:
                if self.leads():
                    self._until = sent + self._lease_s
            except StoreDown as error:
                log.debug("leader_lock_unreachable", problem=error.message)
            else:
                if term is not None:
                    return self._goes_on(term, sent)
            await asyncio.sleep(self._lease_s / _POLLS)
        return False

    def _goes_on(self, term: Term, sent: float) -> bool:
        """Did nobody else have the lock in between?"""
        if self.epoch is None or term.epoch != self.epoch + 1:
            return False
        self.epoch, self._until = term.epoch, sent + self._lease_s
        log.info("leader_lock_regained", epoch=term.epoch)
        return True

    async def _stand_down(self, lock: LeaderLock) -> None:
        led = self.standing is Standing.LEADER
        self._until = float("-inf")
        self._become(Standing.STANDBY)
        if led:
            self._retire()
        await lock.close()

    def _become(self, standing: Standing) -> None:
        if standing is self.standing:
            return
        self.standing = standing
        log.info("standing_changed", standing=standing.value, epoch=self.epoch)
        for listener in self.on_change:
            listener()


class LeadershipThread:
    """Runs a leadership on a thread and event loop of its own: a scheduler that is busy for a second still leads.

    What the leadership calls runs there; `resign` is awaited elsewhere.
    """

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    async def resign(self) -> None:
        """Stop, and let another lead."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            await asyncio.to_thread(self._thread.join)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        assert self._loop is not None  # noqa: S101 - made by start
        with asyncio.Runner(loop_factory=partial(_same, self._loop)) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._task = asyncio.create_task(self._forever())
        await asyncio.wait({self._task})
        await self._leadership.resign()

    async def _forever(self) -> None:
        while True:
            try:
                await self._leadership.run()
            except Exception:
                log.exception("leadership_failed")
                await asyncio.sleep(_RESTART_S)


def _same(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    return loop
