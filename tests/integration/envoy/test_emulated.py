"""Conversations through the real Envoy on emulated engines, which count and cache as engines do."""

import json
from contextlib import AsyncExitStack

import aiohttp
import pytest
from fakes.envoy import (
    bootstrap,
    ext_proc_filter,
    grpc_cluster,
    http_listener,
    override_host,
    route_to,
    running_envoy,
    static_cluster,
)
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_sim.emulator import Emulator, EmulatorConfig
from headway_sim.engine import HARDWARE
from prometheus_client.parser import text_string_to_metric_families

PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
STORY = "Once upon a time there was a scheduler. " * 100


def of_tenant(tenant):
    overrides = {"grpc_initial_metadata": [{"key": "x-headway-tenant", "value": tenant}]}
    route = route_to("engines", f"/{tenant}/", prefix_rewrite="/")
    return {
        **route,
        "typed_per_filter_config": {"envoy.filters.http.ext_proc": {"@type": PER_ROUTE, "overrides": overrides}},
    }


class World:
    """Three emulated engines behind an Envoy with a route for each of two tenants."""

    def __init__(self, served, envoy, http, addresses):
        self.served, self.envoy, self.http, self.addresses = served, envoy, http, addresses

    async def ask(self, messages, tenant="default"):
        """What was answered, and its usage."""
        body = {"model": "m", "messages": messages, "max_tokens": 20, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with self.http.post(f"{self.envoy.url}/{tenant}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        return said, events[-1]["usage"]

    async def counted(self, name):
        """A metric of every engine."""
        found = []
        for address in self.addresses:
            async with self.http.get(f"http://{address}/metrics") as answer:
                families = text_string_to_metric_families(await answer.text())
            found.append(sum(sample.value for family in families for sample in family.samples if sample.name == name))
        return found

    async def settled(self):
        await eventually(lambda: not self.served.reservations)
        assert await self.counted("vllm:num_requests_running") == [0] * len(self.addresses)


@pytest.fixture
async def world(database_url, tmp_path):
    async with AsyncExitStack() as stack:
        config = EmulatorConfig(
            HARDWARE["a100-40g-8b"], ("m",), "127.0.0.1", (0, 0, 0), speedup=20.0, stream_interval_ms=2.0
        )
        emulator = await stack.enter_async_context(Emulator(config))
        served = await stack.enter_async_context(serving(database_url, time_scale=20.0, learn_costs=False))
        await served.admin.CreateTenant(apb.CreateTenantRequest(tenant=apb.Tenant(name="tenants/acme")))
        binding = apb.Binding(name="tenants/acme/bindings/all", gpu_group="gpuGroups/all", mode=apb.BINDING_MODE_SHARED)
        await served.admin.CreateBinding(apb.CreateBindingRequest(binding=binding))
        engines = [
            tpb.EngineEndpoint(address=address, models=["m"], ready=True, engine="emulator")
            for address in emulator.addresses
        ]
        await served.agent("n", *engines)
        listener = http_listener([of_tenant("acme"), of_tenant("default")], [ext_proc_filter("headway")])
        cluster = static_cluster("engines", emulator.addresses, load_balancing_policy=override_host())
        target = f"127.0.0.1:{served.server.port}"
        envoy = await stack.enter_async_context(
            running_envoy(bootstrap([listener], [cluster, grpc_cluster("headway", target)]), tmp_path)
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield World(served, envoy, http, list(emulator.addresses))


async def test_conversations_stay_where_their_cache_is_and_every_count_agrees(world):
    turns = 0
    for session in range(3):
        messages = [{"role": "user", "content": f"{session}: {STORY}"}]
        for turn in range(4):
            said, usage = await world.ask(messages)
            turns += 1
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            assert (cached > 0.8 * usage["prompt_tokens"]) == (turn > 0)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    await world.settled()
    assert sum(await world.counted("vllm:request_success_total")) == turns


async def test_tenants_share_no_cache_inside_one_engine(world):
    messages = [{"role": "user", "content": STORY}]
    cached = []
    for tenant in ("default", "default", "acme", "acme"):
        for _ in range(3):  # each engine may have it
            _, usage = await world.ask(messages, tenant)
            cached.append((tenant, (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0))
    first_of_acme = next(tokens for tenant, tokens in cached if tenant == "acme")
    assert first_of_acme == 0
    assert [tokens for tenant, tokens in cached if tenant == "acme"][-1] > 0
    await world.settled()
