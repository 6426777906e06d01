"""The local stack under load while its parts are killed: what a retry could save is saved, and no count leaks."""

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2, admin_pb2_grpc
from headway.fleet.v1 import fleet_pb2, fleet_pb2_grpc
from headway_cli.local.load import reservations_left, target_of
from headway_cli.local.stack import LocalStack, NodeOptions, StackOptions
from headway_sim.driver import Ending, LoadResult, Outcome, run_closed_loop
from headway_sim.workloads import ArticleWorkload

WORKLOAD = ArticleWorkload(sessions=16, turns=3, concurrency=8, output_tokens=300)
FEW = ArticleWorkload(sessions=8, turns=1, concurrency=8, output_tokens=20, seed=1)


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    nodes = (NodeOptions("node-a", "gold", 2), NodeOptions("node-b", "silver", 2))
    # Not tmp_path: pytest closes its parent to the user that Postgres runs as.
    with (
        tempfile.TemporaryDirectory(prefix="hw-stack-") as directory,
        LocalStack(StackOptions(Path(directory), nodes=nodes, speedup=5.0)) as running,
    ):
        yield running


@asynccontextmanager
async def load(stack: LocalStack, workload: ArticleWorkload = WORKLOAD) -> AsyncIterator["asyncio.Task[LoadResult]"]:
    """The workload, under way: something is in flight when the body begins."""
    task = asyncio.create_task(
        run_closed_loop(target_of(stack), workload.conversations(), concurrency=workload.concurrency)
    )
    await eventually(lambda: stack.status().reservations >= workload.concurrency)
    yield task
    await task


async def in_engines(stack: LocalStack) -> int:
    """Requests that the engines themselves say they have."""
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for address in stack.engine_addresses:
            async with http.get(f"http://{address}/metrics") as response:
                for line in (await response.text()).splitlines():
                    if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting")):
                        total += float(line.rpartition(" ")[2])
    return int(total)


def states(stack: LocalStack) -> dict[str, fleet_pb2.EndpointState]:
    with stack.channel() as channel:
        listed = fleet_pb2_grpc.FleetStub(channel).ListEndpoints(fleet_pb2.ListEndpointsRequest(), timeout=5)
    return {state.address: state for state in listed.endpoints}


def endings(result: LoadResult) -> dict[Ending, int]:
    return {ending: sum(o.ending is ending for o in result.outcomes) for ending in Ending}


def not_ok(result: LoadResult) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.ending is not Ending.OK]


async def gateway_metric(stack: LocalStack, name: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{stack.gateway_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


async def counts_match(stack: LocalStack) -> bool:
    reserved = sum(state.reservations for state in states(stack).values())
    return reserved > 0 and reserved == await in_engines(stack)


async def test_scheduler_killed_under_load_loses_nothing(stack: LocalStack) -> None:
    async with load(stack) as running:
        stack.scheduler.kill()
        stack.scheduler = await asyncio.to_thread(stack.start_scheduler)
        await eventually(lambda: counts_match(stack))
        result = await running

    assert not_ok(result) == []
    assert len(result.outcomes) == WORKLOAD.requests
    assert reservations_left(lambda: stack.status().reservations) == 0


async def test_scheduler_stopped_and_continued_loses_nothing(stack: LocalStack) -> None:
    async with load(stack) as running:
        stack.scheduler.signal(signal.SIGSTOP)
        await eventually(lambda: gateway_metric(stack, "headway_client_fail_open_routes_total"))
        stack.scheduler.signal(signal.SIGCONT)
        result = await running

    assert not_ok(result) == []
    assert len(result.outcomes) == WORKLOAD.requests
    assert reservations_left(lambda: stack.status().reservations) == 0


async def test_agent_killed_closes_its_endpoints_until_it_is_back(stack: LocalStack) -> None:
    own = set(stack.engine_addresses[:2])
    async with load(stack) as running:
        stack.agents[0].kill()
        await eventually(lambda: {a for a, s in states(stack).items() if "stale" in s.hard_guards} == own)
        result = await running
    assert not_ok(result) == []

    served = await run_closed_loop(target_of(stack), FEW.conversations(), concurrency=FEW.concurrency)
    assert not_ok(served) == []
    assert all(states(stack)[address].reservations == 0 for address in own)

    await asyncio.to_thread(stack.start_agent, 0)
    await eventually(lambda: stack.status().endpoints_healthy == 4)


async def test_engine_killed_loses_only_what_had_begun_there(stack: LocalStack) -> None:
    address = stack.engine_addresses[0]
    async with load(stack) as running:
        there = states(stack)[address].reservations
        stack.engines[0].kill()
        result = await running

    counted = endings(result)
    # A stream that broke off after its first byte cannot be retried; all else must have been.
    assert counted[Ending.LOST] <= there + 1
    assert counted[Ending.OK] == WORKLOAD.requests - counted[Ending.LOST]
    await eventually(lambda: address not in states(stack) or not states(stack)[address].healthy)
    served = await run_closed_loop(target_of(stack), FEW.conversations(), concurrency=FEW.concurrency)
    assert not_ok(served) == []
    assert reservations_left(lambda: stack.status().reservations) == 0


async def test_postgres_killed_stops_writes_not_routes(stack: LocalStack) -> None:
    assert stack.postgres is not None
    assert stack.postgres.pid is not None
    with stack.channel() as channel:
        admin = admin_pb2_grpc.AdminStub(channel)

        def create(name: str) -> grpc.StatusCode:
            tenant = admin_pb2.Tenant(name=f"tenants/{name}")
            try:
                admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant=tenant), timeout=15)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        async with load(stack) as running:
            os.kill(stack.postgres.pid, signal.SIGKILL)
            names = (f"during-{number}" for number in itertools.count())
            # The killed server's own children may still finish what they had begun.
            await eventually(lambda: create(next(names)) is grpc.StatusCode.UNAVAILABLE)
            result = await running
            assert not_ok(result) == []

        await asyncio.to_thread(stack.postgres.start)
        await eventually(lambda: stack.status().store_available, timeout_s=20)
        assert await asyncio.to_thread(create, "after") is grpc.StatusCode.OK
