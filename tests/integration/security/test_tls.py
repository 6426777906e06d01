"""TLS: whom clients trust, whom the scheduler trusts, and certificates that are renewed while it runs."""

import asyncio
import itertools
import shutil
import ssl
from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc
import pytest
from fakes.credentials import BY_HAND, bearer, credential
from fakes.scheduler import serving
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.fleet.v1 import fleet_pb2_grpc
from headway.routing.v1 import routing_pb2 as rpb
from headway_agent.config import TlsSettings
from headway_agent.stream import Dialer
from headway_cli.errors import CliError
from headway_cli.session import Session
from headway_client import HeadwayClient
from headway_gateway.app import Gateway
from headway_gateway.config import GatewaySettings
from headway_scheduler.domain.desired import Role
from headway_scheduler.http import HttpServer

TLS = Path(__file__).parents[2] / "golden" / "tls"
SERVER = {"tls_certificate": TLS / "loopback-certificate.pem", "tls_key": TLS / "loopback-key.pem"}
MUTUAL = {**SERVER, "tls_client_ca": TLS / "client-ca.pem", "require_credentials": True}
AGENT = "spiffe://headway.test/agent/node-a"
ROUTER = "gateway.headway.test"
PATHS = ("/v1/report", "/headway.routing.v1.Router/Report")


def trusting(roots="loopback-certificate.pem", client=None):
    pair = (None, None) if client is None else ((TLS / f"{client}-key.pem").read_bytes(), _pem(client))
    return grpc.ssl_channel_credentials((TLS / roots).read_bytes(), *pair)


def _pem(client):
    return (TLS / f"{client}.pem").read_bytes()


