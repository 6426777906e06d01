"""Thousands of answers open at once: each is one ext_proc stream, and none leaves anything behind."""

import asyncio
import json
import resource
from collections import Counter

from fakes.waiting import eventually

DUPLEX = {"request": "FULL_DUPLEX_STREAMED", "response": "FULL_DUPLEX_STREAMED"}
WANTED = 5_000
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


def allowed():
    """As many as open files allow: two for each stream here, where clients and engines live together."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(WANTED, (hard - 1_000) // 2)


async def ask(port, gate):
    """Ask, and read as far as the first words."""
    async with gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await reader.readuntil(b"Gr\xc3\xbc")
    return reader, writer


async def test_thousands_of_open_streams_leave_nothing_behind(planes):
    count = allowed()
    async with planes(DUPLEX) as plane:
        engines = plane.engines
        for engine in engines:
            engine.script.pause_after = 2
        await plane.served.bind("least_request")
        before = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())
        gate = asyncio.Semaphore(100)
        clients = await asyncio.gather(*(ask(plane.envoy.port, gate) for _ in range(count)))
        assert len(plane.ledger.reservations) == count
        assert sorted(len(engine.seen) for engine in engines) == [count // 2, count - count // 2]
        for _, writer in clients[::2]:
            writer.transport.abort()
        left = count - len(clients[::2])
        await eventually(lambda: len(plane.ledger.reservations) == left, 60)
        for engine in engines:
            engine.script.resume.set()
        for reader, writer in clients[1::2]:
            await reader.readuntil(b"data: [DONE]\n\n")
            writer.close()
        await plane.settled()
        await eventually(lambda: sum(engine.aborted for engine in engines) == len(clients[::2]), 60)

        def tasks_left():
            now = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())
            return not (now - before).get("ExtProcService.process")

        await eventually(tasks_left)
