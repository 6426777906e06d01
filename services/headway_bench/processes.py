"""The processes that benchmarks start, and end whatever happens."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from headway.telemetry.v1 import telemetry_pb2, telemetry_pb2_grpc

from headway_bench.figures import BenchError, Json

__all__ = [
    "ADMIN_TOKEN",
    "PATIENCE_S",
    "ROUTER_TOKEN",
    "appears",
    "calm_collector",
    "cpu_s",
    "ended",
    "fleet_of",
    "http_port",
    "python",
    "run_json",
    "scheduler_process",
    "serving",
]

PATIENCE_S: Final = 30.0
_PORTS: Final = "ports.json"
ROUTER_TOKEN: Final = "hw_router_of_a_benchmark"  # noqa: S105  of schedulers that live for seconds, on loopback
ADMIN_TOKEN: Final = "hw_admin_of_a_benchmark"  # noqa: S105


async def python(module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    """Start `python -m MODULE ARGUMENTS…` with this process's packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.pop("env", {})}
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, env=environment, **options)


async def run_json(module: str, *arguments: object) -> Json:
    """Run it to its end; the JSON that it prints. Raises BenchError where it fails."""
    process = await python(module, *map(str, arguments), stdout=asyncio.subprocess.PIPE)
    async with ended(process):
        out, _ = await process.communicate()
    if process.returncode:
        raise BenchError(f"{module} ended with status {process.returncode}")
    found: Json = json.loads(out)
    return found


@contextlib.asynccontextmanager
async def ended(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Whatever happens, the process is gone afterwards."""
    try:
        yield
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def serving(module: str) -> AsyncIterator[tuple[int, int]]:
    """A server of ours that prints its port: its process id, and that port."""
    process = await python(module, stdout=asyncio.subprocess.PIPE)
    async with ended(process):
        if process.stdout is None:
            raise BenchError(f"{module} has no output")
        line = await process.stdout.readline()
        if not line:
            raise BenchError(f"{module} did not start")
        yield process.pid, int(line)


@contextlib.asynccontextmanager
async def scheduler_process(directory: Path, *, auth: bool = False) -> AsyncIterator[tuple[int, int]]:
    """A scheduler with a Postgres of its own: its process id and gRPC port.

    `auth`: it asks for credentials, and has those of ROUTER_TOKEN and ADMIN_TOKEN.
    """
    ports = directory / _PORTS
    environment = {
        "HEADWAY_DATA_DIR": str(directory / "data"),
        "HEADWAY_SCHEDULER_LISTEN": "127.0.0.1:0",
        "HEADWAY_SCHEDULER_LISTEN_HTTP": "127.0.0.1:0",
        "HEADWAY_SCHEDULER_PORT_FILE": str(ports),
        "HEADWAY_SCHEDULER_LOG_LEVEL": "warning",
        "HEADWAY_SCHEDULER_DRAIN_TIMEOUT_S": "0",
    }
    if auth:
        bootstrap = directory / "bootstrap.toml"
        bootstrap.write_text(
            _credential(directory, "admin", ADMIN_TOKEN) + _credential(directory, "router", ROUTER_TOKEN)
        )
        environment["HEADWAY_SCHEDULER_BOOTSTRAP"] = str(bootstrap)
        environment["HEADWAY_SCHEDULER_REQUIRE_CREDENTIALS"] = "true"
    process = await python("headway_scheduler.main", env=environment)
    async with ended(process):
        await appears(ports, process)
        yield process.pid, int(json.loads(ports.read_text())["grpc"])


def http_port(directory: Path) -> int:
    """That of the scheduler which `scheduler_process` started in this folder."""
    return int(json.loads((directory / _PORTS).read_text())["http"])


def _credential(directory: Path, role: str, token: str) -> str:
    """An entry of the bootstrap file, called as its role."""
    file = directory / f"{role}.token"
    file.write_text(token)
    file.chmod(0o600)
    tenants = 'tenants = ["default"]\n' if role == "router" else ""
    return f'[[credentials]]\nid = "{role}"\nrole = "{role}"\n{tenants}token_file = "{file}"\n\n'


@contextlib.asynccontextmanager
async def fleet_of(port: int, addresses: list[str], token: str = "") -> AsyncIterator[None]:
    """An agent's stream that announces the engines, and keeps saying that they are well."""
    engines = [
        telemetry_pb2.EngineEndpoint(address=address, models=["m"], ready=True, engine="vllm") for address in addresses
    ]
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = telemetry_pb2_grpc.TelemetryStub(channel).Connect(metadata=metadata)
        hello = telemetry_pb2.Hello(node="bench", instance_id="1", endpoints=engines)
        await call.write(telemetry_pb2.ConnectRequest(hello=hello))
        await call.read()
        telling = asyncio.create_task(_tell(call, addresses))
        try:
            yield
        finally:
            telling.cancel()
            call.cancel()


async def _tell(call: Any, addresses: list[str]) -> None:
    sequence = 0
    while True:
        sequence += 1
        engines = [telemetry_pb2.EngineSample(address=address, ready=True) for address in addresses]
        await call.write(telemetry_pb2.ConnectRequest(sample=telemetry_pb2.Sample(sequence=sequence, engines=engines)))
        await asyncio.sleep(1.0)


async def appears(path: Path, process: asyncio.subprocess.Process) -> None:
    """Wait until there is something in the file. Raises BenchError where the process ends before."""
    async with asyncio.timeout(PATIENCE_S):
        while not _text(path):
            if process.returncode is not None:
                raise BenchError(f"a process ended with status {process.returncode} before it was ready")
            await asyncio.sleep(0.05)


def cpu_s(pid: int) -> float:
    """The CPU seconds of a process so far, by its own accounting."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def calm_collector() -> None:
    """Have this process's garbage collector leave alone what there is: its pauses would be measured as another's."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
