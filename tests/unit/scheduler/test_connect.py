"""Our services by the Connect protocol, on a real port, without a database."""

import asyncio
import gzip
import json
import struct
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from aiohttp import web
from fakes.connect import JSON, PROTO, connect_to
from fakes.rig import Rig, desired_state
from fakes.scheduler import finished, first_token
from fakes.waiting import eventually
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as pb
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.tokens import token_sha256
from headway_scheduler.http import HttpServer
from headway_scheduler.rpc.authentication import LOCAL, set_principal
from headway_scheduler.rpc.authorization import ROLES
from headway_scheduler.rpc.http_methods import ROUTE, HttpContext, HttpMethods

FLEET, ADMIN, TELEMETRY = "headway.fleet.v1.Fleet", "headway.admin.v1.Admin", "headway.telemetry.v1.Telemetry"
BODY = pb.RouteRequest(model="m", text="hello").SerializeToString()
BIG = pb.RouteRequest(model="m", text="x" * (1 << 20)).SerializeToString()


@pytest.fixture
async def rig():
    rig = Rig(desired_state("gpu_aware"))
    rig.endpoints(2)
    rig.full()
    return rig


@pytest.fixture
async def client(rig):
    async with connect_to(rig.scheduler) as client:
        yield client


def saturated(rig):
    """Both engines' caches are full: what comes is held."""
    rig.full(1, 2)


def freed(rig, *numbers):
    rig.full(*numbers)
    rig.dispatcher.run_pass(rig.clock.now)


# Success


async def test_a_request_is_routed_and_its_reports_end_it(client, rig):
    answer = await client.route(Connect_Protocol_Version="1")
    assert answer.endpoint.address in ("10.0.0.1:8000", "10.0.0.2:8000")
    assert list(rig.ledger.reservations) == [answer.reservation_id]
    end = finished(answer.reservation_id)
    assert await client.report(first_token(answer.reservation_id), end, end, finished("other")) == [
        "APPLIED",
        "APPLIED",
        "DUPLICATE",
        "UNKNOWN",
    ]
    assert rig.is_empty()


@pytest.mark.parametrize("content_type", [JSON, "application/json; charset=utf-8", "Application/JSON"])
async def test_json_is_the_protos_json_mapping(client, content_type):
    body = json.dumps({"model": "m", "text": "hello", "maxTokens": 5}).encode()
    async with client.post("Route", body, content_type=content_type) as found:
        assert (found.status, found.headers["Content-Type"]) == (200, JSON)
        assert (await found.json())["endpoint"]["node"] == "nodes/n"


async def test_every_unary_method_of_every_service_is_served(client):
    me = await client.call("WhoAmI", fpb.WhoAmIRequest(), fpb.WhoAmIResponse, service=FLEET)
    assert (me.principal, me.role) == ("local", "admin")
    async with client.post("ListTenants", b"{}", service=ADMIN, content_type=JSON) as found:
        assert [each["name"] for each in (await found.json())["tenants"]] == ["tenants/default"]
    methods = HttpMethods(Rig().scheduler, lambda _: "")
    ours = {path for path in ROLES if path.startswith("/headway.")}
    assert {*methods.unary, *methods.streaming} == ours


async def test_bodies_may_be_compressed(client):
    answer = await client.call("Route", _Raw(gzip.compress(BODY)), pb.RouteResponse, Content_Encoding="gzip")
    assert answer.reservation_id
    assert not (await client.call("Report", _Raw(b""), pb.ReportResponse, Content_Encoding="gzip")).results
    async with client.post("Route", gzip.compress(BODY), Content_Encoding="GZip", Accept_Encoding="gzip") as found:
        assert (found.status, found.headers.get("Content-Encoding")) == (200, None)


async def test_a_gzip_body_may_have_several_members(client, rig):
    whole = gzip.compress(BODY[:5]) + gzip.compress(BODY[5:])
    answer = await client.call("Route", _Raw(whole), pb.RouteResponse, Content_Encoding="gzip")
    assert answer.decision.prompt_tokens == (await client.route()).decision.prompt_tokens
    parts = b"".join(gzip.compress(BODY[number : number + 1]) for number in range(len(BODY)))
    assert len(BODY) <= 16
    assert (await client.call("Route", _Raw(parts), pb.RouteResponse, Content_Encoding="gzip")).reservation_id


