"""A scheduler that is killed, or stopped, behind planes that fail open and planes that fail closed."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import grpc
import pytest
from fakes.envoy import (
    bootstrap,
    ext_proc_filter,
    grpc_cluster,
    http_listener,
    override_host,
    route_to,
    running_envoy,
    static_cluster,
)
from fakes.openai_engine import OpenAIEngine
from fakes.scheduler import Agent
from fakes.waiting import eventually
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway.telemetry.v1 import telemetry_pb2_grpc

ROOT = Path(__file__).parents[3]
PATHS = [ROOT / "services", ROOT / "protos/gen"]
OPEN = {
    "request": "BUFFERED",
    "response": "STREAMED",
    "message_timeout": "0.5s",
    "failure_mode_allow": True,
}
CLOSED = {
    "request": "FULL_DUPLEX_STREAMED",
    "response": "FULL_DUPLEX_STREAMED",
    "status_on_error": {"code": "ServiceUnavailable"},
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@contextlib.asynccontextmanager
async def scheduler_process(database_url, directory):
    """A scheduler of its own, and the port of its gRPC."""
    ports = directory / "ports"
    settings = {"LISTEN": "127.0.0.1:0", "LISTEN_HTTP": "127.0.0.1:0", "PORT_FILE": str(ports), "LOG_LEVEL": "warning"}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "HEADWAY_DATABASE_URL": database_url,
        **{f"HEADWAY_SCHEDULER_{key}": value for key, value in settings.items()},
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "headway_scheduler.main", env=environment)
    try:
        await eventually(lambda: ports.exists() or process.returncode is not None, 30)
        yield process, json.loads(ports.read_text())["grpc"]
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def planes(database_url, directory, pickers):
    """A scheduler process, two engines, and one Envoy with a listener for each picker."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await OpenAIEngine().start() for _ in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        addresses = [engine.address for engine in engines]
        process, port = await stack.enter_async_context(scheduler_process(database_url, directory))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        agent = Agent(telemetry_pb2_grpc.TelemetryStub(channel), "n")
        await agent.hello(*[tpb.EngineEndpoint(address=address, models=["m"], ready=True) for address in addresses])
        await agent.welcomed()
        listeners = [
            http_listener([route_to("engines")], [ext_proc_filter("headway", **picker)], name=name)
            for name, picker in pickers.items()
        ]
        cluster = static_cluster("engines", addresses, load_balancing_policy=override_host())
        config = bootstrap(listeners, [cluster, grpc_cluster("headway", f"127.0.0.1:{port}", keepalive_s=1)])
        envoy = await stack.enter_async_context(running_envoy(config, directory / "envoy"))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)))

        async def post(name):
            url = f"http://127.0.0.1:{envoy.ports[name]}/v1/chat/completions"
            async with http.post(url, json=BODY) as answer:
                await answer.read()
                return answer.status

        try:
            yield process, engines, envoy, post
        finally:
            agent.reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await agent.reader


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_one_plane_goes_on_alone_and_the_other_refuses(database_url, tmp_path, how):
    async with planes(database_url, tmp_path, {"open": OPEN, "closed": CLOSED}) as (scheduler, engines, envoy, post):
        assert [await post("open"), await post("closed")] == [200, 200]
        if how == "killed":
            scheduler.kill()
            await scheduler.wait()
        else:
            scheduler.send_signal(signal.SIGSTOP)
        assert [await post("open") for _ in range(4)] == [200] * 4
        assert sum(len(engine.seen) for engine in engines) == 6
        # Not at once where it is stopped: Envoy must find that the connection is dead.
        assert await post("closed") == 503
        assert sum(len(engine.seen) for engine in engines) == 6
        assert await envoy.stat("http.open.ext_proc.failure_mode_allowed") == 4
        if how == "stopped":
            scheduler.send_signal(signal.SIGCONT)

            async def back():
                return await post("closed") == 200

            await eventually(back)
