"""Postgres's unix socket as a TCP port of another host: `python -m fakes.postgres_port HOST PORT SOCKET READY_FILE`."""

import asyncio
import sys
from pathlib import Path


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _main(host: str, port: str, socket: str, ready: str) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(socket)
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

    server = await asyncio.start_server(relay, host, int(port))
    Path(ready).touch()  # noqa: ASYNC240 - once, at the start
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:5]))
