"""A pooler in transaction mode, as far as LISTEN goes: what a server session hears while idle is nobody's."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import make_url

_NOTIFICATION = b"A"


@contextmanager
def transaction_pooler(url: str) -> Iterator[str]:
    """The URL of a port before that Postgres, on which no notification comes through."""
    target = make_url(url)
    started: threading.Event = threading.Event()
    state: dict[str, object] = {}

    async def serve() -> None:
        stop = asyncio.Event()
        handlers: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handlers.add(task)
            try:
                await _relay(reader, writer, target.host or "", target.port or 5432, target.query.get("host"))
            except asyncio.CancelledError:
                pass
            finally:
                handlers.discard(task)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        state.update(port=server.sockets[0].getsockname()[1], loop=asyncio.get_running_loop(), stop=stop)
        started.set()
        await stop.wait()
        server.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="pooler")
    thread.start()
    started.wait(10)
    try:
        query = {key: value for key, value in target.query.items() if key != "host"} | {"sslmode": "disable"}
        there = target.set(host="127.0.0.1", port=state["port"], query=query)
        yield there.render_as_string(hide_password=False)
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(10)


async def _relay(reader, writer, host, port, socket) -> None:
    if socket:
        there, to_server = await asyncio.open_unix_connection(f"{socket}/.s.PGSQL.{port}")
    else:
        there, to_server = await asyncio.open_connection(host, port)
    up = asyncio.create_task(_copy(reader, to_server))
    try:
        await _without_notifications(there, writer)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        up.cancel()
        await asyncio.gather(up, return_exceptions=True)
        for each in (writer, to_server):
            each.close()


async def _copy(reader, writer) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _without_notifications(reader, writer) -> None:
    while True:
        head = await reader.readexactly(5)
        body = await reader.readexactly(int.from_bytes(head[1:]) - 4)
        if head[:1] != _NOTIFICATION:
            writer.write(head + body)
            await writer.drain()
