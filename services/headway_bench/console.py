"""What an open console costs the scheduler while it routes (`headway bench console`)."""

import asyncio
import contextlib
import json
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import aiohttp

from headway_bench.figures import BenchError, Json
from headway_bench.processes import ADMIN_TOKEN, ROUTER_TOKEN, cpu_s, run_json, scheduler_process
from headway_bench.telemetry import TelemetrySettings, agents_process

__all__ = ["ConsoleSettings", "measure_console"]

_CALLERS: Final = 32
_SETTLE_S: Final = 2.0
_PAGE: Final = "/console/fleet"
_PARTS: Final = (("glance", 1), ("endpoints", 3))
"""Parts of the page that its script loads anew, and every how many events."""


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """A fleet that streams, `rate` Routes a second, and one open Fleet page in every other of `rounds` pairs."""

    nodes: int = 125
    devices: int = 8
    rate: float = 500.0
    rounds: int = 3
    seconds: float = 6.0


async def measure_console(settings: ConsoleSettings) -> Json:
    """The scheduler's CPU a request with and without the page, medians of rounds in turns."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
        pid, port = await stack.enter_async_context(scheduler_process(directory, auth=True))
        http = f"http://127.0.0.1:{json.loads((directory / 'ports.json').read_text())['http']}"
        lasts = 2 * settings.rounds * (settings.seconds + _SETTLE_S) + 30.0
        fleet = TelemetrySettings(settings.nodes, settings.devices, settings.devices, 1.0)
        await stack.enter_async_context(agents_process(port, fleet, lasts))
        await asyncio.sleep(_SETTLE_S)
        closed, opened = [], []
        for _ in range(settings.rounds):
            closed.append(await _cpu_us(pid, port, settings))
            async with _looking(http):
                opened.append(await _cpu_us(pid, port, settings))
    without, with_it = statistics.median(closed), statistics.median(opened)
    return {
        "settings": asdict(settings),
        "closed_us": round(without, 1),
        "open_us": round(with_it, 1),
        "added_percent": round(100 * (with_it / without - 1), 2),
    }


async def _cpu_us(pid: int, port: int, settings: ConsoleSettings) -> float:
    """Of one request, all that the scheduler does meanwhile included."""
    before = cpu_s(pid)
    routed = await run_json(
        "headway_bench.router_load",
        *(port, "unary", _CALLERS, settings.seconds, 2048, ROUTER_TOKEN, settings.rate, "text"),
    )
    if routed["failed"]:
        raise BenchError(f"of {routed['requests']} requests {routed['failed']} failed")
    return (cpu_s(pid) - before) / float(routed["requests"]) * 1e6


@contextlib.asynccontextmanager
async def _looking(http: str) -> AsyncIterator[None]:
    """Someone has the Fleet page open: asks for what its script would."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        async with session.post(f"{http}/console/sign-in", data={"token": ADMIN_TOKEN}) as answer:
            if answer.status != 200:  # it led to the page itself
                raise BenchError(f"the console answered {answer.status}")
        watching = asyncio.create_task(_watch(session, http))
        try:
            yield
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(session: aiohttp.ClientSession, http: str) -> None:
    ticks = 0
    async with session.get(f"{http}/console/live", timeout=aiohttp.ClientTimeout()) as stream:
        while line := await stream.content.readuntil(b"\n\n"):
            if not line.startswith(b"event: fleet"):
                continue
            ticks += 1
            for part, every in _PARTS:
                if ticks % every == 0:
                    async with session.get(http + _PAGE, headers={"X-Headway-Part": part}) as answer:
                        await answer.read()
