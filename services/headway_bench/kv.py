"""KV events into a scheduler, and Routes of token ids beside them: `headway bench kv`."""

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from headway_bench.figures import BenchError, Json
from headway_bench.processes import ADMIN_TOKEN, ROUTER_TOKEN, cpu_s, ended, python, run_json, scheduler_process

__all__ = ["KvSettings", "measure_kv"]

_SETTLE_S: Final = 1.0
_CALLERS: Final = 8


@dataclass(frozen=True, slots=True)
class KvSettings:
    """`blocks_per_s`: engine blocks of 16 tokens stored by all engines together, and as many evicted.

    `rate`: Routes a second meanwhile. `seconds`: of all rounds, with and without events, together.
    """

    blocks_per_s: float = 30_000.0
    endpoints: int = 100
    nodes: int = 10
    rate: float = 100.0
    prompt_bytes: int = 2048
    seconds: float = 20.0
    rounds: int = 5


async def measure_kv(settings: KvSettings) -> Json:
    """Rounds without and with events in turns, since others use this machine too; medians of each."""
    quiet, fed = [], []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        async with scheduler_process(Path(directory), auth=True) as (pid, port):
            for _ in range(settings.rounds):
                quiet.append(await _round(pid, port, settings, 0.0))
                fed.append(await _round(pid, port, settings, settings.blocks_per_s))
    found = {name: _medians(rounds) for name, rounds in (("without_events", quiet), ("with_events", fed))}
    ratios = [beside["p99_us"] / alone["p99_us"] for alone, beside in zip(quiet, fed, strict=True)]
    return {
        "settings": asdict(settings),
        **found,
        "event_cores": round(found["with_events"]["cpu_cores"] - found["without_events"]["cpu_cores"], 4),
        "p50_ratio": round(found["with_events"]["p50_us"] / found["without_events"]["p50_us"], 3),
        "p99_ratio": round(statistics.median(ratios), 3),
        "p99_ratios": [round(each, 2) for each in ratios],
    }


async def _round(pid: int, port: int, settings: KvSettings, blocks_per_s: float) -> Json:
    seconds = settings.seconds / settings.rounds / 2
    async with _agents(port, settings, blocks_per_s, seconds + 2 * _SETTLE_S):
        await asyncio.sleep(_SETTLE_S)
        before = cpu_s(pid)
        load = (port, "unary", _CALLERS, seconds, settings.prompt_bytes, ROUTER_TOKEN, settings.rate, "tokens")
        routed = await run_json("headway_bench.router_load", *load)
        cores = (cpu_s(pid) - before) / seconds
    if routed["failed"]:
        raise BenchError(f"of {routed['requests']} requests {routed['failed']} failed")
    return {"p50_us": routed["p50_us"], "p99_us": routed["p99_us"], "cpu_cores": cores}


def _medians(rounds: list[Json]) -> Json:
    return {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}


@contextlib.asynccontextmanager
async def _agents(port: int, settings: KvSettings, blocks_per_s: float, seconds: float) -> AsyncIterator[None]:
    arguments = (port, settings.nodes, settings.endpoints, blocks_per_s, seconds, ADMIN_TOKEN)
    process = await python("headway_bench.kv_agents", *map(str, arguments), stdout=asyncio.subprocess.PIPE)
    async with ended(process):
        if process.stdout is None or await process.stdout.readline() != b"ready\n":
            raise BenchError("the agents did not connect")
        yield
