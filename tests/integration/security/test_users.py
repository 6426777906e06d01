"""End users' keys at the gateway, against a real scheduler: whose they are, where they go, and how soon they end."""

import asyncio
import contextlib
import json

import aiohttp
import pytest
from fakes.credentials import BY_HAND, bearer, credential
from fakes.openai_engine import OpenAIEngine
from fakes.scheduler import serving
from fakes.standin import Standin
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_client import KeyTenants, RouteRefused
from headway_gateway.app import Gateway
from headway_gateway.config import GatewaySettings
from headway_gateway.keys import STALE_S, UserKeys
from headway_openai.errors import ApiError
from headway_scheduler.domain.desired import Binding, Role, Tenant

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Site:
    """A gateway before one engine, and the scheduler that knows its users."""

    def __init__(self, served, gateway, engine, http):
        self.served, self.gateway, self.engine, self.http = served, gateway, engine, http
        self.tenants = []
        dispatcher = served.scheduler.dispatcher

        def submit(wanted, tenant, *rest):
            self.tenants.append(tenant.id)
            return dispatcher.submit(wanted, tenant, *rest)

        served.scheduler.dispatcher = Standin(dispatcher, submit=submit)

    async def ask(self, key, **headers):
        shown = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{self.gateway.port}/v1/chat/completions"
        async with self.http.post(url, data=json.dumps(CHAT), headers=shown | headers) as answer:
            await answer.read()
            return answer.status


@pytest.fixture
async def site(database_url):
    async with contextlib.AsyncExitStack() as closers:
        served = await closers.enter_async_context(serving(database_url, require_credentials=True))
        for tenant in ("acme", "globex"):
            await served.store.create(Tenant(tenant), BY_HAND)
            await served.store.create(Binding(tenant, "all"), BY_HAND)
        served.admin_token = await credential(served, "admin", Role.ADMIN)
        engine = await OpenAIEngine().start()
        closers.push_async_callback(engine.stop)
        call = served.telemetry.Connect(metadata=bearer(served.admin_token))
        endpoints = [tpb.EngineEndpoint(address=engine.address, models=["m"], ready=True)]
        await call.write(tpb.ConnectRequest(hello=tpb.Hello(node="n", instance_id="i", endpoints=endpoints)))
        assert (await call.read()).HasField("welcome")
        settings = GatewaySettings(
            port=0,
            schedulers=[f"127.0.0.1:{served.server.port}"],
            token=await credential(served, "gateway", Role.ROUTER, tenants=("acme", "globex")),
            user_keys=True,
        )
        gateway = await closers.enter_async_context(Gateway(settings))
        async with asyncio.timeout(15):
            await gateway.client.wait_connected()
        http = await closers.enter_async_context(aiohttp.ClientSession())
        yield Site(served, gateway, engine, http)
        call.cancel()


async def test_a_key_is_its_tenants_whatever_headers_say_and_never_reaches_the_engine(site):
    key = await credential(site.served, "user", Role.TENANT, tenants=("globex",))
    assert await site.ask(key, **{"x-headway-tenant": "acme"}) == 200
    assert site.tenants == ["globex"]
    (seen,) = site.engine.seen
    assert key not in str(seen)
    assert "authorization" not in {name.lower() for name in seen.headers}


async def test_who_is_no_user_is_refused(site):
    other = await credential(site.served, "x", Role.TENANT, tenants=("default",))  # no tenant of this gateway's
    shown = {
        "none": None, "wrong": "sk-wrong", "an admin's": site.served.admin_token, "another gateway's user": other,
    }  # fmt: skip
    assert {name: await site.ask(key) for name, key in shown.items()} == dict.fromkeys(shown, 401)
    assert site.tenants == []


async def test_a_revoked_key_ends_within_seconds(site):
    key = await credential(site.served, "user", Role.TENANT, tenants=("acme",))
    assert await site.ask(key) == 200
    request = apb.RevokeCredentialRequest(name="credentials/user")
    await site.served.admin.RevokeCredential(request, metadata=bearer(site.served.admin_token))

    async def is_refused():
        return await site.ask(key) == 401

    await eventually(is_refused, timeout_s=10)


class Scheduler:
    """Says whose keys are whose, as a test has it."""

    def __init__(self):
        self.now, self.tenants, self.asked, self.down = 0.0, {b"a": "acme"}, [], False
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, keys):
        self.asked.append(list(keys))
        await self.gate.wait()
        if self.down:
            raise RouteRefused(__import__("grpc").StatusCode.UNAVAILABLE, "NO_SCHEDULER", "none")
        return KeyTenants(tuple(self.tenants.get(key, "") for key in keys), 2.0)

    def keys(self, *, fail_open=True):
        return UserKeys(self.ask, lambda: self.now, fail_open=fail_open)


async def test_a_key_is_asked_for_once_in_its_time_and_refreshed_before_it_ends():
    scheduler = Scheduler()
    keys = scheduler.keys()
    assert [await keys.tenant_of(b"a") for _ in range(5)] == ["acme"] * 5
    assert len(scheduler.asked) == 1
    scheduler.now = 1.5
    assert await keys.tenant_of(b"a") == "acme"  # at once, and asked for behind it
    await eventually(lambda: len(scheduler.asked) == 2)
    scheduler.now, scheduler.tenants = 3.6, {}
    assert await keys.tenant_of(b"a") == ""
    await keys.close()


async def test_a_flood_of_wrong_keys_is_a_few_questions_and_pushes_no_right_one_out(monkeypatch):
    monkeypatch.setattr("headway_gateway.keys._MOST_UNKNOWN", 100)
    scheduler = Scheduler()
    keys = scheduler.keys()
    assert await keys.tenant_of(b"a") == "acme"
    wrong = await asyncio.gather(*(keys.tenant_of(b"%d" % number) for number in range(5000)))
    assert set(wrong) == {""}
    assert len(scheduler.asked) <= 10
    assert max(map(len, scheduler.asked)) <= 1000
    assert len(keys._unknown) == 100
    assert await keys.tenant_of(b"a") == "acme"
    await keys.close()


@pytest.mark.parametrize("fail_open", [True, False])
async def test_without_a_scheduler_a_known_key_goes_on_for_a_while_where_the_gateway_fails_open(fail_open):
    scheduler = Scheduler()
    keys = scheduler.keys(fail_open=fail_open)
    await keys.tenant_of(b"a")
    scheduler.down, scheduler.now = True, 3.0
    if fail_open:
        assert await keys.tenant_of(b"a") == "acme"
        scheduler.now = STALE_S + 1.0
    for key in (b"a", b"never seen"):
        with pytest.raises(ApiError) as error:
            await keys.tenant_of(key)
        assert error.value.status == 503
    await keys.close()
