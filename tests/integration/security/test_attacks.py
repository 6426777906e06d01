"""What an attacker tries, against one scheduler that serves honest callers meanwhile."""

import asyncio
import itertools
import json

import aiohttp
import grpc
import pytest
import structlog
from envoy.service.auth.v3 import external_auth_pb2 as authz
from envoy.service.auth.v3 import external_auth_pb2_grpc
from fakes.credentials import BY_HAND, bearer, credential
from fakes.scheduler import Stream, endpoint, refused, serving
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as rpb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.app import AuthenticationCounts
from headway_scheduler.domain.desired import Binding, Role, Tenant
from headway_scheduler.domain.tokens import token_sha256
from headway_scheduler.errors import NoCredential, TooManyFailures
from headway_scheduler.http import HttpServer
from headway_scheduler.rpc.failures import MAX_PEERS, Failures

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def served(database_url):
    settings = {"require_credentials": True, "authentication_failures_per_minute": 20}
    async with serving(database_url, **settings) as served:
        for tenant in ("acme", "globex"):
            await served.store.create(Tenant(tenant), BY_HAND)
        served.agent_token = await credential(served, "agent-n", Role.AGENT, node="n")
        served.narrow = await credential(served, "narrow", Role.ROUTER, tenants=("acme",))
        call = served.telemetry.Connect(metadata=bearer(served.agent_token))
        await call.write(tpb.ConnectRequest(hello=tpb.Hello(node="n", instance_id="i", endpoints=[endpoint(1)])))
        assert (await call.read()).HasField("welcome")
        yield served
        call.cancel()


# An agent that claims another node


async def test_an_agent_that_claims_another_node_is_refused_and_the_node_is_left_alone(served):
    thief = await credential(served, "thief", Role.AGENT, node="other")
    call = served.telemetry.Connect(metadata=bearer(thief))
    await call.write(tpb.ConnectRequest(hello=tpb.Hello(node="n", instance_id="x", endpoints=[endpoint(9)])))
    assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
    fleet = served.scheduler.fleet
    assert set(fleet.endpoints) == {"10.0.0.1:8000@0"}
    assert fleet.nodes["n"].connected


async def test_an_agent_cannot_turn_into_another_node_on_its_own_stream(served):
    own = served.telemetry.Connect(metadata=bearer(await credential(served, "o", Role.AGENT, node="o")))
    await own.write(tpb.ConnectRequest(hello=tpb.Hello(node="o", instance_id="x")))
    assert (await own.read()).HasField("welcome")
    await own.write(tpb.ConnectRequest(hello=tpb.Hello(node="n", instance_id="x")))
    assert await own.code() is grpc.StatusCode.INVALID_ARGUMENT


# A tenant that is not the caller's


