"""An emulated engine that answers fast 500s among healthy ones: few requests meet it, and it is back when mended."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_gateway.app import Gateway
from headway_gateway.config import GatewaySettings
from headway_scheduler.exposition import SchedulerCollector
from headway_sim.emulator import Emulator, EmulatorConfig
from headway_sim.engine import HARDWARE

WORKERS = 8


class World:
    """Four emulated engines, a scheduler, and a gateway that tries each request once."""

    def __init__(self, served, addresses, http, url):
        self.served, self.addresses, self.http, self.url = served, addresses, http, url

    async def ask(self, number):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": f"{number} is the number of a question. " * 20}],
            "max_tokens": 20,
        }
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            await answer.read()
            return answer.status, answer.headers.get("x-headway-endpoint")

    async def ask_many(self, count):
        """The answers of so many requests, a few at once."""
        numbers, answers = iter(range(count)), []

        async def work():
            for number in numbers:
                answers.append(await self.ask(number))

        await asyncio.gather(*(work() for _ in range(WORKERS)))
        return answers

    async def break_one(self, mode="http_500"):
        async with self.http.post(f"http://{self.addresses[0]}/emulator/fault", json={"mode": mode}) as answer:
            assert answer.status == 200

    async def state(self):
        listed = await self.served.fleet.ListEndpoints(fpb.ListEndpointsRequest())
        return next(each for each in listed.endpoints if each.address == self.addresses[0])


@pytest.fixture
async def world(database_url, request):
    async with AsyncExitStack() as stack:
        config = EmulatorConfig(HARDWARE["a100-40g-8b"], ("m",), "127.0.0.1", (0,) * 4, speedup=50.0)
        emulator = await stack.enter_async_context(Emulator(config))
        settings = {"eject_base_s": 1.0, "eject_max_s": 2.0, "slow_start_s": 1.0, "time_scale": 50.0}
        served = await stack.enter_async_context(serving(database_url, **(settings | getattr(request, "param", {}))))
        await served.agent(
            "n",
            *[
                tpb.EngineEndpoint(address=address, models=["m"], ready=True, engine="emulator")
                for address in emulator.addresses
            ],
        )
        gateway = await stack.enter_async_context(
            Gateway(
                GatewaySettings(
                    port=0,
                    schedulers=[f"127.0.0.1:{served.server.port}"],
                    anonymous_tenant="default",
                    max_attempts=1,
                    fail_open=False,
                )
            )
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await gateway.client.wait_connected()
        yield World(served, emulator.addresses, http, f"http://127.0.0.1:{gateway.port}")


async def test_few_requests_meet_it_and_it_is_back_when_mended(world):
    assert {status for status, _ in await world.ask_many(40)} == {200}
    await world.break_one()
    failed = sum(status != 200 for status, _ in await world.ask_many(400))
    # Five in a row, what was under way there already, and one for each ejection that was over.
    assert 5 <= failed <= 40
    state = await world.state()
    assert state.ejection.reason in ("consecutive_faults", "failed_probe")
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for family in SchedulerCollector(world.served.scheduler).collect()
        for sample in family.samples
    }
    assert metrics["headway_ejections_total", "consecutive_faults"] == 1
    assert metrics["headway_endpoints_ejected", "m"] == 1
    assert metrics["headway_panic", "m"] == 0
    await world.break_one("none")

    async def back():
        answers = await world.ask_many(WORKERS)
        return (200, world.addresses[0]) in answers and not (await world.state()).HasField("ejection")

    await eventually(back)
    assert {status for status, _ in await world.ask_many(80)} == {200}


@pytest.mark.parametrize("world", [{"eject_base_s": 600, "eject_max_s": 600}], indirect=True)
async def test_an_admin_lifts_an_ejection_and_it_is_audited(world):
    await world.break_one()
    await world.ask_many(60)
    assert list((await world.state()).hard_guards) == ["ejected"]
    assert (await world.state()).guard_details["ejected"] == "consecutive_faults"
    name = f"endpoints/{world.addresses[0]}@0"
    active = apb.SetEndpointStateRequest(name=name, state=apb.SCHEDULING_STATE_ACTIVE)
    await world.served.admin.SetEndpointState(active)
    assert not (await world.state()).HasField("ejection")
    listed = await world.served.admin.ListAuditEntries(apb.ListAuditEntriesRequest())
    assert (listed.audit_entries[0].method, listed.audit_entries[0].resource) == ("SetEndpointState", name)
