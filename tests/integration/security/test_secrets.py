"""No token and no prompt in logs, errors, the audit trail, metrics, Fleet or the database, however much is logged."""

import io
import logging

import aiohttp
import grpc
import pytest
import structlog
from fakes.credentials import bearer, credential
from fakes.postgres import connect
from fakes.scheduler import Stream, endpoint, refused, serving
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as rpb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.tokens import token_sha256
from headway_scheduler.http import HttpServer
from headway_scheduler.serve import configure_logging

PROMPT = "the quick brown fox of marker 7f3a"
WRONG = "hw_wrong-token-of-marker-91c2"


@pytest.fixture
def log(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG)
    configure_logging("debug")
    yield stream
    structlog.reset_defaults()
    logging.getLogger().removeHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)


async def test_no_token_and_no_prompt_is_written_anywhere(database_url, log, capfd):
    said = []
    async with serving(database_url, require_credentials=True, log_level="debug") as served:
        tokens = {
            "admin": await credential(served, "admin", Role.ADMIN),
            "agent": await credential(served, "agent", Role.AGENT),
            "router": await credential(served, "router", Role.ROUTER),
            "user": await credential(served, "user", Role.TENANT),
        }
        admin, router = bearer(tokens["admin"]), bearer(tokens["router"])
        agent = served.telemetry.Connect(metadata=bearer(tokens["agent"]))
        await agent.write(tpb.ConnectRequest(hello=tpb.Hello(node="n", instance_id="i", endpoints=[endpoint(1)])))
        await agent.read()
        # Made and rotated on the way: their tokens are answered, and nowhere else.
        made = await served.admin.CreateCredential(
            apb.CreateCredentialRequest(credential=apb.Credential(name="credentials/made", role=apb.ROLE_VIEWER)),
            metadata=admin,
        )
        rotated = await served.admin.RotateCredential(
            apb.RotateCredentialRequest(name="credentials/made", overlap={"seconds": 60}), metadata=admin
        )
        tokens |= {"made": made.token, "rotated": rotated.token}
        # Right and wrong calls, by each door.
        route = rpb.RouteRequest(model="m", text=PROMPT * 20)
        said.append(await served.router.Route(route, metadata=router))
        said.append(await served.router.Explain(rpb.ExplainRequest(request=route), metadata=router))
        stream = Stream(served.router.RouteStream(metadata=router))
        await stream.route(1, text=PROMPT)
        said.append(str(await stream.answered(1)))
        keys = [token_sha256(tokens["user"]), token_sha256(WRONG)]
        said.append(await served.router.IdentifyKeys(rpb.IdentifyKeysRequest(key_sha256=keys), metadata=router))
        for metadata in (bearer(WRONG), (("authorization", f"Basic {WRONG}"),), bearer(tokens["user"])):
            error = await refused(served.router.Route(route, metadata=metadata))
            said.append(f"{error.message} {error.facts}")
        for wrong in ({"model": PROMPT}, {"tenant": "globex"}, {"adapter": PROMPT * 30}):
            request = rpb.RouteRequest(text=PROMPT, **({"model": "m"} | wrong))
            error = await refused(served.router.Route(request, metadata=router))
            said.append("" if "model" in wrong else f"{error.message} {error.facts}")  # a model's name is no prompt
        said.append(await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=router))
        said.append(await served.fleet.GetStatus(fpb.GetStatusRequest(), metadata=admin))
        said.append(await served.admin.ListCredentials(apb.ListCredentialsRequest(), metadata=admin))
        said.append(await served.admin.ListAuditEntries(apb.ListAuditEntriesRequest(page_size=1000), metadata=admin))
        await served.admin.RevokeCredential(apb.RevokeCredentialRequest(name="credentials/router"), metadata=admin)
        assert (await refused(stream.reader)).reason == "NO_CREDENTIAL"
        http = HttpServer(served.scheduler)
        await http.start("127.0.0.1:0")
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{http.port}"
            headers = {"Authorization": f"Bearer {WRONG}"}
            for path in ("v1/route", "headway.routing.v1.Router/Route"):
                body = {"model": "m", "text": PROMPT}
                async with session.post(f"{url}/{path}", json=body, headers=headers) as answer:
                    assert answer.status == 401
                    said.append(await answer.text())
            async with session.get(f"{url}/metrics") as answer:
                said.append(await answer.text())
        await http.stop()
        await agent.write(tpb.ConnectRequest(hello=tpb.Hello(node="x", instance_id="i")))
        assert await agent.code() is grpc.StatusCode.INVALID_ARGUMENT
    written = log.getvalue() + "".join(capfd.readouterr())
    assert "authentication_failed" in written  # it did write
    assert "stream_ended" in written
    everything = [written, database_text(database_url), *map(str, said)]
    secrets = [*tokens.values(), WRONG, "marker-91c2"]
    assert [secret[:6] for secret in secrets for text in everything if secret in text] == []
    assert [text[:80] for text in everything if PROMPT in text] == []


def database_text(url):
    """Every row of every table, as text."""
    with connect(url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        return "".join(
            str(connection.execute(f'SELECT t::text FROM "{table}" t'.encode()).fetchall()) for (table,) in tables
        )


def test_values_that_hold_secrets_do_not_print_them():
    from headway_scheduler.rpc.authentication import Identity, principal_of

    held = Credential("c", Role.VIEWER, token_sha256(WRONG))
    assert WRONG not in repr(held)
    assert WRONG not in repr(Identity(principal_of(held), proof=f"Bearer {WRONG}"))
