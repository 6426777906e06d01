"""A real scheduler in a thread of its own, an agent's stream to it, and the command line run against it."""

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import structlog
from headway.telemetry.v1 import telemetry_pb2 as telemetry
from headway.telemetry.v1.telemetry_pb2_grpc import TelemetryStub
from headway_cli.app import build
from headway_scheduler.app import Scheduler
from headway_scheduler.config import Config
from headway_scheduler.http import HttpServer
from headway_scheduler.server import GrpcServer
from headway_scheduler.store.postgres import PostgresStore
from typer.testing import CliRunner, Result

_APP = build()


class Headway:
    """`headway …` against one scheduler."""

    def __init__(self, address: str = "127.0.0.1:1") -> None:
        self.address = address

    def run(self, *arguments: str, stdin: str = "", code: int = 0, **env: str) -> Result:
        """Run a command that must end with this exit code."""
        clean = {"HEADWAY_SCHEDULER": self.address, "HEADWAY_TOKEN": "", "HEADWAY_CA": "", **env}
        result = CliRunner().invoke(_APP, list(arguments), input=stdin, env=clean)
        assert result.exit_code == code, (arguments, result.exit_code, result.output, result.exception)
        return result

    def text(self, *arguments: str, **options: Any) -> str:
        """What a command that succeeds prints."""
        return self.run(*arguments, **options).stdout

    def json(self, *arguments: str, **options: Any) -> Any:
        """The same, as JSON."""
        return json.loads(self.text(*arguments, "-o", "json", **options))

    def error(self, *arguments: str, code: int = 1, **options: Any) -> str:
        """What a command that fails says on stderr; it prints no traceback and nothing else."""
        result = self.run(*arguments, code=code, **options)
        assert "Traceback" not in result.output
        return result.stderr


class RunningScheduler:
    """A scheduler and its loop."""

    def __init__(self, address: str, http: str, scheduler: Scheduler, loop: asyncio.AbstractEventLoop) -> None:
        self.address, self.http, self.scheduler = address, http, scheduler
        self._loop = loop

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the scheduler's loop."""

        async def inside() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(20)


@contextmanager
def running_scheduler(database_url: str, **settings: Any) -> Iterator[RunningScheduler]:
    """A scheduler on this database, on a free port, in a thread."""
    config = Config(
        name="test", listen="127.0.0.1:0", listen_http="127.0.0.1:0", HEADWAY_DATABASE_URL=database_url, **settings
    )
    started: queue.Queue[Any] = queue.Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        store = PostgresStore(database_url)
        scheduler = Scheduler(config, store)
        server, http = GrpcServer(scheduler, config), HttpServer(scheduler)
        loop = asyncio.get_running_loop()
        try:
            await scheduler.start()
            await server.start()
            await http.start(config.listen_http)
            running = RunningScheduler(f"127.0.0.1:{server.port}", f"127.0.0.1:{http.port}", scheduler, loop)
            started.put((running, lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()
        finally:
            await server.stop(0)
            await http.stop()
            await scheduler.stop()
            await store.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            started.put(error)

    # The command line's runner takes over stdout and stderr; the scheduler's logs shall not get into answers.
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(file=sys.stderr))
    thread = threading.Thread(target=run, name="scheduler")
    thread.start()
    outcome = started.get(timeout=60)
    if isinstance(outcome, BaseException):
        raise outcome
    running, stop = outcome
    try:
        yield running
    finally:
        stop()
        thread.join(30)
        assert not thread.is_alive()
        structlog.configure(**before)


@contextmanager
def connected_agent(
    address: str,
    node: str,
    engines: Sequence[str],
    model: str = "llama",
    metadata: Any = (),
    change_hello: Callable[[telemetry.Hello], object] = lambda _: None,
    change_sample: Callable[[telemetry.Sample], object] = lambda _: None,
) -> Iterator[None]:
    """An agent that announces one GPU and one engine for each address, and has sent a sample of them."""
    outbox: queue.Queue[telemetry.ConnectRequest | None] = queue.Queue()
    hello, sample = _hello(node, engines, model), _sample(node, engines)
    change_hello(hello)
    change_sample(sample)
    outbox.put(telemetry.ConnectRequest(hello=hello))
    outbox.put(telemetry.ConnectRequest(sample=sample))
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        answers = TelemetryStub(channel).Connect(iter(outbox.get, None), metadata=metadata)
        for answer in answers:
            if answer.WhichOneof("message") == "ack":
                break
        try:
            yield
        finally:
            outbox.put(None)
            for _ in answers:
                pass


def _hello(node: str, engines: Sequence[str], model: str) -> telemetry.Hello:
    hello = telemetry.Hello(
        agent_version="1.2.3", node=node, boot_id="boot", instance_id="instance", labels={"tier": "gold"}
    )
    hello.clock.GetCurrentTime()
    for index, address in enumerate(engines):
        hello.devices.add(
            uuid=f"GPU-{node}-{index}",
            kind=telemetry.DEVICE_KIND_GPU,
            product="NVIDIA A100-SXM4-40GB",
            memory_total_bytes=telemetry.Measurement(value=40e9),
        )
        hello.endpoints.add(
            address=address,
            engine="vllm",
            engine_version="0.11.0",
            role=telemetry.ENGINE_ROLE_BOTH,
            models=[model],
            device_uuids=[f"GPU-{node}-{index}"],
            kv_capacity_tokens=telemetry.Measurement(value=141_000),
            hardware="a100-40g-8b",
            ready=True,
        )
    return hello


def _sample(node: str, engines: Sequence[str]) -> telemetry.Sample:
    def measured(value: float) -> telemetry.Measurement:
        return telemetry.Measurement(value=value)

    sample = telemetry.Sample(sequence=1)
    sample.taken.GetCurrentTime()
    for index, address in enumerate(engines):
        sample.devices.add(
            uuid=f"GPU-{node}-{index}",
            memory_used_bytes=measured(36e9),
            utilization=measured(0.4),
            temperature_c=measured(61.0),
            power_w=measured(240.0),
        )
        sample.engines.add(address=address, running=measured(0), waiting=measured(0), kv_use=measured(0.25), ready=True)
    return sample
