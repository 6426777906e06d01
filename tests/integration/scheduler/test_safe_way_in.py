"""Bypass and shares as data planes that link the client see them; who asks all the same; and what is written of it."""

import contextlib
import random

import aiohttp
import grpc
import pytest
from fakes.openai_engine import OpenAIEngine
from fakes.scheduler import refused, serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as rpb
from headway.telemetry.v1.telemetry_pb2 import EngineEndpoint
from headway_client import ClientOptions, HeadwayClient
from headway_gateway.app import Gateway
from headway_gateway.config import GatewaySettings


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as served:
        yield served


def client_of(served, **options):
    target = f"127.0.0.1:{served.server.port}"
    return HeadwayClient([target], options=ClientOptions(**options), rng=random.Random(1))


async def set_bypass(served, on, tenant="", request_id=""):
    request = apb.SetBypassRequest(tenant=tenant, bypass=on, request_id=request_id)
    return list((await served.admin.SetBypass(request)).bypassed)


async def set_percent(served, percent):
    tenant = apb.Tenant(name="tenants/default", routed_percent=percent)
    await served.admin.UpdateTenant(apb.UpdateTenantRequest(tenant=tenant, update_mask={"paths": ["routed_percent"]}))


def ask(request_id="", **fields):
    return rpb.RouteRequest(request_id=request_id, model="m", text="hello", **fields)


async def test_a_client_goes_on_alone_at_once_and_is_counted_and_comes_back(served):
    await served.agent("n")
    async with client_of(served) as client:
        await client.wait_connected()
        await set_bypass(served, on=True)
        await eventually(lambda: client.view.bypassed == ["*"])
        first, second = await client.route(ask()), await client.route(ask())
        assert {first.endpoint.address, second.endpoint.address} == {"10.0.0.1:8000", "10.0.0.2:8000"}
        assert first.fail_open
        await eventually(lambda: len(served.reservations) == 2)
        assert served.scheduler.dispatcher.routes == 0
        first.finished(rpb.OUTCOME_SUCCESS)
        second.finished(rpb.OUTCOME_SUCCESS)
        await eventually(lambda: not served.reservations)
        assert client.stats.bypassed_routes == 2
        await set_bypass(served, on=False)
        await eventually(lambda: not client.view.bypassed)
        assert not (await client.route(ask())).fail_open


async def test_a_client_that_may_not_choose_asks_all_the_same(served):
    await served.agent("n")
    async with client_of(served, fail_open=False) as client:
        await client.wait_connected()
        await set_bypass(served, on=True)
        await eventually(lambda: client.view.bypassed)
        assert not (await client.route(ask())).fail_open


async def test_whoever_asks_is_answered_by_the_fewest_in_flight(served):
    """nginx, JSON and clients of the version before know nothing of a bypass."""
    await served.agent("n")
    await served.bind("adaptive")
    await set_bypass(served, on=True, tenant="tenants/default")
    answers = [await served.route(text="the same prompt" * 500) for _ in range(4)]
    assert {answer.decision.strategy for answer in answers} == {"strategies/bypass"}
    assert sorted(answer.endpoint.address for answer in answers) == ["10.0.0.1:8000"] * 2 + ["10.0.0.2:8000"] * 2
    await set_bypass(served, on=False, tenant="tenants/default")
    assert (await served.route()).decision.strategy == "strategies/adaptive"


async def test_a_client_asks_for_its_share_by_session(served):
    await served.agent("n")
    async with client_of(served) as client:
        await client.wait_connected()
        await set_percent(served, 30)
        await eventually(lambda: client.view.routed_percent)
        for number in range(40):
            pair = [await client.route(ask(session_id=f"s{number}")) for _ in range(2)]
            assert pair[0].fail_open == pair[1].fail_open
        alone = client.stats.bypassed_routes
        assert 40 < alone < 72
        await set_percent(served, 100)
        await eventually(lambda: not client.view.routed_percent)
        assert not (await client.route(ask())).fail_open


