"""Pages of other sites, in the browser of someone who may call without a credential, call nothing."""

import asyncio
import json

import pytest
from fakes.connect import JSON, connect_to
from fakes.rig import Rig, desired_state
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.tokens import token_sha256

ADMIN = "headway.admin.v1.Admin"
TENANT = json.dumps({"tenant": {"name": "tenants/pwned"}}).encode()
ROUTE = json.dumps({"model": "m", "text": "hello"}).encode()
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
REPORT = json.dumps({"reports": []}).encode()
DOORS = {
    f"/{ADMIN}/CreateTenant": TENANT,
    f"/{ADMIN}/ListTenants": b"{}",
    "/headway.routing.v1.Router/Route": ROUTE,
    "/headway.routing.v1.Router/RouteStream": b"",
    "/v1/route": ROUTE,
    "/v1/report": REPORT,
}
FOREIGN = (
    {"Host": "evil.example", "Origin": "http://evil.example"},  # its name resolves to 127.0.0.1
    {"Host": "evil.example:7071"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "10.0.0.1:7071"},
    {"Host": ""},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
)


def rig(**config):
    credential = Credential("router", Role.ROUTER, token_sha256("a-token"), tenants=("default",))
    rig = Rig(desired_state(credentials={"router": credential}), **config)
    rig.endpoints(1)
    return rig


@pytest.fixture
async def client():
    async with connect_to(rig().scheduler) as client:
        yield client


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("path", DOORS)
async def test_without_a_credential_a_foreign_page_is_refused_at_every_door(client, path, headers):
    for content_type in (JSON, "text/plain"):  # a browser asks nobody before it sends the latter
        sent = {"Content-Type": content_type, **headers}
        async with client.session.post(client.url + path, data=DOORS[path], headers=sent) as answer:
            assert (answer.status, "FOREIGN_ORIGIN" in await answer.text()) == (403, True)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:7071", "127.0.0.1:7071", "127.0.0.2:80", "[::1]", "[::1]:7071"]
)
@pytest.mark.parametrize("path", ["/headway.routing.v1.Router/Route", "/v1/route"])
async def test_under_this_hosts_own_names_it_answers(client, path, host):
    for origin in ({}, {"Origin": f"http://{host}"}, {"Sec-Fetch-Site": "none"}):
        sent = {"Content-Type": JSON, "Host": host, **origin}
        async with client.session.post(client.url + path, data=ROUTE, headers=sent) as answer:
            assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("path", ["/headway.routing.v1.Router/Route", "/v1/route"])
async def test_who_shows_a_token_may_use_any_name(path, required):
    async with connect_to(rig(require_credentials=required).scheduler) as client:
        for name in ({"Host": "headway.default.svc:7071"}, {"Origin": "https://app.example"}):
            sent = {"Content-Type": JSON, "Authorization": "Bearer a-token", **name}
            async with client.session.post(client.url + path, data=ROUTE, headers=sent) as answer:
                assert answer.status == 200, await answer.text()


async def test_envoy_asks_about_requests_to_other_hosts_and_of_other_origins(client):
    headers = {"Host": "api.example.com", "Origin": "https://app.example", "x-headway-model": "m"}
    path = "/ext_authz/v1/chat/completions"
    async with client.session.post(client.url + path, data=CHAT, headers=headers) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize(
    "host", ["::1", "[::2]", "127.0.0.1.", "localhost.evil.example", "0.0.0.0", "[", ":", "localhost@x", "2130706433"]
)
async def test_only_what_nobody_else_can_be_called_is_this_host(client, host):
    headers = {"Content-Type": JSON, "Host": host}
    async with client.session.post(f"{client.url}/v1/route", data=ROUTE, headers=headers) as answer:
        assert answer.status == 403


async def test_a_caller_without_a_host_is_no_browser(client):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
    writer.write(b"POST /v1/route HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(ROUTE), ROUTE))
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_an_open_scheduler_beyond_loopback_answers_under_any_name():
    """Its callers say the name of a service; `insecure` says that nobody else gets there."""
    config = {"listen_http": "0.0.0.0:0", "insecure": True, "require_credentials": False}
    async with connect_to(rig(HEADWAY_DATABASE_URL="postgresql://db/x", **config).scheduler) as client:
        sent = {"Content-Type": JSON, "Host": "headway.svc:7071"}
        async with client.session.post(f"{client.url}/v1/route", data=ROUTE, headers=sent) as answer:
            assert answer.status == 200
        async with client.session.post(
            f"{client.url}/v1/route", data=ROUTE, headers={**sent, "Origin": "http://evil.example"}
        ) as answer:
            assert answer.status == 403
