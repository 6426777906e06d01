"""The agent, put together: sources and readers → collector → one outbox and stream for each scheduler."""

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiohttp
import psutil
import structlog
from google.protobuf.json_format import MessageToDict

from headway_agent import convert
from headway_agent.collector import Collector
from headway_agent.config import AgentConfig, EngineSettings
from headway_agent.devices.base import DeviceContext, LoadBoard
from headway_agent.devices.catalog import device_source
from headway_agent.engines.base import EngineContext, EngineReader
from headway_agent.engines.catalog import ENGINES
from headway_agent.engines.probe import Prober
from headway_agent.exposition import AgentMetrics, MetricsServer
from headway_agent.inventory import NodeIdentity
from headway_agent.kv.feeds import KvFeeds
from headway_agent.outbox import Outbox
from headway_agent.stream import Backoff, Dialer, Pace, SchedulerStream

log = structlog.get_logger(__name__)

_GOODBYE_S = 3.0
_LOOPBACK = ("127.", "localhost:", "[::1]:")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def configure_logs(log_format: str) -> None:
    """Constant event names, data in keys, to stderr."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log_format == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def identity(config: AgentConfig, instance_id: str) -> NodeIdentity:
    """Who this agent is, on this boot of this host."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else f"{psutil.boot_time():.0f}"
    try:
        agent_version = version("headway")
    except PackageNotFoundError:
        agent_version = "0+source"
    return NodeIdentity(config.node, agent_version, boot_id, instance_id, config.labels)


@contextlib.asynccontextmanager
async def collector_for(config: AgentConfig) -> AsyncIterator[Collector]:
    """A collector with everything it reads, started; all of it is closed at the end."""
    loads = LoadBoard()
    devices = DeviceContext(config.node, time.monotonic, time.time, loads)
    async with aiohttp.ClientSession(trust_env=False) as session:
        engines = EngineContext(session, time.monotonic)

        def reader_for(settings: EngineSettings) -> EngineReader:
            return ENGINES[settings.engine](settings, engines)

        collector = Collector(
            sources=[device_source(d, devices) for d in config.devices],
            engines=config.engines,
            reader_for=reader_for,
            wall=time.time,
            clock=time.monotonic,
            loads=loads,
            prober=Prober(config.probe, session) if config.probe.ports else None,
        )
        try:
            await collector.start()
            yield collector
        finally:
            await collector.close()


@dataclass(slots=True)
class Agent:
    """Samples at the pace that the schedulers ask for, until `stop`."""

    config: AgentConfig
    backoff: Backoff = field(default_factory=Backoff)
    clock: Callable[[], float] = time.monotonic
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    pace: Pace = field(init=False)
    streams: list[SchedulerStream] = field(init=False)
    metrics: AgentMetrics = field(init=False)
    metrics_port: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """One stream for each scheduler."""
        self.pace = Pace(self.config.interval_s)
        who = identity(self.config, self.instance_id)
        dialer = Dialer.of(self.config)
        self.streams = [
            SchedulerStream(
                scheduler,
                who,
                dialer,
                self.pace,
                Outbox(),
                self.clock,
                time.time,
                random.random,
                self.backoff,
            )
            for scheduler in self.config.schedulers
        ]
        self.metrics = AgentMetrics(self.streams)

    async def run(self) -> None:
        """Collect and stream until stopped, then say goodbye."""
        async with self._serving_metrics(), collector_for(self.config) as collector:
            feeds = KvFeeds(
                self.config.engines, [stream.outbox for stream in self.streams], self.config.kv_events_interval_s
            )
            following = asyncio.create_task(feeds.run())
            sampling = asyncio.create_task(self._sample(collector, feeds))
            streaming = [asyncio.create_task(stream.run()) for stream in self.streams]
            log.info("agent_started", node=self.config.node, schedulers=self.config.schedulers)
            self._warn_of_plain_text()
            try:
                # None of them ends before a stop, unless by a defect: then the agent ends, and says why.
                await asyncio.wait({sampling, following, *streaming}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sampling.cancel()
                following.cancel()
                await self._say_goodbye(streaming)
                await asyncio.gather(following, return_exceptions=True)
            await asyncio.gather(*(task for task in (sampling, following, *streaming) if not task.cancelled()))
        log.info("agent_stopped", node=self.config.node)

    @contextlib.asynccontextmanager
    async def _serving_metrics(self) -> AsyncIterator[None]:
        if not self.config.metrics_listen:
            yield
            return
        server = MetricsServer(self.metrics)
        try:
            await server.start(self.config.metrics_listen)
            self.metrics_port = server.port
            yield
        finally:
            await server.stop()

    def _warn_of_plain_text(self) -> None:
        """A token that crosses a network in the clear can be taken on its way."""
        far = [s for s in self.config.schedulers if not s.startswith(_LOOPBACK)]
        if far and self.config.tls is None and (self.config.token or self.config.token_file):
            log.warning("token_sent_in_plain_text", schedulers=far)

    def stop(self) -> None:
        """End `run`, after a goodbye to every scheduler."""
        self._stopping.set()

    async def _sample(self, collector: Collector, feeds: KvFeeds) -> None:
        """One round each interval; a round that took longer makes no later one hurry."""
        due = self.clock()
        while not self._stopping.is_set():
            with self.metrics.round_seconds.time():
                collected = await collector.collect(self.pace.interval_s)
            self.metrics.latest = collected
            feeds.observe(collected.inventory)
            for stream in self.streams:
                stream.outbox.offer(collected)
            self._show_health()
            due = max(due + self.pace.interval_s, self.clock())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), due - self.clock())

    def _show_health(self) -> None:
        """Sampling and connected: touch the health file."""
        if self.config.health_file is not None and any(stream.connected for stream in self.streams):
            try:
                self.config.health_file.touch()
            except OSError as error:
                log.warning("health_file_not_touched", path=str(self.config.health_file), problem=error.strerror)

    async def _say_goodbye(self, tasks: list[asyncio.Task[None]]) -> None:
        for stream, task in zip(self.streams, tasks, strict=True):
            stream.stop()
            if not stream.connected:
                task.cancel()  # nobody to say goodbye to
        _, pending = await asyncio.wait(tasks, timeout=_GOODBYE_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def serve(config: AgentConfig) -> None:
    """Run an agent until SIGTERM or SIGINT.

    On asyncio's own loop, not uvloop's: that one starts processes with a plain fork, which runs gRPC's fork
    handlers and now and then leaves the agent or its NVML process hanging. asyncio's uses vfork, and an agent
    is no hot path.
    """
    agent = Agent(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    await agent.run()


async def dump(config: AgentConfig) -> str:
    """A Hello and a sample as JSON: what a scheduler would be told. Looks twice, for values that need it."""
    async with collector_for(config) as collector:
        await collector.collect(max(config.interval_s, 30.0))
        await asyncio.sleep(config.interval_s)
        collected = await collector.collect(max(config.interval_s, 30.0))
    now_s = time.time()
    hello = convert.hello(identity(config, "dump"), collected.inventory, now_s).hello
    return json.dumps(
        {
            "hello": MessageToDict(hello, preserving_proto_field_name=True),
            "sample": MessageToDict(convert.sample(collected.sample).sample, preserving_proto_field_name=True),
        },
        indent=2,
    )