class _Raw:
    def __init__(self, body):
        self.SerializeToString = lambda: body


async def test_a_body_in_parts_is_read_to_its_end(client):
    async def parts():
        for number in range(len(BODY)):
            yield BODY[number : number + 1]
            await asyncio.sleep(0)

    async with client.post("Route", parts()) as found:
        assert found.status == 200
        assert pb.RouteResponse.FromString(await found.read()).reservation_id


# Refusals


async def test_a_refusal_has_the_details_of_grpc(client):
    refusal = await client.refused("Route", pb.RouteRequest(model="nope", text="x").SerializeToString())
    assert (refusal.status, refusal.code, refusal.reason, refusal.field) == (
        404,
        "not_found",
        "UNKNOWN_MODEL",
        "model",
    )
    assert "'nope'" in refusal.message
    assert refusal.headers["x-headway-reason"] == "UNKNOWN_MODEL"


async def test_what_is_busy_says_when_to_come_back(client, rig):
    saturated(rig)
    body = json.dumps({"model": "m", "text": "x", "maxWait": "0s"}).encode()
    refusal = await client.refused("Route", body, content_type=JSON)
    assert (refusal.status, refusal.code, refusal.reason) == (429, "resource_exhausted", "SATURATED")
    assert refusal.retry_s > 0
    assert int(refusal.headers["Retry-After"]) >= 1


async def test_a_draining_scheduler_refuses_and_still_takes_reports(client, rig):
    answer = await client.route()
    rig.scheduler.drain()
    refusal = await client.refused("Route", BODY)
    assert (refusal.status, refusal.code, refusal.reason) == (503, "unavailable", "SHUTTING_DOWN")
    assert rig.scheduler.refusals == {"SHUTTING_DOWN": 1}
    assert await client.report(finished(answer.reservation_id)) == ["APPLIED"]


@pytest.mark.parametrize(
    ("body", "content_type", "field"),
    [
        (b"\xff\xff", PROTO, "body"),
        (b"{", JSON, "body"),
        (b"", JSON, "body"),
        (b'{"model": "m", "colour": 1}', JSON, "colour"),
        (b'{"model": "m", "maxTokens": -1}', JSON, "maxTokens"),
    ],
)
async def test_what_is_wrong_is_named(client, body, content_type, field):
    refusal = await client.refused("Route", body, content_type=content_type)
    assert (refusal.status, refusal.code, refusal.reason, refusal.field) == (
        400,
        "invalid_argument",
        "INVALID_FIELD",
        field,
    )


async def test_a_fault_of_ours_tells_nothing(client, rig):
    def break_down(*_):
        raise RuntimeError("the prompt was: hello")

    rig.scheduler.reporting = SimpleNamespace(apply=break_down)
    refusal = await client.refused("Report", pb.ReportRequest(reports=[finished("r")]).SerializeToString())
    assert (refusal.status, refusal.code, refusal.reason) == (500, "internal", "INTERNAL")
    assert "hello" not in refusal.message


# The protocol itself


@pytest.mark.parametrize("content_type", ["text/plain", "application/grpc", "application/connect+proto", ""])
async def test_another_content_type_is_not_supported(client, content_type):
    async with client.post("Route", BODY, content_type=content_type) as found:
        assert found.status == 415
        assert found.headers["Accept-Post"] == f"{PROTO}, {JSON}"


@pytest.mark.parametrize("verb", ["GET", "PUT"])
async def test_another_verb_is_not_allowed(client, verb):
    async with client.session.request(verb, f"{client.url}/headway.routing.v1.Router/Route") as found:
        assert found.status == 405
        assert found.headers["Allow"] == "POST"


async def test_another_version_is_refused(client):
    refusal = await client.refused("Route", BODY, Connect_Protocol_Version="2")
    assert (refusal.status, refusal.code) == (400, "invalid_argument")


@pytest.mark.parametrize(
    ("method", "service"), [("Rout", "headway.routing.v1.Router"), ("Route", "headway.routing.v2.Router")]
)
async def test_a_method_that_there_is_not_is_unimplemented(client, method, service):
    refusal = await client.refused(method, BODY, service=service)
    assert (refusal.status, refusal.code) == (501, "unimplemented")
    assert f"{service}/{method}" in refusal.message


