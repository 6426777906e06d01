# ruff: noqa: N802 -- gRPC's method names
"""Authentication, authorisation and errors around real handlers of every kind."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
import structlog
from fakes.admin_server import AdminServer, admin_server, error_info, status_of
from fakes.waiting import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from headway.admin.v1 import admin_pb2
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1.routing_pb2_grpc import RouterServicer, RouterStub, add_RouterServicer_to_server
from headway_scheduler.errors import Saturated
from headway_scheduler.rpc.authentication import current_principal

SECRET = "a prompt that no log may hold"


class Router(RouterServicer):
    """Raises what the model's name says."""

    def __init__(self) -> None:
        self.started = False
        self.cancelled = False

    async def Route(self, request, context):
        match request.model:
            case "who":
                return pb.RouteResponse(request_id=current_principal().id)
            case "busy":
                raise Saturated("all endpoints are busy", retry_after_s=3.0)
            case "hang":
                self.started = True
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    self.cancelled = True
                    raise
            case "abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
        raise ValueError(f"cannot route {request.text}")

    async def RouteStream(self, request_iterator, context):
        yield pb.RouteStreamResponse(welcome=pb.StreamWelcome(scheduler=current_principal().id))
        async for message in request_iterator:
            if message.cancels:
                raise Saturated("all endpoints are busy")
            yield pb.RouteStreamResponse(draining=True)

    async def Report(self, request, context):
        raise NotImplementedError

    async def Resume(self, request, context):
        raise NotImplementedError

    async def Explain(self, request, context):
        raise NotImplementedError


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
async def strict(database_url: str, router: Router) -> AsyncIterator[AdminServer]:
    """A server that requires credentials, with Admin, Router, health and reflection."""

    def register(server: grpc.aio.Server) -> None:
        add_RouterServicer_to_server(router, server)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        reflection.enable_server_reflection(["headway.routing.v1.Router", reflection.SERVICE_NAME], server)

    async with admin_server(database_url, required=True, register=register) as running:
        yield running


@pytest.fixture
async def relaxed(database_url: str, router: Router) -> AsyncIterator[AdminServer]:
    def register(server: grpc.aio.Server) -> None:
        add_RouterServicer_to_server(router, server)

    async with admin_server(database_url, required=False, register=register) as running:
        yield running


async def token(server: AdminServer, role: int, **more: object) -> tuple[tuple[str, str], ...]:
    """Metadata with a fresh credential, made behind the server's back."""
    async with admin_server(server.store._database.url.render_as_string(hide_password=False)) as local:
        credential = admin_pb2.Credential(name=f"credentials/role-{role}", role=role, **more)
        made = await local.admin.CreateCredential(admin_pb2.CreateCredentialRequest(credential=credential))
    await server.refresh()
    return (("authorization", f"Bearer {made.token}"),)


async def refused(awaitable, code: grpc.StatusCode, reason: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await awaitable
    assert (error.value.code(), error_info(error.value).reason) == (code, reason)
    return error.value


async def test_beyond_loopback_a_credential_is_required(strict: AdminServer) -> None:
    route = RouterStub(strict.channel).Route
    who = pb.RouteRequest(model="who")
    await refused(route(who), grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")
    wrong = (("authorization", "Bearer hw_wrong"),)
    await refused(route(who, metadata=wrong), grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")
    router = await token(strict, admin_pb2.ROLE_ROUTER, tenants=["default"])
    assert (await route(who, metadata=router)).request_id == f"role-{admin_pb2.ROLE_ROUTER}"


async def test_roles_are_enforced_before_the_request_is_looked_at(strict: AdminServer) -> None:
    viewer = await token(strict, admin_pb2.ROLE_VIEWER)
    listing = strict.admin.ListTenants(admin_pb2.ListTenantsRequest(), metadata=viewer)
    assert (await listing).tenants
    invalid = strict.admin.CreateTenant(admin_pb2.CreateTenantRequest(), metadata=viewer)
    error = await refused(invalid, grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED")
    assert error_info(error).metadata["role"] == "viewer"
    routing = RouterStub(strict.channel).Route(pb.RouteRequest(model="who"), metadata=viewer)
    await refused(routing, grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED")


async def test_a_revoked_credential_stops_at_once(strict: AdminServer) -> None:
    admin = await token(strict, admin_pb2.ROLE_ADMIN)
    name = f"credentials/role-{admin_pb2.ROLE_ADMIN}"
    await strict.admin.RevokeCredential(admin_pb2.RevokeCredentialRequest(name=name), metadata=admin)
    again = strict.admin.ListTenants(admin_pb2.ListTenantsRequest(), metadata=admin)
    await refused(again, grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")


async def test_health_and_reflection_are_open(strict: AdminServer) -> None:
    stub = health_pb2_grpc.HealthStub(strict.channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    reflected = reflection_pb2_grpc.ServerReflectionStub(strict.channel).ServerReflectionInfo()
    await reflected.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await reflected.read()
    assert "headway.routing.v1.Router" in {service.name for service in answer.list_services_response.service}
    await reflected.done_writing()


async def test_on_loopback_a_caller_without_credential_is_local(relaxed: AdminServer) -> None:
    route = RouterStub(relaxed.channel).Route
    assert (await route(pb.RouteRequest(model="who"))).request_id == "local"
    wrong = route(pb.RouteRequest(model="who"), metadata=(("authorization", "Bearer hw_wrong"),))
    await refused(wrong, grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")


async def test_what_a_handler_raises_is_answered(relaxed: AdminServer) -> None:
    route = RouterStub(relaxed.channel).Route
    error = await refused(route(pb.RouteRequest(model="busy")), grpc.StatusCode.RESOURCE_EXHAUSTED, "SATURATED")
    assert len(status_of(error).details) == 2
    with pytest.raises(grpc.aio.AioRpcError) as by_hand:
        await route(pb.RouteRequest(model="abort"))
    assert (by_hand.value.code(), by_hand.value.details()) == (grpc.StatusCode.DATA_LOSS, "by hand")
    unregistered = relaxed.channel.unary_unary("/headway.routing.v1.Router/Nonsense")
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await unregistered(b"")
    assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_fault_of_ours_is_logged_without_the_prompt(
    relaxed: AdminServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs() as logs:
        call = RouterStub(relaxed.channel).Route(pb.RouteRequest(model="broken", text=SECRET))
        error = await refused(call, grpc.StatusCode.INTERNAL, "INTERNAL")
    assert SECRET not in (error.details() or "")
    (entry,) = [entry for entry in logs if entry["event"] == "rpc_failed"]
    assert entry["error_type"] == "ValueError"
    assert "in Route" in entry["traceback"]
    assert SECRET not in str(logs) + caplog.text


async def test_streams_end_with_a_status_too(relaxed: AdminServer) -> None:
    stream = RouterStub(relaxed.channel).RouteStream()
    assert (await stream.read()).welcome.scheduler == "local"
    await stream.write(pb.RouteStreamRequest())
    assert (await stream.read()).draining
    await stream.write(pb.RouteStreamRequest(cancels=[1]))
    await refused(stream.read(), grpc.StatusCode.RESOURCE_EXHAUSTED, "SATURATED")


async def test_a_stream_without_a_credential_never_starts(strict: AdminServer) -> None:
    stream = RouterStub(strict.channel).RouteStream()
    await refused(stream.read(), grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")


async def test_a_cancelled_call_reaches_its_handler(relaxed: AdminServer, router: Router) -> None:
    call = RouterStub(relaxed.channel).Route(pb.RouteRequest(model="hang"))
    await eventually(lambda: router.started)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: router.cancelled)
