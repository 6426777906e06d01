"""From an engine's blocks to a decision: emulator → agent → scheduler → Route."""

import asyncio
import contextlib

import aiohttp
import grpc
import numpy as np
import pytest
from fakes.kv import free_ports
from fakes.scheduler import endpoint, refused, serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.routing.v1 import routing_pb2 as rpb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_agent.app import Agent
from headway_agent.config import AgentConfig
from headway_agent.stream import Backoff
from headway_scheduler.index.kv import KvPrompt, kv_root
from headway_sim.emulator import Emulator, EmulatorConfig
from headway_sim.emulator.kv_events import Encoding
from headway_sim.engine import HARDWARE

PROMPT = list(range(5000, 5000 + 1024))
OTHER = list(range(9000, 9000 + 1024))


def engines(count=2, ports=None, kv_port=0, **changes):
    return Emulator(
        EmulatorConfig(
            HARDWARE["a100-40g-8b"],
            ("m",),
            "127.0.0.1",
            ports or (0,) * count,
            speedup=500.0,
            kv_events_port=kv_port,
            **changes,
        )
    )


@contextlib.asynccontextmanager
async def agent(served, addresses, feeds):
    """A real agent of these engines and their feeds."""
    listed = [
        {"address": a, "engine": "emulator", "kv_events": {"address": pub, "replay_address": replay}}
        for a, (pub, replay) in zip(addresses, feeds, strict=True)
    ]
    config = AgentConfig(
        node="n",
        schedulers=[f"127.0.0.1:{served.server.port}"],
        interval_s=0.1,
        kv_events_interval_s=0.02,
        devices=[{"kind": "simulated"}],
        engines=listed,
    )
    running = Agent(config, backoff=Backoff(0.05, 0.1))
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        running.stop()
        await asyncio.wait_for(task, 10)


def feeds_of(emulator):
    return [(publisher.address, publisher.replay_address) for publisher in emulator.publishers]


