"""Watched first, then a share, then all, and out of the way in one write: with the real Envoy."""

import contextlib
import hashlib
from dataclasses import replace

import aiohttp
import pytest
import yaml
from fakes.deployed import DEPLOY, TOKEN, WRITE, deployed
from fakes.envoy import DESTINATION, running_envoy, socket_address
from fakes.openai_engine import OpenAIEngine
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.telemetry.v1.telemetry_pb2 import EngineEndpoint
from headway_scheduler.admission.watching import Tally
from headway_scheduler.domain.desired import Credential, Role, Tenant

DUPLEX = {"request": "FULL_DUPLEX_STREAMED", "response": "FULL_DUPLEX_STREAMED"}
TOLD = {"response_attributes": ["upstream.address", "response.code_details"]}
OBSERVED = {"request": "STREAMED", "response": "STREAMED", "observability_mode": True, **TOLD}
BUFFERED = {"request": "BUFFERED", "response": "STREAMED", "message_timeout": "5s", **TOLD}
MODES = {"duplex": {**DUPLEX, **TOLD}, "buffered": BUFFERED}


def chat(text="hello", **fields):
    return {"messages": [{"role": "user", "content": text}], "model": "m", **fields}


async def set_percent(served, tenant, percent):
    stored = await served.store.get(Tenant, tenant)
    await served.store.update(replace(stored, routed_percent=percent), WRITE)
    await served.scheduler.refresh()


async def bypass(served, on, tenant=""):
    answer = await served.admin.SetBypass(apb.SetBypassRequest(tenant=tenant, bypass=on))
    return list(answer.bypassed)


