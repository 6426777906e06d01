"""Usage that is not stored yet: no batch is forgotten before it is stored, whoever flushes meanwhile."""

import asyncio
from datetime import UTC, datetime

import pytest
from headway_scheduler.errors import StoreDown
from headway_scheduler.usage import UsageLog


class SlowStore:
    """Adds each batch once, when it is told to go on; `down`: it fails instead."""

    def __init__(self):
        self.added, self.calls, self.down = {}, [], set()

    async def record_usage(self, rows, batch):
        going = asyncio.Event()
        self.calls.append((batch, going))
        await going.wait()
        if batch in self.down:
            raise StoreDown("it is away")
        self.added.setdefault(batch, sum(row.requests for row in rows))

    async def turn(self):
        for _ in range(5):
            await asyncio.sleep(0)


async def test_two_flushes_at_once_lose_no_batch_that_fails():
    log, store = UsageLog("s.", lambda: datetime(2026, 1, 1, tzinfo=UTC)), SlowStore()
    log.add("a", "m", requests=1)
    first = asyncio.create_task(log.flush(store))
    await store.turn()
    second = asyncio.create_task(log.flush(store))
    await store.turn()
    log.add("a", "m", requests=2)
    assert [batch for batch, _ in store.calls] == ["s.1", "s.1"]
    store.calls[0][1].set()
    await store.turn()
    store.down.add("s.2")
    store.calls[1][1].set()
    await store.turn()
    for _, going in store.calls:
        going.set()
    for flush in (first, second):
        with pytest.raises(StoreDown):
            await asyncio.wait_for(flush, 5)
    assert len(log) == 1
    store.down.clear()
    third = asyncio.create_task(log.flush(store))
    await store.turn()
    store.calls[-1][1].set()
    await third
    assert (store.added, len(log)) == ({"s.1": 1, "s.2": 2}, 0)
