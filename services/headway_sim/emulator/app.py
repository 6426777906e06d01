"""Starts the engines of one emulator process."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
from aiohttp import web

from headway_sim.emulator.config import EmulatorConfig
from headway_sim.emulator.kv_events import KvPublisher
from headway_sim.emulator.realtime import RealTimeEngine
from headway_sim.emulator.server import EngineServer
from headway_sim.engine import Engine

log = structlog.get_logger()


class Emulator:
    """Running engines, as an async context manager; `addresses` are theirs, in the order of the ports.

    `publishers` are those of their KV events, if they publish any.
    """

    def __init__(self, config: EmulatorConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self.addresses: list[str] = []
        self.publishers: list[KvPublisher] = []

    async def __aenter__(self) -> Self:
        """Listen on every port; on any failure none stays open."""
        async with AsyncExitStack() as stack:
            for number, port in enumerate(self._config.ports):
                self.addresses.append(await self._start(stack, number, port))
            self._stack = stack.pop_all()
        if self._config.port_file is not None:
            _write_ports(self._config.port_file, self.addresses)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack, number: int, port: int) -> str:
        config = self._config
        model = Engine(config.hardware, kv_tokens=config.kv_tokens, waiting_limit=config.waiting_limit)
        publisher = await self._publish(stack, number, model)
        engine = RealTimeEngine(
            model,
            speedup=config.speedup,
            stream_interval_ms=config.stream_interval_ms,
            clock_s=time.perf_counter,
        )
        stack.callback(engine.close)
        server = EngineServer(engine, config.models, unix_time_s=time.time, publisher=publisher)
        runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, config.host, port, backlog=1024).start()
        return f"{config.host}:{runner.addresses[0][1]}"

    async def _publish(self, stack: AsyncExitStack, number: int, model: Engine) -> KvPublisher | None:
        """The engine's KV events, where they are wanted: engine n's ports are the first ones' + 2n."""
        first = self._config.kv_events_port
        if first is None:
            return None
        port, replay_port = (first + 2 * number, first + 2 * number + 1) if first else (0, 0)
        publisher = KvPublisher(self._config.host, port, replay_port, time.time, self._config.kv_events_encoding)
        stack.push_async_callback(publisher.close)
        await publisher.start()
        model.pool.listener = publisher
        self.publishers.append(publisher)
        return publisher


async def serve(config: EmulatorConfig) -> None:
    """Run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Emulator(config) as emulator:
        log.info(
            "emulator_started",
            addresses=emulator.addresses,
            hardware=config.hardware.name,
            speedup=config.speedup,
        )
        await stop.wait()
    log.info("emulator_stopped")


def _write_ports(path: Path, addresses: list[str]) -> None:
    """Appear at once and complete: whoever waits for the file never reads half of it."""
    text = "".join(f"{address.rpartition(':')[2]}\n" for address in addresses)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
