"""A fleet of agents on one scheduler (`headway bench telemetry`), and Routes beside it (`headway bench mixed`)."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
import psutil
from google.protobuf.field_mask_pb2 import FieldMask
from headway.admin.v1 import admin_pb2, admin_pb2_grpc

from headway_bench.figures import BenchError, Json
from headway_bench.processes import (
    ADMIN_TOKEN,
    ROUTER_TOKEN,
    cpu_s,
    ended,
    python,
    run_json,
    scheduler_process,
    serving,
)

__all__ = ["MixedSettings", "TelemetrySettings", "agents_process", "measure_mixed", "measure_telemetry"]

_SETTLE_S: Final = 2.0
_WRITE_S: Final = 0.5
_UNTIL_TOLD_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """So many agents, each with so many devices and engines on them, that send `hz` samples a second."""

    nodes: int = 1250
    devices: int = 8
    engines: int = 8
    hz: float = 1.0
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class MixedSettings:
    """Such a fleet, and `rate` Routes a second meanwhile: on one stream (`stream`), or by calls (`unary`)."""

    nodes: int = 1250
    devices: int = 8
    engines: int = 8
    rate: float = 1000.0
    mode: str = "stream"
    prompt_bytes: int = 2048
    seconds: float = 10.0


async def measure_telemetry(settings: TelemetrySettings) -> Json:
    """Cores and memory of the scheduler, and how long samples take to be acknowledged."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
        pid, port = await stack.enter_async_context(scheduler_process(directory, auth=True))
        fleet = await stack.enter_async_context(agents_process(port, settings, settings.seconds + _SETTLE_S))
        await asyncio.sleep(_SETTLE_S)
        before, seconds = cpu_s(pid), settings.seconds * 0.9  # the agents stop by themselves
        await asyncio.sleep(seconds)
        cores = (cpu_s(pid) - before) / seconds
        memory = psutil.Process(pid).memory_info().rss
        found = await _result(fleet)
    wanted = settings.nodes * settings.hz * (settings.seconds + _SETTLE_S)
    return {
        "settings": asdict(settings),
        "cpu_cores": round(cores, 3),
        "rss_mb": round(memory / 1e6, 1),
        "lag_p99_ms": round(found["lag_p99_ms"], 2),
        "samples_of_wanted": round(found["samples"] / wanted, 3),
    }


async def measure_mixed(settings: MixedSettings) -> Json:
    """Latency of Routes at a fixed rate, while a fleet streams and an admin writes twice a second.

    `echo`: of a bare gRPC echo that the same process asks meanwhile, and `load`: how late requests and samples were
    sent. What is there is not the scheduler's.
    """
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
        pid, port = await stack.enter_async_context(scheduler_process(directory, auth=True))
        _, echo_port = await stack.enter_async_context(serving("headway_bench.echo"))
        fleet_settings = TelemetrySettings(settings.nodes, settings.devices, settings.engines, 1.0)
        fleet = await stack.enter_async_context(agents_process(port, fleet_settings, _UNTIL_TOLD_S))
        writing = asyncio.create_task(_write(port))
        stack.callback(writing.cancel)
        await asyncio.sleep(_SETTLE_S)
        before = cpu_s(pid)
        routed = await run_json(
            "headway_bench.router_load",
            *(port, settings.mode, 0, settings.seconds, settings.prompt_bytes, ROUTER_TOKEN, settings.rate, "text"),
            echo_port,
        )
        cores = (cpu_s(pid) - before) / settings.seconds
        if writing.done():
            writing.result()
        fleet.terminate()  # not before: agents that go away all at once are another load than this
        agents = await _result(fleet)
    if routed["failed"]:
        raise BenchError(f"of {routed['requests']} requests {routed['failed']} failed")
    return {
        "settings": asdict(settings),
        "route": _latency(routed)
        | {"routes_a_message": round(routed.get("routes_a_message", 1.0), 2), "cpu_cores": round(cores, 3)},
        "echo": _latency(routed["echo"]),
        "load": {
            "route_late_p99_us": round(routed["late_p99_us"], 1),
            "sample_late_p99_us": round(agents["late_p99_ms"] * 1e3, 1),
            "agents_cores": round(agents["cpu_cores"], 3),
            "router_cores": round(routed["cpu_cores"], 3),
        },
        "telemetry": {
            "lag_p99_ms": round(agents["lag_p99_ms"], 2),
            "samples_of_wanted": round(agents["samples"] / (settings.nodes * agents["seconds"]), 3),
        },
    }


def _latency(found: Json) -> Json:
    return {name: round(found[name], 1) for name in ("requests_per_s", "p50_us", "p99_us")}


@contextlib.asynccontextmanager
async def agents_process(
    port: int, settings: TelemetrySettings, seconds: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The fleet's process, once all of it is connected."""
    arguments = (port, settings.nodes, settings.devices, settings.engines, settings.hz, seconds, ADMIN_TOKEN)
    process = await python("headway_bench.agents", *map(str, arguments), stdout=asyncio.subprocess.PIPE)
    async with ended(process):
        if process.stdout is None or await process.stdout.readline() != b"ready\n":
            raise BenchError("the agents did not connect")
        yield process


async def _result(fleet: asyncio.subprocess.Process) -> Json:
    out, _ = await fleet.communicate()
    found: Json = json.loads(out)
    return found


async def _write(port: int) -> None:
    """An admin who changes a tenant again and again."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        turn = 0
        while True:
            turn += 1
            tenant = admin_pb2.Tenant(name="tenants/default", display_name=f"turn {turn}")
            request = admin_pb2.UpdateTenantRequest(
                tenant=tenant, update_mask=FieldMask(paths=["display_name"]), request_id=f"bench-{turn}"
            )
            await stub.UpdateTenant(request, metadata=(("authorization", f"Bearer {ADMIN_TOKEN}"),))
            await asyncio.sleep(_WRITE_S)
