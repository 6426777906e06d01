"""What a routed request costs over the wire, beside a bare echo of the same messages (`headway bench route`)."""

import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from headway.admin.v1 import admin_pb2, admin_pb2_grpc

from headway_bench.figures import BenchError, Json
from headway_bench.processes import (
    ADMIN_TOKEN,
    ROUTER_TOKEN,
    cpu_s,
    fleet_of,
    http_port,
    run_json,
    scheduler_process,
    serving,
)

__all__ = ["RouteSettings", "addresses_of", "load_of", "measure_route", "use_strategy"]

_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """How it is measured. `seconds`: of all rounds of one server together.

    `mode` is how requests come to the scheduler; to the echo they come by gRPC: by `connect`, too, as unary calls.
    """

    mode: str = "unary"
    endpoints: int = 100
    prompt_bytes: int = 2048
    concurrency: int = 64
    strategy: str = "adaptive"
    auth: bool = True
    seconds: float = 6.0


async def measure_route(settings: RouteSettings) -> Json:
    """Both servers in turns, so that what else runs here troubles both alike; medians of the rounds."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
        scheduler = await stack.enter_async_context(scheduler_process(directory, auth=settings.auth))
        admin = ADMIN_TOKEN if settings.auth else ""
        await use_strategy(scheduler[1], settings.strategy, admin)
        await stack.enter_async_context(fleet_of(scheduler[1], addresses_of(settings.endpoints), admin))
        echo = await stack.enter_async_context(serving("headway_bench.echo"))
        echoed_by = settings
        if settings.mode == "connect":
            scheduler, echoed_by = (scheduler[0], http_port(directory)), replace(settings, mode="unary")
        ours, bare, alone, bare_alone = [], [], [], []
        for turn in range(_ROUNDS + 1):
            seconds = settings.seconds / _ROUNDS if turn else min(1.0, settings.seconds / _ROUNDS)
            found, found_bare = await load_of(scheduler, settings, seconds), await load_of(echo, echoed_by, seconds)
            if turn:  # the first one warms up
                ours.append(found)
                bare.append(found_bare)
                alone.append(await load_of(scheduler, settings, seconds / 2, alone=True))
                bare_alone.append(await load_of(echo, echoed_by, seconds / 2, alone=True))
    found, echoed = _medians(ours), _medians(bare)
    one = _medians(alone)
    one["echo_p50_us"] = _medians(bare_alone)["p50_us"]
    one["vs_echo"] = round(one["p50_us"] / one["echo_p50_us"], 3)
    return {
        "settings": asdict(settings),
        "route": found,
        "echo": echoed,
        "vs_echo": round(found["requests_per_s"] / echoed["requests_per_s"], 3),
        "one_caller": one,
    }


def addresses_of(count: int) -> list[str]:
    """Addresses of so many engines that nobody calls."""
    return [f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000" for number in range(count)]


async def use_strategy(port: int, strategy: str, token: str) -> None:
    """Bind it to all requests. Raises BenchError where there is none of that name."""
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    binding = admin_pb2.StrategyBinding(name="strategyBindings/default", strategy=f"strategies/{strategy}")
    request = admin_pb2.UpdateStrategyBindingRequest(
        strategy_binding=binding, update_mask=FieldMask(paths=["strategy"]), request_id="bench"
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await admin_pb2_grpc.AdminStub(channel).UpdateStrategyBinding(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise BenchError(f"strategy {strategy!r}: {error.details()}") from None


async def load_of(server: tuple[int, int], settings: RouteSettings, seconds: float, *, alone: bool = False) -> Json:
    """Load one server, a pid and a port, for so long: what came of it, and its CPU a request."""
    pid, port = server
    before = cpu_s(pid)
    concurrency = 1 if alone else settings.concurrency
    token = ROUTER_TOKEN if settings.auth else ""
    found = await run_json(
        "headway_bench.router_load", port, settings.mode, concurrency, seconds, settings.prompt_bytes, token, 0, "text"
    )
    if found["failed"] or not found["requests"]:
        raise BenchError(f"of {found['requests']} requests {found['failed']} failed")
    found["server_cpu_us"] = (cpu_s(pid) - before) * 1e6 / found["requests"]
    return found


def _medians(rounds: list[Json]) -> Json:
    names = ("requests_per_s", "p50_us", "p99_us", "server_cpu_us")
    return {name: round(statistics.median(each[name] for each in rounds), 1) for name in names}