async def test_a_router_names_its_own_tenants_and_no_others_by_any_door(served):
    router, metadata = served.router, bearer(served.narrow)
    for tenant in ("globex", "tenants/globex", "default", "nobody"):
        request = rpb.RouteRequest(model="m", text="x", tenant=tenant)
        assert (await refused(router.Route(request, metadata=metadata))).reason == "TENANT_NOT_ALLOWED"
        explain = router.Explain(rpb.ExplainRequest(request=request), metadata=metadata)
        assert (await refused(explain)).reason == "TENANT_NOT_ALLOWED"
    stream = Stream(router.RouteStream(metadata=metadata))
    await stream.route(1, tenant="globex")
    (answer,) = await stream.answered(1)
    assert "globex" in answer.error.message
    await stream.lose()
    http = HttpServer(served.scheduler)
    await http.start("127.0.0.1:0")
    headers = {"Authorization": f"Bearer {served.narrow}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        statuses = []
        for path, tenant in itertools.product(("v1/route", "headway.routing.v1.Router/Route"), ("globex", "acme")):
            body = {"model": "m", "text": "x", "tenant": tenant, "maxWait": "0s"}
            async with session.post(f"http://127.0.0.1:{http.port}/{path}", json=body) as answer:
                statuses.append((answer.status, answer.headers.get("x-headway-reason")))
    await http.stop()
    assert statuses[::2] == [(403, "TENANT_NOT_ALLOWED")] * 2
    assert {status for status, _ in statuses[1::2]}.isdisjoint({401, 403})


@pytest.mark.parametrize("trusts", ["", "all"])
async def test_a_spoofed_tenant_header_behind_envoy_counts_for_nothing(served, trusts):
    """Nobody's client names a tenant that its plane may not; without trust none at all."""
    metadata = (*bearer(served.narrow), *((("x-headway-trust", trusts),) if trusts else ()))
    headers = {"x-headway-tenant": "globex", "x-gateway-inference-fairness-id": "globex"}
    answer = await check(served, headers, metadata)
    if trusts:
        assert (answer.denied_response.status.code, reason(answer)) == (403, "TENANT_NOT_ALLOWED")
    else:
        assert answer.denied_response.status.code != 403
    assert not [r for r in served.reservations.values() if r.tenant == "globex"]


# End users' keys behind Envoy


@pytest.fixture
async def users(served):
    """A plane that may name both tenants, whose users show keys."""
    served.plane = await credential(served, "envoy", Role.ROUTER, tenants=("acme", "globex"))
    served.key = await credential(served, "globex-user", Role.TENANT, tenants=("globex",))
    await bind_all(served)
    return served


async def test_a_users_key_names_its_tenant_and_goes_no_further(users):
    metadata = (*bearer(users.plane), ("x-headway-user-keys", "required"), ("x-headway-trust", "all"))
    spoofed = {"authorization": f"Bearer {users.key}", "x-gateway-inference-fairness-id": "acme"}
    answer = await check(users, spoofed, metadata)
    assert "authorization" in answer.ok_response.headers_to_remove
    (reservation,) = users.reservations.values()
    assert reservation.tenant == "globex"


@pytest.mark.parametrize(
    ("shown", "status"),
    [({}, 401), ({"authorization": "Bearer hw_wrong"}, 401), ({"authorization": "Basic eDp5"}, 401)],
)
async def test_where_keys_are_required_a_wrong_one_is_refused(users, shown, status):
    answer = await check(users, shown, (*bearer(users.plane), ("x-headway-user-keys", "required")))
    assert answer.denied_response.status.code == status
    assert not users.reservations


async def test_other_roles_tokens_are_no_users_keys(users):
    shown = {"authorization": f"Bearer {users.narrow}"}
    answer = await check(users, shown, (*bearer(users.plane), ("x-headway-user-keys", "optional")))
    assert answer.denied_response.status.code == 401


async def test_a_plane_takes_no_key_of_a_tenant_that_it_may_not_name(users):
    metadata = (*bearer(users.narrow), ("x-headway-user-keys", "optional"))
    answer = await check(users, {"authorization": f"Bearer {users.key}"}, metadata)
    assert (answer.denied_response.status.code, reason(answer)) == (403, "TENANT_NOT_ALLOWED")


async def test_a_revoked_key_stops_at_the_next_request(users):
    metadata = (*bearer(users.plane), ("x-headway-user-keys", "required"))
    shown = {"authorization": f"Bearer {users.key}"}
    assert (await check(users, shown, metadata)).HasField("ok_response")
    admin = await credential(users, "admin", Role.ADMIN)
    request = apb.RevokeCredentialRequest(name="credentials/globex-user")
    await users.admin.RevokeCredential(request, metadata=bearer(admin))
    assert (await check(users, shown, metadata)).denied_response.status.code == 401


async def test_our_own_tokens_never_reach_an_engine_whoever_sends_them(users):
    """Also where the plane knows no keys: a token of ours in the wrong header is a mistake, not the engine's to see."""
    for shown, stripped in ((f"Bearer {users.key}", True), (f"bearer  {users.plane}", True), ("Bearer sk-1", False)):
        answer = await check(users, {"authorization": shown}, bearer(users.plane))
        assert ("authorization" in answer.ok_response.headers_to_remove) == stripped


async def test_a_data_plane_learns_whose_keys_are_whose_and_only_its_own_tenants(users):
    hashes = [token_sha256(users.key), token_sha256("hw_wrong"), token_sha256(users.plane), b"", b"\0" * 99]
    told = {}
    for name, token in (("plane", users.plane), ("narrow", users.narrow)):
        answer = await users.router.IdentifyKeys(rpb.IdentifyKeysRequest(key_sha256=hashes), metadata=bearer(token))
        told[name] = [identity.tenant for identity in answer.identities]
        assert 0 < answer.valid_for.ToNanoseconds() <= 5e9
    assert told == {"plane": ["globex", "", "", "", ""], "narrow": [""] * 5}
    too_many = users.router.IdentifyKeys(rpb.IdentifyKeysRequest(key_sha256=[b""] * 1001), metadata=bearer(users.plane))
    assert (await refused(too_many)).reason == "INVALID_FIELD"


async def check(served, headers, metadata):
    """One request by the light picker."""
    request = authz.CheckRequest()
    http = request.attributes.request.http
    http.method, http.path, http.raw_body = "POST", "/v1/chat/completions", json.dumps(CHAT).encode()
    for name, value in headers.items():
        http.headers[name] = value
    return await external_auth_pb2_grpc.AuthorizationStub(served.channel).Check(request, metadata=metadata, timeout=15)


def reason(answer):
    return json.loads(answer.denied_response.body)["error"]["code"].upper()


async def bind_all(served):
    for tenant in ("acme", "globex"):
        await served.store.create(Binding(tenant, "all"), BY_HAND)
    await served.scheduler.refresh()


# Floods


async def test_oversized_metadata_is_refused_by_the_transport_and_hurts_nobody(served):
    huge = (("x-filler", "x" * 200_000),)
    for method in (served.fleet.WhoAmI, served.router.Report):
        empty = fpb.WhoAmIRequest() if method is served.fleet.WhoAmI else rpb.ReportRequest()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(empty, metadata=(*bearer(served.narrow), *huge), timeout=15)
        assert error.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    long_token = served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer("x" * 5000), timeout=15)
    assert (await refused(long_token)).reason in ("NO_CREDENTIAL", "TOO_MANY_FAILURES")
    me = await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(served.narrow), timeout=15)
    assert me.principal == "credentials/narrow"