@pytest.mark.parametrize("service", ["grpc.health.v1.Health", "envoy.service.auth.v3.Authorization"])
async def test_others_services_are_not_here(client, service):
    async with client.post("Check", b"", service=service) as found:
        assert found.status == 404


@pytest.mark.parametrize(
    ("method", "service"),
    [("RouteStream", "headway.routing.v1.Router"), ("WatchFleet", FLEET), ("Connect", TELEMETRY)],
)
async def test_streams_are_unimplemented_in_the_words_of_who_asks(client, method, service):
    refusal = await client.refused(method, b"{}", service=service, content_type=JSON)
    assert (refusal.status, refusal.code) == (501, "unimplemented")
    assert "served by gRPC" in refusal.message
    for codec in ("proto", "json"):
        kind = f"application/connect+{codec}"
        async with client.post(method, b"\0\0\0\0\0", service=service, content_type=kind) as found:
            assert (found.status, found.headers["Content-Type"]) == (200, kind)
            flag, length = struct.unpack(">BI", await found.content.readexactly(5))
            last = await found.content.readexactly(length)
            assert (flag, await found.content.read()) == (2, b"")
            assert json.loads(last)["error"]["code"] == "unimplemented"


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
async def test_an_encoding_that_there_is_not_is_unimplemented(client, encoding):
    refusal = await client.refused("Route", BODY, Content_Encoding=encoding)
    assert (refusal.status, refusal.code) == (501, "unimplemented")
    assert "gzip" in refusal.message


@pytest.mark.parametrize(
    "body",
    [
        b"this is no gzip",
        gzip.compress(BODY)[:-9],
        gzip.compress(BODY)[:4],
        gzip.compress(BODY) + b"more",
        gzip.compress(BODY) + gzip.compress(BODY)[:-9],
        gzip.compress(BODY) + b"\0",
        zlib.compress(BODY) + b"more",
        gzip.compress(BODY) + gzip.compress(b"") * 16,
    ],
)
async def test_a_body_that_is_not_encoded_as_it_says_is_the_callers_fault(client, body):
    refusal = await client.refused("Route", body, Content_Encoding="gzip")
    assert (refusal.status, refusal.code, refusal.field) == (400, "invalid_argument", "body")


async def test_a_message_over_the_limit_is_refused_however_it_comes():
    rig = Rig(max_message_bytes=1 << 20)
    rig.endpoints(1)

    async def endless():
        for _ in range(32):
            yield BIG[: 1 << 16]

    async with connect_to(rig.scheduler) as client:
        assert (await client.route(text="x" * 1_000_000)).reservation_id
        for body, headers in (
            (BIG, {}),
            (endless(), {}),
            (gzip.compress(BIG), {"Content_Encoding": "gzip"}),
            (gzip.compress(b"\0" * (64 << 20)), {"Content_Encoding": "gzip"}),
            (gzip.compress(BIG[: 1 << 19]) * 3, {"Content_Encoding": "gzip"}),
        ):
            refusal = await client.refused("Route", body, **headers)
            assert (refusal.status, refusal.code, refusal.retry_s) == (429, "resource_exhausted", None)


# Deadlines, and callers that leave


async def test_a_deadline_ends_a_hold_and_leaves_no_trace(client, rig):
    saturated(rig)
    refusal = await client.refused("Route", BODY, Connect_Timeout_Ms="400")
    assert (refusal.status, refusal.code) == (504, "deadline_exceeded")
    freed(rig)
    assert rig.is_empty()


async def test_the_decision_knows_the_deadline(client, rig):
    saturated(rig)
    call = asyncio.create_task(client.refused("Route", BODY, Connect_Timeout_Ms="20000"))
    await eventually(lambda: len(rig.dispatcher.holds) == 1)
    rig.pass_time(21.0)
    assert (await call).reason == "HOLD_EXPIRED"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("0", "deadline_exceeded"),
        ("-1", "invalid_argument"),
        ("soon", "invalid_argument"),
        ("1.5", "invalid_argument"),
        ("", "invalid_argument"),
        ("12345678901", "invalid_argument"),
    ],
)
async def test_a_deadline_is_a_number_of_milliseconds(client, rig, value, code):
    assert (await client.refused("Route", BODY, Connect_Timeout_Ms=value)).code == code
    assert (await client.route(Connect_Timeout_Ms="9999999999")).reservation_id
    assert len(rig.ledger.reservations) == 1


