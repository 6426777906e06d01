"""THE table: each method of each service, each role, and each way not to have a credential. One server for all of it.

The methods are those of the services' descriptors: a new one is tested from its first day.
"""

import asyncio
import contextlib
import http.client
import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import grpc
import pytest
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.auth.v3 import external_auth_pb2
from envoy.service.discovery.v3 import ads_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from fakes.credentials import BY_HAND, bearer, make
from fakes.headway import connected_agent, running_scheduler
from fakes.postgres import create_database
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from headway.admin.v1 import admin_pb2
from headway.fleet.v1 import fleet_pb2
from headway.routing.v1 import routing_pb2
from headway.telemetry.v1 import telemetry_pb2
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.tokens import new_token, token_sha256
from headway_scheduler.rpc.authorization import OPEN, ROLES
from headway_scheduler.store.postgres import PostgresStore

FILES = (admin_pb2, fleet_pb2, routing_pb2, telemetry_pb2, external_processor_pb2, external_auth_pb2, als_pb2, ads_pb2)
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
METHODS = {f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods}
UNSERVED = {path for path in METHODS if path not in ROLES}
REFUSED = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
NOBODY = ("none", "malformed", "foreign", "expired", "revoked", "rotated away", "of another database")


@pytest.fixture(scope="module")
def server(postgres):
    """A scheduler that wants credentials, a channel to it, and the metadata of every kind of caller."""
    url = postgres.url_of(create_database(postgres, "security_table", template="migrated"))
    callers = asyncio.run(_callers(url))
    settings = {"require_credentials": True, "authentication_failures_per_minute": 1_000_000}
    with (
        running_scheduler(url, **settings) as running,
        grpc.insecure_channel(running.address, [("grpc.enable_http_proxy", 0)]) as channel,
        # A fleet that is not empty: who may watch it is told something at once.
        connected_agent(running.address, "n", ["10.0.0.1:8000"], metadata=callers["agent"]),
    ):
        yield SimpleNamespace(channel=channel, callers=callers, running=running)


async def _callers(url):
    store = PostgresStore(url)
    past = datetime.now(UTC) - timedelta(seconds=1)
    try:
        tokens = {role.value: await make(store, role.value, role) for role in Role}
        tokens["expired"] = await make(store, "expired", Role.ADMIN, expire_time=past)
        tokens["revoked"] = await make(store, "revoked", Role.ADMIN, revoked=True)
        old, new = new_token(), new_token()
        rotated = Credential("rotated", Role.ADMIN, token_sha256(old)).rotated(
            token_sha256(new), past - timedelta(hours=1), timedelta(minutes=1)
        )
        await store.create(rotated, BY_HAND)
        tokens["rotated away"] = old
    finally:
        await store.close()
    metadata = {name: bearer(token) for name, token in tokens.items()}
    metadata["none"] = ()
    metadata["malformed"] = (("authorization", "Basic YWRtaW46YWRtaW4="),)
    metadata["foreign"] = bearer("hw_" + "x" * 43)
    metadata["of another database"] = bearer(new_token())
    return metadata


def test_the_table_is_of_every_method_that_is_served(server):
    answers = reflection_pb2_grpc.ServerReflectionStub(server.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    (answer,) = answers
    served = {service.name for service in answer.list_services_response.service}
    known = {service.full_name for service in SERVICES}
    assert {name for name in served - known if not f"/{name}/".startswith(OPEN)} == set()
    assert set(METHODS) - UNSERVED == set(ROLES)


@pytest.mark.parametrize("path", sorted(METHODS))
@pytest.mark.parametrize("caller", NOBODY)
def test_without_a_credential_that_counts_nothing_is_answered(server, path, caller):
    expected = {"UNIMPLEMENTED", "UNAUTHENTICATED"} if path in UNSERVED else {"UNAUTHENTICATED"}
    assert outcome(server, path, caller) in expected


@pytest.mark.parametrize("path", sorted(ROLES))
@pytest.mark.parametrize("role", list(Role))
def test_each_role_may_do_what_it_may_and_nothing_else(server, path, role):
    found = outcome(server, path, role.value)
    if role in ROLES[path]:
        assert found not in REFUSED
    else:
        assert found == "PERMISSION_DENIED"


@pytest.mark.parametrize("caller", [*NOBODY, *(role.value for role in Role)])
def test_by_the_connect_protocol_the_table_is_the_same(server, caller):
    """Our services' methods over HTTP: what may be called is answered, and streams are said to be elsewhere."""
    found, expected = {}, {}
    with contextlib.closing(http.client.HTTPConnection(server.running.http, timeout=20)) as connection:
        for path in sorted(path for path in ROLES if path.startswith("/headway.")):
            method, code = METHODS[path], by_connect(connection, METHODS[path], path, server.callers[caller])
            streams = method.client_streaming or method.server_streaming
            if caller in NOBODY:
                expected[path] = "unauthenticated"
            elif Role(caller) not in ROLES[path]:
                expected[path] = "permission_denied"
            else:  # an empty request may be a wrong one, but its caller is right
                expected[path] = "unimplemented" if streams else "answered"
                code = "answered" if not streams and code not in ("unauthenticated", "permission_denied") else code
            found[path] = code
    assert found == expected


@pytest.mark.parametrize("path", sorted(path for path in METHODS if not path.startswith("/headway.")))
def test_others_services_are_not_served_by_it(server, path):
    with contextlib.closing(http.client.HTTPConnection(server.running.http, timeout=20)) as connection:
        assert by_connect(connection, METHODS[path], path, server.callers["admin"]) == "404"


def by_connect(connection, method, path, metadata):
    """The code that a call with an empty request is answered over HTTP; `OK`; an HTTP status where it has no code."""
    streams = method.client_streaming or method.server_streaming
    kind = "application/connect+proto" if streams else "application/proto"
    connection.request("POST", path, b"", {"Content-Type": kind, **{key.title(): value for key, value in metadata}})
    answer = connection.getresponse()
    body = answer.read()
    if streams and answer.status == 200:
        return json.loads(body[5:])["error"]["code"]
    if answer.getheader("Content-Type") == "application/json":
        return json.loads(body)["code"]
    return "OK" if answer.status == 200 else str(answer.status)


def outcome(server, path, caller):
    """How a call with an empty request ends: the name of a status, or what Envoy is told to answer as one."""
    method, metadata = METHODS[path], server.callers[caller]
    kinds = {(False, False): "unary_unary", (False, True): "unary_stream"}
    kinds |= {(True, False): "stream_unary", (True, True): "stream_stream"}
    kind = kinds[method.client_streaming, method.server_streaming]
    answers = GetMessageClass(method.output_type)
    call = getattr(server.channel, kind)(path, lambda _: b"", answers.FromString)
    request = iter([b""] if path.startswith("/envoy.service.ext_proc") else []) if method.client_streaming else b""
    try:
        answer = call(request, metadata=metadata, timeout=20)
        if method.server_streaming:
            answer = next(answer, None)
            if answer is None:
                return "OK"
    except grpc.RpcError as error:
        return error.code().name
    if isinstance(answer, external_processor_pb2.ProcessingResponse):
        return _of_http(answer.immediate_response.status.code)
    if isinstance(answer, external_auth_pb2.CheckResponse):
        return _of_http(answer.denied_response.status.code)
    return "OK"


def _of_http(status):
    return {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}.get(status, str(status))