async def complete(address, ids, salt="", model="m"):
    """What a data plane sends to an engine; returns how many tokens were cached."""
    body = {"model": model, "prompt": ids, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
    async with aiohttp.ClientSession() as http, http.post(f"http://{address}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def matches(served, ids, tenant="", **fields):
    """Matched tokens by address, as Explain tells them."""
    request = rpb.RouteRequest(model="m", tenant=tenant, **(fields or {"tokens": rpb.TokenIds(ids=ids)}))
    table = await served.router.Explain(rpb.ExplainRequest(request=request))
    return {row.endpoint.address: row.matched_tokens for row in table.rows if row.matched_tokens}


def salt(served, tenant="default"):
    return served.scheduler.salts.of(f"tenant/{tenant}")


async def ready(served, count):
    fleet = served.scheduler.fleet
    await eventually(lambda: len(fleet.endpoints) == count and all(e.ready for e in fleet.endpoints.values()))
    await eventually(lambda: served.scheduler.kv.feeds.bit_count() == count)


@pytest.mark.parametrize("encoding", Encoding)
async def test_a_route_goes_to_the_engine_that_really_holds_the_prompt(database_url, encoding):
    async with (
        serving(database_url) as served,
        engines(3, kv_events_encoding=encoding) as running,
        agent(served, running.addresses, feeds_of(running)),
    ):
        await ready(served, 3)
        holder = running.addresses[1]
        await complete(holder, PROMPT, salt(served))
        await eventually(lambda: matches(served, PROMPT))
        assert await matches(served, PROMPT) == {holder: 1024}
        answer = await served.route(text=None, tokens=rpb.TokenIds(ids=PROMPT))
        assert (answer.endpoint.address, answer.decision.matched_tokens) == (holder, 1023)
        assert answer.cache_salt == salt(served)
        assert await complete(holder, PROMPT, answer.cache_salt) == 1008, "what was promised is what was hit"
        assert await matches(served, OTHER) == {}
        hidden = await served.router.Explain(
            rpb.ExplainRequest(request=rpb.RouteRequest(model="m", text="a text knows no ids"))
        )
        assert not any(row.matched_tokens for row in hidden.rows)


async def test_an_evicted_prompt_is_matched_no_more(database_url):
    async with (
        serving(database_url) as served,
        engines(1, kv_tokens=2048) as running,
        agent(served, running.addresses, feeds_of(running)),
    ):
        await ready(served, 1)
        await complete(running.addresses[0], PROMPT, salt(served))
        await eventually(lambda: matches(served, PROMPT))
        await complete(running.addresses[0], [*OTHER, *OTHER[::-1][:900]], salt(served))
        await eventually(lambda: matches(served, OTHER))
        assert sum((await matches(served, PROMPT)).values()) < 512
        async with aiohttp.ClientSession() as http:
            await http.post(f"http://{running.addresses[0]}/reset_prefix_cache")
        await eventually(lambda: not len(served.scheduler.kv))


async def test_no_tenant_sees_anothers_prefixes(database_url):
    async with serving(database_url) as served:
        for name in ("a", "b"):
            await served.admin.CreateTenant(apb.CreateTenantRequest(tenant=apb.Tenant(name=f"tenants/{name}")))
            binding = apb.Binding(name=f"tenants/{name}/bindings/all", mode=apb.BINDING_MODE_SHARED)
            await served.admin.CreateBinding(apb.CreateBindingRequest(binding=binding))
        async with engines(2) as running, agent(served, running.addresses, feeds_of(running)):
            await ready(served, 2)
            one, other = running.addresses
            await complete(one, PROMPT, salt(served, "a"))
            await complete(other, PROMPT)  # by somebody who sends no salt
            await eventually(lambda: matches(served, PROMPT, "a"))
            await eventually(lambda: served.scheduler.kv.blocks(1))
            assert await matches(served, PROMPT, "a") == {one: 1024}
            assert await matches(served, PROMPT, "b") == {}
            assert await matches(served, PROMPT) == {}


async def test_a_plane_that_cannot_inject_salts_is_refused_where_others_may_go_too(database_url):
    async with serving(database_url) as served:
        await served.agent()
        answer = await served.route(cannot_inject_salt=True)
        assert answer.endpoint.address
        await served.admin.CreateTenant(apb.CreateTenantRequest(tenant=apb.Tenant(name="tenants/a")))
        binding = apb.Binding(name="tenants/a/bindings/all", mode=apb.BINDING_MODE_SHARED)
        await served.admin.CreateBinding(apb.CreateBindingRequest(binding=binding))
        refusal = await refused(served.route(cannot_inject_salt=True))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENDPOINTS")
        assert (await served.route()).endpoint.address


async def test_a_better_holder_is_named(database_url):
    async with serving(database_url) as served:
        await served.bind("least_request")
        agent = await served.agent("n", *(endpoint(n, engine="vllm", pulls_prefixes=True) for n in (1, 2)))
        keys = KvPrompt.of_ids(np.array(PROMPT, "<u4").tobytes(), 99).keys(kv_root("", salt(served)))
        batches = [
            tpb.KvEventBatch(address=f"10.0.0.{n}:8000", scheme="tokens-xxh3-128", stored=held, cleared=True)
            for n, held in ((1, keys), (2, keys[:1]))
        ]
        await served.route(subset=rpb.Subset(endpoints=["10.0.0.1"]))  # keeps the better one busy
        await agent.send(kv_event_batches=tpb.KvEventBatches(batches=batches))
        await eventually(lambda: served.scheduler.kv.feeds.bit_count() == 2)
        answer = await served.route(text=None, tokens=rpb.TokenIds(ids=PROMPT))
        assert answer.endpoint.address == "10.0.0.2:8000"
        assert (answer.pull_from.endpoint.address, answer.pull_from.tokens) == ("10.0.0.1:8000", 1024)


async def test_a_scheduler_that_restarts_is_told_everything_again(database_url):
    async with engines(1) as running, serving(database_url) as served:
        port = served.server.port
        async with agent(served, running.addresses, feeds_of(running)):
            await ready(served, 1)
            await complete(running.addresses[0], PROMPT, salt(served))
            await eventually(lambda: matches(served, PROMPT))
            served.scheduler.drain()
            await served.server.stop(0)
            async with serving(database_url, listen=f"127.0.0.1:{port}") as after:
                await ready(after, 1)
                await eventually(lambda: matches(after, PROMPT))
                assert await matches(after, PROMPT) == {running.addresses[0]: 1024}


async def test_a_resync_brings_the_whole_set(database_url):
    async with (
        serving(database_url) as served,
        engines(1) as running,
        agent(served, running.addresses, feeds_of(running)),
    ):
        await ready(served, 1)
        await complete(running.addresses[0], PROMPT, salt(served))
        await eventually(lambda: matches(served, PROMPT))
        served.scheduler.fleet.forget_node("n")
        assert not len(served.scheduler.kv)
        await eventually(lambda: matches(served, PROMPT))


async def test_an_engine_that_restarts_is_forgotten(database_url):
    ports, (kv_port, replay_port) = (free_ports()[0],), free_ports()
    feeds = [(f"tcp://127.0.0.1:{kv_port}", f"tcp://127.0.0.1:{replay_port}")]
    async with serving(database_url) as served, agent(served, [f"127.0.0.1:{ports[0]}"], feeds):
        async with engines(ports=ports, kv_port=kv_port) as running:
            await ready(served, 1)
            await complete(running.addresses[0], PROMPT, salt(served))
            await eventually(lambda: matches(served, PROMPT))
        async with engines(ports=ports, kv_port=kv_port) as running:
            await eventually(lambda: not len(served.scheduler.kv))
            await complete(running.addresses[0], OTHER, salt(served))
            await eventually(lambda: matches(served, OTHER))
            assert await matches(served, PROMPT) == {}


async def test_a_gap_is_replayed(database_url):
    async with (
        serving(database_url) as served,
        engines(1) as running,
        agent(served, running.addresses, feeds_of(running)),
    ):
        await ready(served, 1)
        (publisher,) = running.publishers
        publisher.muted = True
        await complete(running.addresses[0], PROMPT, salt(served))
        publisher.muted = False
        await complete(running.addresses[0], OTHER, salt(served))
        await eventually(lambda: matches(served, OTHER))
        assert await matches(served, PROMPT) == {running.addresses[0]: 1024}


@pytest.mark.parametrize(
    ("field", "changes"),
    [("kv_events.tier", {"tier": "tape"}), ("kv_events.scheme", {"scheme": "bytes-xxh3-256", "stored": [1]})],
)
async def test_malformed_events_name_the_field(database_url, field, changes):
    async with serving(database_url) as served:
        agent = await served.agent()
        parts = {"address": "10.0.0.1:8000", "scheme": "tokens-xxh3-128"} | changes
        await agent.send(kv_events=tpb.KvEventBatch(**parts))
        assert (await agent.error()).field == field
