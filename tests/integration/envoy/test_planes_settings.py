"""What a plane says of itself by route, and the subset that its own filters set, with the real Envoy."""

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
    typed,
)
from fakes.openai_engine import OpenAIEngine
from fakes.scheduler import serving
from headway.admin.v1 import admin_pb2 as apb
from headway.telemetry.v1 import telemetry_pb2 as tpb

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"


@pytest.fixture
async def world(database_url):
    """A scheduler with two engines; acme may use the first one, and nobody but it."""
    async with AsyncExitStack() as stack:
        engines = [await OpenAIEngine().start() for _ in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        served = await stack.enter_async_context(serving(database_url))
        group = apb.GpuGroup(name="gpuGroups/first", endpoints=[f"endpoints/{engines[0].address}@0"])
        await served.admin.CreateGpuGroup(apb.CreateGpuGroupRequest(gpu_group=group))
        await served.admin.CreateTenant(apb.CreateTenantRequest(tenant=apb.Tenant(name="tenants/acme")))
        mode = apb.BINDING_MODE_DEDICATED
        binding = apb.Binding(name="tenants/acme/bindings/first", gpu_group="gpuGroups/first", mode=mode)
        await served.admin.CreateBinding(apb.CreateBindingRequest(binding=binding))
        await served.agent("n", *[tpb.EngineEndpoint(address=e.address, models=["m"], ready=True) for e in engines])
        yield served, engines


def settings_of_route(**metadata):
    overrides = {
        "grpc_initial_metadata": [{"key": f"x-headway-{key}", "value": value} for key, value in metadata.items()]
    }
    return {"typed_per_filter_config": {"envoy.filters.http.ext_proc": {"@type": PER_ROUTE, "overrides": overrides}}}


def config_of(served, engines, routes, filters=()):
    cluster = static_cluster("engines", [e.address for e in engines], load_balancing_policy=override_host())
    picker = ext_proc_filter("headway")
    target = f"127.0.0.1:{served.server.port}"
    return bootstrap([http_listener(routes, [*filters, picker])], [cluster, grpc_cluster("headway", target)])


async def test_each_route_has_its_tenant(world, tmp_path):
    served, engines = world
    acme = {**route_to("engines", "/acme/", prefix_rewrite="/"), **settings_of_route(tenant="acme")}
    nobody = {**route_to("engines", "/nobody/", prefix_rewrite="/"), **settings_of_route(tenant="nobody")}
    config = config_of(served, engines, [acme, nobody, route_to("engines")])
    async with running_envoy(config, tmp_path) as envoy, aiohttp.ClientSession() as http:

        async def ask(path):
            async with http.post(f"{envoy.url}{path}/v1/chat/completions", json=BODY) as answer:
                return answer.status, answer.headers.get("x-headway-reason")

        assert [await ask("/acme") for _ in range(3)] == [(200, None)] * 3
        assert [len(engine.seen) for engine in engines] == [3, 0]
        assert [await ask("") for _ in range(3)] == [(200, None)] * 3
        assert [len(engine.seen) for engine in engines] == [3, 3]  # the first is acme's alone
        assert await ask("/nobody") == (404, "UNKNOWN_TENANT")
    assert not served.reservations


@pytest.mark.parametrize(("hint", "status"), [("list", 200), ("text", 200), ("10.9.9.9:1", 503), ("", 503)], ids=str)
async def test_a_subset_from_the_planes_own_filters(world, tmp_path, hint, status):
    served, engines = world
    wanted = engines[1].address
    value = {"list": [wanted], "text": f"10.0.0.1:1, {wanted}"}.get(hint, hint)
    metadata = {
        "metadata_namespace": "envoy.lb.subset_hint",
        "value": {"x-gateway-destination-endpoint-subset": value},
    }
    subset = typed("envoy.filters.http.set_metadata", "filters.http.set_metadata.v3.Config", metadata=[metadata])
    config = config_of(served, engines, [route_to("engines")], [subset])
    async with running_envoy(config, tmp_path) as envoy, aiohttp.ClientSession() as http:
        answer = await http.post(f"{envoy.url}/v1/chat/completions", json=BODY)
        assert answer.status == status
        answer.release()
    assert [len(engine.seen) for engine in engines] == [0, 1 if status == 200 else 0]
    assert not served.reservations
