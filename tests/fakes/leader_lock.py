"""A Postgres as far as leaders' locks go: sessions end by silence, crashes, and clients are cut off or stopped."""

import asyncio
from dataclasses import dataclass, field

from headway_scheduler.errors import StoreDown
from headway_scheduler.store.base import PostgresAbsent, Term

ROUND_TRIP_S = 0.002


@dataclass(eq=False)
class Session:
    lease_s: float
    heard_at: float
    alive: bool = True


@dataclass
class FakePostgres:
    """`up` False: it runs nowhere. `silent`: it hangs, and answers nobody."""

    up: bool = True
    silent: bool = False
    epoch: int = 0
    holder: str = ""
    lease_s: float = 0.0
    released: bool = True
    locked_by: Session | None = None
    sessions: list[Session] = field(default_factory=list)

    def crash(self) -> None:
        self.up = False
        for session in self.sessions:
            session.alive = False
        self.sessions.clear()
        self.locked_by = None

    def sweep(self, now: float) -> None:
        """Its own timer: who has said nothing for a lease is out, unless it hangs itself."""
        for session in list(self.sessions):
            if session.alive and now - session.heard_at >= session.lease_s and not self.silent:
                self.end(session)

    def end(self, session: Session) -> None:
        session.alive = False
        if session in self.sessions:
            self.sessions.remove(session)
        if self.locked_by is session:
            self.locked_by = None


class FakeLeaderLock:
    """A LeaderLock there. `cut`: no packet passes; `stopped`: its process is, so nothing of it goes on."""

    def __init__(self, postgres: FakePostgres, holder: str, lease_s: float) -> None:
        self.postgres, self.holder, self.lease_s = postgres, holder, lease_s
        self.cut = False
        self.running = asyncio.Event()
        self.running.set()
        self.session: Session | None = None
        self.epoch = 0

    async def reach(self) -> None:
        await self._on_a_session()

    async def take(self) -> Term | None:
        session = await self._on_a_session()
        postgres = self.postgres
        if postgres.locked_by not in (None, session):
            return None
        wait_s = 0.0 if postgres.released else postgres.lease_s
        postgres.locked_by = session
        postgres.lease_s = self.lease_s if postgres.released else max(self.lease_s, postgres.lease_s)
        postgres.epoch, postgres.holder, postgres.released = postgres.epoch + 1, self.holder, False
        self.epoch = postgres.epoch
        await self._travel()
        return Term(self.epoch, wait_s)

    async def renew(self) -> None:
        session = self.session
        if session is None:
            raise StoreDown("no session")
        await self._on_a_session()
        if self.session is not session:
            raise StoreDown("another session")
        await self._travel()

    async def release(self) -> None:
        if self.session is not None and self.session.alive and not self.cut:
            self.postgres.released = True
        await self.close()

    async def close(self) -> None:
        if self.session is not None and not self.cut:
            self.postgres.end(self.session)
        self.session = None

    async def _travel(self) -> None:
        """One way over the network."""
        await asyncio.sleep(ROUND_TRIP_S / 2)
        await self.running.wait()
        if self.cut or self.postgres.silent:
            self.session = None
            await asyncio.sleep(self.lease_s)
            await self.running.wait()
            raise StoreDown("no answer")

    async def _on_a_session(self) -> Session:
        await self._travel()
        now = asyncio.get_running_loop().time()
        self.postgres.sweep(now)
        if not self.postgres.up:
            self.session = None
            await self._travel()
            raise PostgresAbsent("refused")
        if self.session is not None and not self.session.alive:
            self.session = None
            await self._travel()
            raise StoreDown("the session has ended")
        if self.session is None:
            self.session = Session(self.lease_s, now)
            self.postgres.sessions.append(self.session)
        self.session.heard_at = now
        return self.session