async def ask(plane, body=None, *, times=1):
    for _ in range(times):
        async with plane.post(body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
    return text


def tally(plane, tenant="default"):
    return plane.served.scheduler.observations.tallies.get((tenant, "m"), Tally())


async def test_what_another_router_places_is_watched_and_compared(planes):
    async with planes(OBSERVED, metadata={"x-headway-observe": "true"}) as plane:
        for turn in range(6):
            elsewhere = [(DESTINATION, plane.engines[turn % 2].address)]  # the other router takes turns
            async with plane.post(chat("hello " * 400, stream=True), elsewhere) as answer:
                assert "[DONE]" in await answer.text()
        await eventually(lambda: tally(plane).timed == 6)
        await plane.settled()
        seen, scheduler = tally(plane), plane.served.scheduler
        assert (seen.requests, seen.elsewhere, seen.held, seen.refused, seen.compared) == (6, 0, 0, 0, 6)
        assert sorted(len(engine.seen) for engine in plane.engines) == [3, 3]
        assert scheduler.dispatcher.routes == 0
        assert 1 <= seen.agreed < 6, "we would have stayed where the prompt's prefix is"
        assert seen.hit_tokens_chosen > seen.hit_tokens_served > 0
        assert seen.predicted_chosen_ms < seen.predicted_served_ms
        assert seen.actual_ms > 0


async def test_what_cannot_be_priced_is_counted_and_goes_its_way(planes):
    async with planes(OBSERVED, metadata={"x-headway-observe": "true"}) as plane:
        scheduler = plane.served.scheduler
        await ask(plane, chat(model="nobody-knows-it"))
        await eventually(lambda: scheduler.observations.unpriced == {"UNKNOWN_MODEL": 1})
        assert (scheduler.observations.tallies, scheduler.refusals) == ({}, {})


@pytest.mark.parametrize("mode", MODES)
async def test_a_share_of_nothing_leaves_all_to_the_plane_and_watches_it(planes, mode):
    async with planes(MODES[mode]) as plane:
        scheduler = plane.served.scheduler
        await set_percent(plane.served, "default", 0)
        await ask(plane, times=4)
        await plane.settled()
        await eventually(lambda: tally(plane).requests == 4)
        assert scheduler.dispatcher.routes == 0
        assert sum(len(engine.seen) for engine in plane.engines) == 4
        await set_percent(plane.served, "default", 100)
        await ask(plane, times=2)
        assert (scheduler.dispatcher.routes, tally(plane).requests) == (2, 4)


async def test_a_session_keeps_its_router(planes):
    async with planes(BUFFERED) as plane:
        await set_percent(plane.served, "default", 50)
        for number in range(20):
            before = plane.served.scheduler.dispatcher.routes
            for _ in range(2):
                async with plane.post(headers=[("x-headway-session", f"s{number}")]) as answer:
                    assert answer.status == 200
            assert plane.served.scheduler.dispatcher.routes - before in (0, 2)
        assert 0 < tally(plane).requests < 40


@pytest.mark.parametrize("mode", MODES)
async def test_a_bypass_leaves_everything_alone_until_it_is_lifted(planes, mode):
    async with planes(MODES[mode]) as plane:
        scheduler = plane.served.scheduler
        assert await bypass(plane.served, on=True) == ["*"]
        text = await ask(plane, chat(model="nobody-knows-it", stream=True), times=3)
        assert "[DONE]" in text
        async with plane.http.get(f"{plane.envoy.url}/v1/models") as answer:
            assert answer.status != 503
        assert (scheduler.dispatcher.routes, scheduler.observations.tallies) == (0, {})
        assert await bypass(plane.served, on=False) == []
        await ask(plane)
        assert scheduler.dispatcher.routes == 1
        await plane.settled()


async def test_a_bypass_of_one_tenant_is_that_tenants_alone(planes):
    async with planes(DUPLEX, metadata={"x-headway-tenant": "default"}) as plane:
        await plane.served.store.create(Tenant("acme"), WRITE)
        await plane.served.scheduler.refresh()
        assert await bypass(plane.served, on=True, tenant="tenants/acme") == ["tenants/acme"]
        await ask(plane)
        assert plane.served.scheduler.dispatcher.routes == 1
        await bypass(plane.served, on=True, tenant="tenants/default")
        await ask(plane)
        assert plane.served.scheduler.dispatcher.routes == 1


@pytest.mark.parametrize("name", ["light", "light-http"])
async def test_the_light_picker_watches_and_is_bypassed(name, database_url, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_TOKEN", TOKEN)
    async with deployed(name, database_url, tmp_path / "envoy") as plane:
        scheduler = plane.served.scheduler
        await set_percent(plane.served, "default", 0)
        for _ in range(4):
            assert await plane.served_by() in ("shared1", "shared2")
        await eventually(lambda: tally(plane).requests == 4)
        assert (tally(plane).elsewhere, scheduler.dispatcher.routes) == (0, 0)
        await plane.settled()
        await scheduler.store.set_bypass("*", True, WRITE)
        await scheduler.refresh()
        assert await plane.served_by() in ("shared1", "shared2")
        assert (tally(plane).requests, scheduler.dispatcher.routes) == (4, 0)


async def test_the_configuration_to_begin_with_watches(database_url, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_TOKEN", TOKEN)
    config = yaml.safe_load((DEPLOY / "observe.yaml").read_text())
    del config["admin"]
    (listener,), (mine, headway) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"] = socket_address("127.0.0.1", 0)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(database_url))
        digest = hashlib.sha256(TOKEN.encode()).digest()
        await served.store.create(Credential("envoy", Role.ROUTER, digest, tenants=("default",)), WRITE)
        await served.scheduler.refresh()
        engines = [await OpenAIEngine().start() for _ in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        await served.agent("n", *[EngineEndpoint(address=each.address, models=["m"], ready=True) for each in engines])
        for cluster, addresses in (
            (mine, [engine.address for engine in engines]),
            (headway, [f"127.0.0.1:{served.server.port}"]),
        ):
            ends = [{"endpoint": {"address": socket_address(*each.split(":"))}} for each in addresses]
            cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": ends}]
        envoy = await stack.enter_async_context(running_envoy(config, tmp_path / "envoy"))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for _ in range(3):
            async with http.post(f"{envoy.url}/v1/chat/completions", json=chat(stream=True)) as answer:
                assert "[DONE]" in await answer.text()
        tallies = served.scheduler.observations.tallies
        await eventually(lambda: tallies and tallies["default", "m"].timed == 3)
        assert (tallies["default", "m"].elsewhere, served.scheduler.dispatcher.routes) == (0, 0)
        await eventually(lambda: not served.reservations)
        answer = await served.fleet.GetObservations(fpb.GetObservationsRequest())
        assert [(each.tenant, each.model, each.requests) for each in answer.observations] == [("default", "m", 3)]