async def test_a_deadline_of_too_many_digits_is_said_to_be_too_long(client):
    refusal = await client.refused("Route", BODY, Connect_Timeout_Ms="99999999999")
    assert refusal.message == "Connect-Timeout-Ms: is too long, it has at most 10 digits"


async def test_a_held_call_is_answered_when_there_is_room(client, rig):
    saturated(rig)
    call = asyncio.create_task(client.route())
    await eventually(lambda: len(rig.dispatcher.holds) == 1)
    freed(rig, 2)
    assert (await call).endpoint.address == "10.0.0.1:8000"


async def test_a_held_call_that_is_abandoned_leaves_no_trace(client, rig, caplog):
    saturated(rig)
    call = asyncio.create_task(client.route())
    await eventually(lambda: len(rig.dispatcher.holds) == 1)
    call.cancel()
    await eventually(lambda: not len(rig.dispatcher.holds))
    freed(rig)
    assert rig.is_empty()
    assert not caplog.records


async def test_who_leaves_between_decision_and_answer_leaves_no_reservation(rig, caplog):
    """Its connection ends in the turn of the event loop that decides."""
    method = HttpMethods(rig.scheduler, lambda _: "").unary[ROUTE]
    reserved = []

    async def handle(request: web.Request) -> web.StreamResponse:
        set_principal(LOCAL)
        answer = await method.handle(pb.RouteRequest.FromString(BODY), HttpContext(None))
        reserved.extend(rig.ledger.reservations)
        request.transport.abort()
        return await method.deliver(request, web.Response(body=b"x"), answer)

    http = HttpServer(rig.scheduler, lambda router: router.add_post("/leaving", handle))
    await http.start("127.0.0.1:0")
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"POST /leaving HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    await http.stop()
    assert len(reserved) == 1
    assert rig.is_empty()
    assert not caplog.records


# Who calls


def holder(role, **fields):
    tenants = ("default",) if role is Role.ROUTER else ()
    return Credential(role.value, role, token_sha256(f"{role.value}-token"), tenants=tenants, **fields)


async def test_callers_and_roles_are_those_of_grpc():
    credentials = {each.id: each for each in (holder(Role.ROUTER), holder(Role.VIEWER))}
    rig = Rig(desired_state(credentials=credentials), require_credentials=True, authentication_failures_per_minute=2)
    rig.endpoints(1)
    async with connect_to(rig.scheduler) as client:
        assert (await client.refused("Route", BODY)).reason == "NO_CREDENTIAL"
        wrong = await client.refused("Route", BODY, Authorization="Bearer wrong")
        assert (wrong.status, wrong.code, wrong.reason) == (401, "unauthenticated", "NO_CREDENTIAL")
        again = await client.refused("Route", BODY, Authorization="Bearer wrong")
        assert (again.status, again.code, again.reason) == (429, "resource_exhausted", "TOO_MANY_FAILURES")
        viewer = await client.refused("Route", BODY, Authorization="Bearer viewer-token")
        assert (viewer.status, viewer.code, viewer.reason) == (403, "permission_denied", "NOT_PERMITTED")
        assert (await client.route(Authorization="Bearer router-token")).reservation_id
        named = pb.RouteRequest(model="m", text="x", tenant="acme").SerializeToString()
        other = await client.refused("Route", named, Authorization="Bearer router-token")
        assert other.reason == "TENANT_NOT_ALLOWED"
        past = datetime.now(UTC) - timedelta(seconds=1)
        rig.desire(credentials={"router": replace(credentials["router"], expire_time=past)})
        assert (await client.refused("Route", BODY, Authorization="Bearer router-token")).code in (
            "unauthenticated",
            "resource_exhausted",
        )


async def test_beyond_loopback_it_wants_tls(rig):
    rig.scheduler.config = rig.scheduler.config.model_copy(update={"listen_http": "0.0.0.0:1"})
    async with connect_to(rig.scheduler) as client:
        refusal = await client.refused("Route", BODY)
    assert (refusal.status, refusal.code, refusal.reason) == (403, "permission_denied", "NOT_PERMITTED")
