"""What watching an idle fleet costs: real agents, their engines' metrics, one scheduler (`headway bench idle`)."""

import asyncio
import json
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
import psutil
from headway.fleet.v1 import fleet_pb2, fleet_pb2_grpc

from headway_bench.figures import BenchError, Json
from headway_bench.processes import PATIENCE_S, cpu_s, ended, python, scheduler_process, serving

__all__ = ["IdleSettings", "measure_idle"]

_SETTLE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class IdleSettings:
    """`endpoints` idle vLLM engines, `per_agent` of them on each host; samples every `interval_s`."""

    endpoints: int = 100
    per_agent: int = 8
    interval_s: float = 1.0
    seconds: float = 10.0


async def measure_idle(settings: IdleSettings) -> Json:
    """CPU cores and memory of the scheduler and of all agents together, while nothing is asked of the engines."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
        _, engines_port = await stack.enter_async_context(serving("headway_bench.idle_engine"))
        addresses = [f"127.0.2.{number + 1}:{engines_port}" for number in range(settings.endpoints)]
        scheduler, port = await stack.enter_async_context(scheduler_process(directory))
        agents = []
        for number, start in enumerate(range(0, len(addresses), settings.per_agent)):
            config = directory / f"agent-{number}.json"
            config.write_text(
                json.dumps(_agent(f"n{number}", port, addresses[start : start + settings.per_agent], settings))
            )
            agent = await python("headway_agent.main", "--config", str(config), stderr=asyncio.subprocess.DEVNULL)
            await stack.enter_async_context(ended(agent))
            agents.append(agent.pid)
        await _all_healthy(port, settings.endpoints)
        await asyncio.sleep(_SETTLE_S)
        before = cpu_s(scheduler), sum(map(cpu_s, agents))
        await asyncio.sleep(settings.seconds)
        spent = cpu_s(scheduler) - before[0], sum(map(cpu_s, agents)) - before[1]
        scheduler_cores, agents_cores = (seconds / settings.seconds for seconds in spent)
        return {
            "settings": asdict(settings),
            "agents": len(agents),
            "cpu_cores": round(scheduler_cores + agents_cores, 4),
            "scheduler_cores": round(scheduler_cores, 4),
            "agents_cores": round(agents_cores, 4),
            "agent_rss_mb": round(sum(map(_rss_mb, agents)) / len(agents), 1),
            "scheduler_rss_mb": round(_rss_mb(scheduler), 1),
        }


def _agent(node: str, port: int, addresses: list[str], settings: IdleSettings) -> Json:
    return {
        "node": node,
        "schedulers": [f"127.0.0.1:{port}"],
        "interval_s": settings.interval_s,
        "devices": [{"kind": "simulated", "count": len(addresses)}],
        "engines": [
            {"address": address, "engine": "vllm", "device_indexes": [index]} for index, address in enumerate(addresses)
        ],
    }


async def _all_healthy(port: int, endpoints: int) -> None:
    healthy = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        fleet = fleet_pb2_grpc.FleetStub(channel)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while healthy < endpoints:
                    await asyncio.sleep(0.1)
                    healthy = (await fleet.GetStatus(fleet_pb2.GetStatusRequest())).endpoints_healthy
        except TimeoutError:
            raise BenchError(f"{healthy} of {endpoints} endpoints became healthy") from None


def _rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6
