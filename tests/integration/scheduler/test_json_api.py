"""Route and Report as HTTP/JSON, over real sockets."""

import asyncio
import contextlib
import hashlib
import io
import ssl
from pathlib import Path

import aiohttp
import pytest
from fakes.scheduler import Served, endpoint, serving
from fakes.waiting import eventually
from headway_scheduler.config import Config
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.http import HttpServer
from headway_scheduler.store.base import Write

TLS = Path(__file__).parents[2] / "golden" / "tls"
ROUTER = {"Authorization": "Bearer router-token-0123456789"}


class Api:
    """A caller that speaks HTTP/JSON to one scheduler."""

    def __init__(self, served: Served, session: aiohttp.ClientSession, url: str) -> None:
        self.served, self.session, self.url = served, session, url

    def post(self, path, body, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        how = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        return self.session.post(f"{self.url}/v1/{path}", headers=headers, **how)

    async def route(self, body, **headers):
        async with self.post("route", body, **headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def report(self, *reports):
        async with self.post("report", {"reports": reports}) as answer:
            assert answer.status == 200, await answer.text()
            return [result["status"] for result in (await answer.json())["results"]]

    async def refused(self, path, body, **headers):
        """Status, reason, and the error."""
        async with self.post(path, body, **headers) as answer:
            error = (await answer.json())["error"]
            (info,) = [d for d in error["details"] if d["@type"].endswith("ErrorInfo")]
            assert info["reason"] == answer.headers["x-headway-reason"]
            return answer.status, info["reason"], info.get("metadata", {}).get("field"), answer.headers


@contextlib.asynccontextmanager
async def api_of(served):
    http = HttpServer(served.scheduler)
    await http.start("127.0.0.1:0")
    async with aiohttp.ClientSession() as session:
        try:
            yield Api(served, session, f"http://127.0.0.1:{http.port}")
        finally:
            await http.stop()


@pytest.fixture
async def api(database_url):
    async with serving(database_url) as served, api_of(served) as made:
        await served.agent()
        yield made


async def full(served):
    """Both engines' caches are full: what comes is held."""
    await served.bind("gpu_aware")
    agent = await served.agent("n", endpoint(1), endpoint(2), instance="i1")
    await agent.kv_use(e1=0.99, e2=0.99)
    return agent


async def test_a_request_is_routed_and_its_report_ends_it(api):
    answer = await api.route({"model": "m", "text": "hello", "maxTokens": 5, "priority": "PRIORITY_STANDARD"})
    assert answer["endpoint"]["address"] in ("10.0.0.1:8000", "10.0.0.2:8000")
    assert [each["address"] for each in answer["fallbacks"]] == [
        address for address in ("10.0.0.1:8000", "10.0.0.2:8000") if address != answer["endpoint"]["address"]
    ]
    assert answer["reservationTtl"].endswith("s")
    reservation = answer["reservationId"]
    assert list(api.served.reservations) == [reservation]
    finished = {"outcome": "OUTCOME_SUCCESS", "usage": {"completionTokens": 3}}
    told = await api.report(
        {"reservation_id": reservation, "first_token": {"ttft_ms": 12.5}},
        {"reservationId": reservation, "finished": finished},
        {"reservationId": reservation, "finished": finished},
        {"reservationId": "other", "progress": {}},
        {"reservationId": reservation},
    )
    assert told == [f"REPORT_STATUS_{what}" for what in ("APPLIED", "APPLIED", "DUPLICATE", "UNKNOWN", "INVALID")]
    assert not api.served.reservations


@pytest.mark.parametrize(
    ("body", "status", "reason", "field"),
    [
        ({"model": "nope", "text": "x"}, 404, "UNKNOWN_MODEL", "model"),
        ({"text": "x"}, 400, "INVALID_FIELD", "model"),
        ({"model": "m", "tenant": "nobody"}, 404, "UNKNOWN_TENANT", "tenant"),
        ({"model": "m", "colour": 1}, 400, "INVALID_FIELD", "colour"),
        (
            {"model": "m", "chat": {"messages": [{}, {"contant": "x"}]}},
            400,
            "INVALID_FIELD",
            "chat.messages[1].contant",
        ),
        ({"model": "m", "chat": {"messages": [{"role": 3}]}}, 400, "INVALID_FIELD", "messages.role"),
        ({"model": "m", "maxTokens": -1}, 400, "INVALID_FIELD", "maxTokens"),
        ({"model": "m", "maxWait": "soon"}, 400, "INVALID_FIELD", "maxWait"),
        ({"model": "m", "text": "a", "tokens": {"ids": [1]}}, 400, "INVALID_FIELD", "body"),
        (b"[1]", 400, "INVALID_FIELD", "body"),
        (b"{", 400, "INVALID_FIELD", "body"),
        (b"[" * 100_000, 400, "INVALID_FIELD", "body"),
        (b'{"model": "\xff"}', 400, "INVALID_FIELD", "body"),
        (b'{"model": "\\ud800"}', 400, "INVALID_FIELD", "body"),
        (b'{"\\ud800": 1}', 400, "INVALID_FIELD", "body"),
        (b'{"model": "m", "maxWait": "\\ud800s"}', 400, "INVALID_FIELD", "body"),
        (b'{"model": "m", "maxTokens": 99999999999999999999}', 400, "INVALID_FIELD", "maxTokens"),
    ],
)
async def test_what_is_wrong_is_named(api, body, status, reason, field):
    assert (await api.refused("route", body))[:3] == (status, reason, field)
    assert not api.served.reservations


async def test_token_ids_as_numbers_and_as_json_has_64_bits(api):
    plain = await api.route({"model": "m", "tokens": {"ids": list(range(300))}})
    quoted = await api.route({"model": "m", "tokens": {"ids": [str(each) for each in range(300)]}})
    assert plain["decision"]["promptTokens"] == quoted["decision"]["promptTokens"] == 300


async def test_a_body_that_is_not_encoded_as_it_says_is_the_callers_fault(api):
    refused = await api.refused("route", b"this is no gzip", Content_Encoding="gzip")
    assert refused[:3] == (400, "INVALID_FIELD", "body")


async def test_what_is_busy_says_when_to_come_back(api):
    await full(api.served)
    status, reason, _, headers = await api.refused("route", {"model": "m", "text": "x", "maxWait": "0s"})
    assert (status, reason) == (429, "SATURATED")
    assert int(headers["Retry-After"]) >= 1


async def test_the_callers_own_deadline_bounds_the_hold(api):
    await full(api.served)
    status, reason, *_ = await api.refused("route", {"model": "m", "text": "x"}, X_Headway_Timeout_S="0.3")
    assert (status, reason) == (429, "HOLD_EXPIRED")
    for wrong in ("-1", "soon", "nan", "inf"):
        refused = await api.refused("route", {"model": "m"}, X_Headway_Timeout_S=wrong)
        assert refused[:3] == (400, "INVALID_FIELD", "X-Headway-Timeout-S")


async def test_a_held_call_that_is_abandoned_leaves_no_trace(api):
    agent = await full(api.served)
    holds = api.served.scheduler.dispatcher.holds
    call = asyncio.create_task(api.route({"model": "m", "text": "x"}))
    await eventually(lambda: len(holds) == 1)
    call.cancel()
    await eventually(lambda: not len(holds))
    await agent.kv_use(e1=0.1, e2=0.1)
    await api.route({"model": "m", "text": "x"})
    assert len(api.served.reservations) == 1


async def test_a_held_call_is_answered_when_there_is_room(api):
    agent = await full(api.served)
    call = asyncio.create_task(api.route({"model": "m", "text": "x"}))
    await eventually(lambda: len(api.served.scheduler.dispatcher.holds) == 1)
    await agent.kv_use(e1=0.1, e2=0.99)
    assert (await call)["endpoint"]["address"] == "10.0.0.1:8000"


async def test_a_draining_scheduler_refuses_and_still_takes_reports(api):
    answer = await api.route({"model": "m", "text": "x"})
    api.served.scheduler.drain()
    assert (await api.refused("route", {"model": "m"}))[:2] == (503, "SHUTTING_DOWN")
    finished = {"reservationId": answer["reservationId"], "finished": {"outcome": "OUTCOME_SUCCESS"}}
    assert await api.report(finished) == ["REPORT_STATUS_APPLIED"]


async def test_too_many_reports_are_refused(api):
    assert (await api.refused("report", {"reports": [{}] * 10_001}))[:3] == (400, "INVALID_FIELD", "reports")


def big(size):
    return b'{"model": "m", "text": "' + b"x" * size + b'"}'


async def test_a_body_over_the_limit_is_413(database_url):
    async with serving(database_url, max_message_bytes=1 << 20) as served, api_of(served) as api:
        await served.agent()
        async with api.post("route", big(900_000)) as answer:
            assert answer.status == 200
        told = await api.refused("route", big(1 << 20))
        assert told[:3] == (413, "INVALID_FIELD", "body")

        async def endless():
            yield b'{"model": "m", "text": "'
            for _ in range(32):
                yield b"x" * 65_536

        async with api.session.post(f"{api.url}/v1/route", data=endless()) as answer:
            assert answer.status == 413


async def test_with_http_tls_it_speaks_https(database_url):
    pair = {"tls_certificate": TLS / "loopback-certificate.pem", "tls_key": TLS / "loopback-key.pem"}
    trusting = ssl.create_default_context(cafile=pair["tls_certificate"])
    async with serving(database_url) as served:
        await served.agent()
        served.scheduler.config = Config(**pair, http_tls=True)
        async with (
            api_of(served) as api,
            api.session.post(
                f"{api.url.replace('http', 'https')}/v1/route", json={"model": "m"}, ssl=trusting
            ) as answer,
        ):
            assert answer.status == 200


async def test_callers_and_roles_are_those_of_grpc(database_url):
    async with serving(database_url, require_credentials=True) as served, api_of(served) as api:
        for name, role, tenants in (("router", Role.ROUTER, ("default",)), ("viewer", Role.VIEWER, ())):
            digest = hashlib.sha256(f"{name}-token-0123456789".encode()).digest()
            credential = Credential(name, role, digest, tenants=tenants)
            await served.store.create(credential, Write(principal="test", method="Create"))
        await served.scheduler.refresh()
        body = {"model": "m", "text": "x"}
        assert (await api.refused("route", body))[:2] == (401, "NO_CREDENTIAL")
        assert (await api.refused("report", {}, Authorization="Bearer wrong"))[:2] == (401, "NO_CREDENTIAL")
        viewer = {"Authorization": "Bearer viewer-token-0123456789"}
        assert (await api.refused("route", body, **viewer))[:2] == (403, "NOT_PERMITTED")
        assert (await api.refused("route", body, **ROUTER))[:2] == (404, "UNKNOWN_MODEL")
        named = {**body, "tenant": "acme"}
        assert (await api.refused("route", named, **ROUTER))[:2] == (403, "TENANT_NOT_ALLOWED")


@pytest.mark.parametrize(
    ("settings", "private"),
    [
        ({}, True),
        ({"listen_http": "0.0.0.0:1", "insecure": True}, True),
        ({"listen_http": "0.0.0.0:1"}, False),
        ({"listen_http": "0.0.0.0:1", "http_tls": True}, True),
    ],
)
def test_beyond_loopback_it_wants_tls(settings, private, tmp_path):
    for name in ("certificate", "key"):
        (tmp_path / name).touch()
    pair = {"tls_certificate": tmp_path / "certificate", "tls_key": tmp_path / "key"}
    config = Config(HEADWAY_DATABASE_URL="postgresql://db/x", **pair, **settings)
    assert config.http_is_private is private
