"""Whatever happens to the scheduler, nothing leaks and nothing ends twice."""

import asyncio
import random

import pytest
from fakes.router import FakeRouter
from fakes.waiting import eventually
from headway.routing.v1 import routing_pb2 as pb
from headway_client import ClientOptions, HeadwayClient, RouteRefused

ADDRESSES = [f"10.0.0.{i}:8000" for i in range(1, 5)]
OPTIONS = ClientOptions(fail_open_after_s=0.1, connect_timeout_s=0.1, backoff_initial_s=0.005, backoff_max_s=0.02)


async def use(client: HeadwayClient, rng: random.Random, number: int) -> str:
    """Route, and do a random thing with what is given; return what became of it."""
    request = pb.RouteRequest(model="m", tenant="acme", text="x", request_id=f"r{number}")
    try:
        async with client.route(request, timeout_s=rng.choice([None, None, 0.05])) as reservation:
            await asyncio.sleep(rng.random() * 0.1)
            reservation.first_token(1.0)
            if rng.random() < 0.3:
                reservation.served_by(rng.choice(reservation.fallbacks))
            await asyncio.sleep(rng.random() * 0.1)
            return "served"
    except RouteRefused as refusal:
        return refusal.reason


async def disturb(router: FakeRouter, rng: random.Random) -> None:
    for _ in range(6):
        await asyncio.sleep(rng.random() * 0.15)
        if rng.random() < 0.5:
            await router.kill()
            await asyncio.sleep(rng.random() * 0.2)
            await router.start()
        else:
            router.scene.hung = True
            await asyncio.sleep(rng.random() * 0.4)
            await router.wake()


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    router = FakeRouter(ADDRESSES)
    target = await router.start()
    try:
        async with HeadwayClient([target], options=OPTIONS, rng=random.Random(seed)) as client:
            await client.wait_connected()
            disturbance = asyncio.create_task(disturb(router, rng))
            tasks = []
            for number in range(400):
                tasks.append(asyncio.create_task(use(client, rng, number)))
                if rng.random() < 0.1:
                    rng.choice(tasks).cancel()
                await asyncio.sleep(0.002)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await disturbance
            # What a lost stream orphaned is the scheduler's to expire; the client has let go of everything.
            await eventually(lambda: client.connected and client.live == 0)
            assert {str(r) for r in results} - {"", "served", "DEADLINE"} == set()
            assert "served" in results
            assert client.stats.reconnects and client.stats.fail_open_routes
            probe = await client.route(pb.RouteRequest(model="m", tenant="acme", text="x"))
            probe.finished(pb.OUTCOME_SUCCESS)
            await eventually(lambda: client.live == 0)
            await eventually(lambda: not [h for h in router.live.values() if h.owner in router.owners])
        for held in router.history:
            assert sum(e.HasField("finished") for e in held.events) <= 1
    finally:
        await router.kill()
