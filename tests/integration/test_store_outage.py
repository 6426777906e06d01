"""Postgres dies, hangs and comes back under a store that is in use."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from fakes.postgres import FAST
from fakes.waiting import eventually
from headway_scheduler.domain.desired import Tenant
from headway_scheduler.errors import HeadwayError, StoreDown
from headway_scheduler.store import migrate
from headway_scheduler.store.base import Write
from headway_scheduler.store.embedded import EmbeddedPostgres
from headway_scheduler.store.postgres import PostgresStore

WRITE = Write("tester", "Test")


@pytest.fixture
def server(postgres_dir: Path) -> Iterator[EmbeddedPostgres]:
    made = EmbeddedPostgres(postgres_dir, settings=FAST)
    migrate.upgrade(made.start())
    yield made
    made.stop()


@contextlib.asynccontextmanager
async def listening(store: PostgresStore) -> AsyncIterator[list[int]]:
    """What `changes()` yields, as it yields it."""
    seen: list[int] = []

    async def listen() -> None:
        async for version in store.changes():
            seen.append(version)

    task = asyncio.create_task(listen())
    await eventually(lambda: bool(seen))
    yield seen
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_killed_postgres_answers_store_down_and_recovers_by_itself(server: EmbeddedPostgres) -> None:
    told: list[bool] = []
    store = PostgresStore(server.url, on_available=told.append)
    async with listening(store) as seen:
        version = seen[-1]
        await store.create(Tenant("before"), WRITE)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await eventually(lambda: not store.available)
        for attempt in (store.load(), store.create(Tenant("lost"), WRITE), store.save_learned({"k": b"v"})):
            with pytest.raises(StoreDown) as down:
                await attempt
            assert down.value.retry_after_s is not None
        assert told == [False]

        server.start()
        await eventually(lambda: store.available)
        await store.create(Tenant("after"), WRITE)
        await eventually(lambda: seen[-1] == version + 2)
        assert told == [False, True]
        assert {"before", "after"} <= set((await store.load()).tenants)
        assert "lost" not in (await store.load()).tenants
    await store.close()


async def test_a_hanging_postgres_answers_store_down_and_recovers_by_itself(server: EmbeddedPostgres) -> None:
    store = PostgresStore(server.url, timeout_s=0.5, poll_s=0.1)
    async with listening(store):
        assert server.pid is not None
        everyone = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        for process in everyone:
            process.suspend()
        try:
            for _ in range(2):  # on a connection that was open, and on a new one
                with pytest.raises(StoreDown):
                    await store.create(Tenant("acme"), WRITE)
            await eventually(lambda: not store.available)
        finally:
            for process in everyone:
                process.resume()
        await eventually(lambda: store.available)
        await _until_answered(store)
    await store.close()


async def _until_answered(store: PostgresStore) -> None:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(HeadwayError):
                await store.update(Tenant("acme"), WRITE, allow_missing=True)
                return


async def test_a_store_may_be_made_before_postgres_runs(postgres_dir: Path) -> None:
    server = EmbeddedPostgres(postgres_dir, settings=FAST)
    store = PostgresStore(server.url)
    with pytest.raises(StoreDown):
        await store.load()
    assert not store.available
    migrate.upgrade(server.start())
    assert "default" in (await store.load()).tenants
    assert store.available
    await store.close()
    server.stop()


async def test_a_cancelled_write_is_not_made(server: EmbeddedPostgres) -> None:
    store = PostgresStore(server.url)
    await store.load()
    task = asyncio.create_task(store.create(Tenant("acme"), WRITE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.create(Tenant("beta"), WRITE)  # the writers' lock is free again
    assert "acme" not in (await store.load()).tenants
    await store.close()


async def test_a_write_cut_off_at_its_answer_is_made_once(server: EmbeddedPostgres) -> None:
    """The caller hears STORE_DOWN and cannot know; its retry with the same request id finds out."""
    write = Write("tester", "Test", "r1")
    first = PostgresStore(server.url)
    made = await first.create(Tenant("acme"), write)  # committed; say the answer was lost
    await first.close()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    second = PostgresStore(server.url)
    with pytest.raises(StoreDown):
        await second.create(Tenant("acme"), write)
    server.start()
    assert await second.create(Tenant("acme"), write) == made
    assert len(await second.audit(before_id=None, limit=10)) == 1
    await second.close()