async def test_it_is_audited_shown_and_done_once(served):
    assert await set_bypass(served, on=True, request_id="r1") == ["*"]
    assert await set_bypass(served, on=True, request_id="r1") == ["*"]
    assert await set_bypass(served, on=True, tenant="tenants/default") == ["*", "tenants/default"]
    assert list((await served.fleet.GetStatus(fpb.GetStatusRequest())).bypassed) == ["*", "tenants/default"]
    entries = (await served.admin.ListAuditEntries(apb.ListAuditEntriesRequest())).audit_entries
    told = [(each.method, each.resource, dict(each.before), dict(each.after)) for each in entries[:2]]
    assert told == [
        ("SetBypass", "tenants/default", {"bypass": False}, {"bypass": True}),
        ("SetBypass", "bypass", {"bypass": False}, {"bypass": True}),
    ]


async def test_a_tenant_that_is_deleted_leaves_no_bypass_behind(served):
    await served.admin.CreateTenant(apb.CreateTenantRequest(tenant=apb.Tenant(name="tenants/acme")))
    await set_bypass(served, on=True, tenant="tenants/acme")
    await served.admin.DeleteTenant(apb.DeleteTenantRequest(name="tenants/acme"))
    assert list((await served.fleet.GetStatus(fpb.GetStatusRequest())).bypassed) == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (apb.SetBypassRequest(tenant="tenants/nobody", bypass=True), "tenant"),
        (apb.SetBypassRequest(tenant="acme", bypass=True), "tenant"),
        (
            apb.UpdateTenantRequest(tenant=apb.Tenant(name="tenants/default", routed_percent=101)),
            "tenant.routed_percent",
        ),
    ],
)
async def test_what_is_wrong_is_named(served, request_, field):
    method = served.admin.SetBypass if isinstance(request_, apb.SetBypassRequest) else served.admin.UpdateTenant
    answer = await refused(method(request_))
    assert (answer.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), answer.field) == (True, field)


async def test_a_strategy_rolls_back_to_what_it_was_and_the_next_route_uses_it(served):
    await served.agent("n")
    await served.bind("adaptive")
    before = (await served.admin.GetStrategy(apb.GetStrategyRequest(name="strategies/adaptive"))).strategy
    tuned = apb.Strategy(name=before.name)
    tuned.parameters.update({"externality": 0.1})
    request = apb.UpdateStrategyRequest(strategy=tuned, update_mask={"paths": ["parameters"]})
    changed = (await served.admin.UpdateStrategy(request)).strategy
    assert served.scheduler.registry.installed["adaptive"].config.parameters == {"externality": 0.1}
    rollback = apb.RollbackStrategyRequest(name=before.name, revision=before.revision)
    restored = (await served.admin.RollbackStrategy(rollback)).strategy
    assert restored.revision == changed.revision + 1 == before.revision + 2
    assert restored.parameters == before.parameters
    assert served.scheduler.registry.installed["adaptive"].config.parameters == dict(before.parameters)
    assert (await served.route()).decision.strategy == before.name


async def test_the_gateway_serves_on_while_it_is_bypassed(served):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await OpenAIEngine().start() for _ in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        await served.agent("n", *[EngineEndpoint(address=each.address, models=["m"], ready=True) for each in engines])
        target = f"127.0.0.1:{served.server.port}"
        settings = GatewaySettings(port=0, schedulers=[target], api_keys={"sk": "default"})
        gateway = await stack.enter_async_context(Gateway(settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await eventually(lambda: gateway.client.connected and gateway.client.models("default"))

        async def alone():
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            url, key = f"http://127.0.0.1:{gateway.port}/v1/chat/completions", {"Authorization": "Bearer sk"}
            async with http.post(url, json=body, headers=key) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            return gateway.client.stats.bypassed_routes

        assert await alone() == 0
        await set_bypass(served, on=True)
        await eventually(lambda: gateway.client.view.bypassed)
        assert [await alone() for _ in range(4)] == [1, 2, 3, 4]
        assert served.scheduler.dispatcher.routes == 1
        await eventually(lambda: served.scheduler.fail_open_routes == {"default": 4})
        await set_bypass(served, on=False)
        await eventually(lambda: not gateway.client.view.bypassed)
        assert await alone() == 4
        await eventually(lambda: not served.reservations)