async def who(port, credentials, token=None):
    """(principal, how it was known); the status where there is no answer."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        try:
            call = fleet_pb2_grpc.FleetStub(channel).WhoAmI
            me = await call(fpb.WhoAmIRequest(), metadata=bearer(token) if token else (), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return me.principal, me.shown


@pytest.fixture
async def mutual(database_url):
    async with serving(database_url, **MUTUAL) as served:
        await credential(served, "agent-a", Role.AGENT, node="node-a", certificate_identity=AGENT)
        await credential(served, "gateway", Role.ROUTER, certificate_identity=ROUTER)
        yield served


async def test_a_client_that_trusts_another_authority_sends_nothing(database_url):
    async with serving(database_url, **SERVER, require_credentials=True) as served:
        token = await credential(served, "viewer", Role.VIEWER)
        assert await who(served.server.port, trusting(), token) == ("credentials/viewer", "token")
        assert await who(served.server.port, trusting("client-ca.pem"), token) == "UNAVAILABLE"


async def test_a_certificate_stands_for_a_credential(mutual):
    port = mutual.server.port
    assert await who(port, trusting(client="client-agent")) == ("credentials/agent-a", "certificate")
    assert await who(port, trusting(client="client-router")) == ("credentials/gateway", "certificate")


async def test_a_certificate_that_stands_for_nobody_is_nobody(mutual):
    assert await who(mutual.server.port, trusting(client="client-unknown")) == "UNAUTHENTICATED"


async def test_another_authoritys_certificate_of_the_same_name_is_no_proof(mutual):
    """`client-foreign` says that it is agent-a; its authority is itself."""
    assert await who(mutual.server.port, trusting(client="client-foreign")) == "UNAVAILABLE"


async def test_without_a_certificate_a_token_is_not_enough_where_one_is_wanted(mutual):
    token = await credential(mutual, "viewer", Role.VIEWER)
    assert await who(mutual.server.port, trusting(), token) == "UNAVAILABLE"
    assert await who(mutual.server.port, trusting(client="client-unknown"), token) == ("credentials/viewer", "token")


async def test_certificates_may_have_a_port_of_their_own(database_url):
    async with serving(database_url, **MUTUAL, listen_mtls="127.0.0.1:0") as served:
        token = await credential(served, "viewer", Role.VIEWER, certificate_identity=ROUTER)
        assert await who(served.server.port, trusting(), token) == ("credentials/viewer", "token")
        assert await who(served.server.mtls_port, trusting(client="client-router")) == (
            "credentials/viewer",
            "certificate",
        )
        assert await who(served.server.mtls_port, trusting(), token) == "UNAVAILABLE"


async def test_a_revoked_credentials_certificate_counts_no_more(mutual):
    stream = trusting(client="client-router")
    async with grpc.aio.secure_channel(f"127.0.0.1:{mutual.server.port}", stream) as channel:
        routes = channel.stream_stream(
            "/headway.routing.v1.Router/RouteStream", None, rpb.RouteStreamResponse.FromString
        )()
        assert (await routes.read()).HasField("welcome")
        held = await mutual.store.load()

        await mutual.store.update(replace(held.credentials["gateway"], revoked=True), BY_HAND)
        await mutual.scheduler.refresh()
        assert await routes.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await who(mutual.server.port, stream) == "UNAUTHENTICATED"


async def test_a_renewed_certificate_is_served_without_a_restart(database_url, tmp_path):
    pair = {"tls_certificate": tmp_path / "certificate.pem", "tls_key": tmp_path / "key.pem"}
    shutil.copy(SERVER["tls_certificate"], pair["tls_certificate"])
    shutil.copy(SERVER["tls_key"], pair["tls_key"])
    async with serving(database_url, **pair, http_tls=True, require_credentials=True) as served:
        token, port = await credential(served, "viewer", Role.VIEWER), served.server.port
        http = HttpServer(served.scheduler)
        await http.start("127.0.0.1:0")
        good, old, new = ("credentials/viewer", "token"), trusting(), trusting("renewed-certificate.pem")
        assert (await who(port, old, token), await who(port, new, token)) == (good, "UNAVAILABLE")
        assert await healthy(http.port, "loopback-certificate.pem")
        # Half of the pair: what is there goes on.
        shutil.copy(TLS / "renewed-certificate.pem", pair["tls_certificate"])
        assert await who(port, old, token) == good
        assert await healthy(http.port, "loopback-certificate.pem")
        shutil.copy(TLS / "renewed-key.pem", pair["tls_key"])
        assert (await who(port, old, token), await who(port, new, token)) == ("UNAVAILABLE", good)
        assert await healthy(http.port, "renewed-certificate.pem")
        assert not await healthy(http.port, "loopback-certificate.pem")
        await http.stop()


async def healthy(port, roots):
    context = ssl.create_default_context(cafile=TLS / roots)
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"https://127.0.0.1:{port}/healthz", ssl=context) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectorCertificateError:
            return False


async def test_http_knows_certificates_too(mutual):
    mutual.scheduler.config = mutual.scheduler.config.model_copy(update={"http_tls": True})
    http = HttpServer(mutual.scheduler)
    await http.start("127.0.0.1:0")
    statuses = {}
    for path, client in itertools.product(PATHS, (None, "client-router", "client-unknown")):
        context = ssl.create_default_context(cafile=TLS / "loopback-certificate.pem")
        if client is not None:
            context.load_cert_chain(TLS / f"{client}.pem", TLS / f"{client}-key.pem")
        async with aiohttp.ClientSession() as session:
            url = f"https://127.0.0.1:{http.port}{path}"
            async with session.post(url, json={"reports": []}, ssl=context) as answer:
                statuses[path, client] = answer.status
    await http.stop()
    expected = {None: 401, "client-router": 200, "client-unknown": 401}
    assert statuses == {(path, client): status for path in PATHS for client, status in expected.items()}


async def test_a_page_of_another_site_makes_no_use_of_a_browsers_certificate(mutual):
    mutual.scheduler.config = mutual.scheduler.config.model_copy(update={"http_tls": True})
    http = HttpServer(mutual.scheduler)
    await http.start("127.0.0.1:0")
    context = ssl.create_default_context(cafile=TLS / "loopback-certificate.pem")
    context.load_cert_chain(TLS / "client-router.pem", TLS / "client-router-key.pem")
    statuses = {}
    async with aiohttp.ClientSession() as session:
        for path, origin in itertools.product(PATHS, ("https://headway:7071", "https://evil.example")):
            headers = {"Host": "headway:7071", "Origin": origin}
            url = f"https://127.0.0.1:{http.port}{path}"
            async with session.post(url, json={"reports": []}, headers=headers, ssl=context) as answer:
                statuses[path, origin] = answer.status
    await http.stop()
    assert list(statuses.values()) == [200, 403] * len(PATHS)


async def test_agent_client_gateway_and_command_line_show_certificates(mutual):
    port = mutual.server.port
    target = f"127.0.0.1:{port}"
    tls = TlsSettings(
        ca_file=SERVER["tls_certificate"], cert_file=TLS / "client-agent.pem", key_file=TLS / "client-agent-key.pem"
    )
    async with Dialer(tls, lambda: "").channel(target) as channel:
        me = await fleet_pb2_grpc.FleetStub(channel).WhoAmI(fpb.WhoAmIRequest(), timeout=10)
        assert (me.principal, me.node) == ("credentials/agent-a", "nodes/node-a")
    async with HeadwayClient([target], credentials=lambda: trusting(client="client-router")) as client:
        await client.wait_connected()
    settings = GatewaySettings(
        port=0,
        schedulers=[target],
        scheduler_ca=SERVER["tls_certificate"],
        scheduler_certificate=TLS / "client-router.pem",
        scheduler_key=TLS / "client-router-key.pem",
    )
    async with Gateway(settings) as gateway:
        await gateway.client.wait_connected()


async def test_the_command_line_shows_a_certificate(mutual):

    def whoami(client):
        session = Session(
            f"127.0.0.1:{mutual.server.port}",
            ca=str(SERVER["tls_certificate"]),
            certificate=str(TLS / f"{client}.pem"),
            key=str(TLS / f"{client}-key.pem"),
        )
        with session.client() as calls:
            return calls.call(calls.fleet.WhoAmI, fpb.WhoAmIRequest()).principal

    assert await asyncio.to_thread(whoami, "client-agent") == "credentials/agent-a"
    with pytest.raises(CliError) as refused:
        await asyncio.to_thread(whoami, "client-unknown")
    assert refused.value.reason == "NO_CREDENTIAL"