async def test_a_thousand_wrong_tokens_at_once_and_good_calls_go_on(served):
    """All come from one address, as do the good calls, none of which is refused for it."""

    async def wrong(number):
        call = served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(f"hw_wrong-{number}"), timeout=60)
        return (await refused(call)).reason

    async def good():
        me = await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(served.narrow), timeout=60)
        report = await served.router.Report(rpb.ReportRequest(), metadata=bearer(served.narrow), timeout=60)
        return me.principal, len(report.results)

    with structlog.testing.capture_logs() as logs:
        flood = [asyncio.create_task(wrong(number)) for number in range(1000)]
        answers = await asyncio.gather(*(good() for _ in range(100)))
        reasons = await asyncio.gather(*flood)
    assert set(answers) == {("credentials/narrow", 0)}
    assert set(reasons) == {"NO_CREDENTIAL", "TOO_MANY_FAILURES"}
    counts = served.scheduler.authentication
    assert counts.failed + counts.limited == 1000
    failed = [entry for entry in logs if entry["event"] == "authentication_failed"]
    assert len(failed) == counts.failed < 200  # what is logged is bounded, too
    assert {entry["peer"] for entry in failed} == {"127.0.0.1"}
    assert "hw_wrong" not in str(logs)
    assert served.scheduler.fleet.nodes["n"].connected


async def test_connections_that_never_say_anything_leave_room_for_others(served):
    """A TCP connection without a handshake holds a socket and nothing else, until it is closed for its silence."""
    silent = [await asyncio.open_connection("127.0.0.1", served.server.port) for _ in range(50)]
    me = await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(served.narrow), timeout=15)
    assert me.role == "router"
    assert len(served.server.streams) == 1  # the agent's
    for _, writer in silent:
        writer.close()


def test_failures_are_counted_for_each_peer_alone_and_forgotten_in_time():
    now = [0.0]
    failures = Failures(6, lambda: now[0], AuthenticationCounts())
    wrong = NoCredential("x")
    answers = [type(failures.note(wrong, "a")) for _ in range(8)]
    assert answers == [NoCredential] * 6 + [TooManyFailures] * 2
    assert failures.note(wrong, "b") is wrong
    refusal = failures.note(wrong, "a")
    assert refusal.retry_after_s == pytest.approx(10.0)
    now[0] += 10.0
    assert failures.note(wrong, "a") is wrong
    assert isinstance(failures.note(wrong, "a"), TooManyFailures)


def test_no_number_of_peers_makes_it_remember_more_than_so_many():
    failures = Failures(1, lambda: 0.0, AuthenticationCounts())
    for number in range(MAX_PEERS + 100):
        failures.note(NoCredential("x"), f"10.0.{number >> 8}.{number & 255}")
    assert len(failures) == MAX_PEERS
