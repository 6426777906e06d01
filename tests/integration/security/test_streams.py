"""Open streams end with what was shown for them: revoked, expired, rotated away, changed; silent ones end, too."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from envoy.service.accesslog.v3 import als_pb2_grpc
from envoy.service.discovery.v3 import ads_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as epb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from fakes.credentials import bearer, credential
from fakes.scheduler import Stream, endpoint, refused, serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as rpb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.domain.desired import Role
from headway_scheduler.rpc import streams, telemetry


@pytest.fixture
async def served(database_url):
    async with serving(database_url, require_credentials=True, max_streams_per_credential=3) as served:
        served.admin_token = await credential(served, "admin", Role.ADMIN)
        yield served


async def open_streams(served, token):
    """One of every kind that lasts, each after its first word; what reads each to its end."""
    metadata = bearer(token)
    telemetry = served.telemetry.Connect(metadata=metadata)
    await telemetry.write(tpb.ConnectRequest(hello=tpb.Hello(node="n", instance_id="i", endpoints=[endpoint(1)])))
    assert (await telemetry.read()).HasField("welcome")
    routes = served.router.RouteStream(metadata=metadata)
    assert (await routes.read()).HasField("welcome")
    watch = served.fleet.WatchFleet(fpb.WatchFleetRequest(), metadata=metadata)
    assert (await watch.read()).nodes
    return {"telemetry": telemetry, "routes": routes, "watch": watch}


async def planes_streams(served, token):
    """Envoy's."""
    metadata, channel = bearer(token), served.channel
    ads = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources(metadata=metadata)
    logs = als_pb2_grpc.AccessLogServiceStub(channel).StreamAccessLogs(metadata=metadata)
    process = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process(metadata=metadata)
    begun = epb.ProcessingRequest(request_headers=epb.HttpHeaders())
    begun.protocol_config.request_body_mode = 4  # the whole body is waited for
    begun.protocol_config.response_body_mode = 4
    await process.write(begun)
    await eventually(lambda: len(served.server.streams) >= 3)
    return {"ads": ads, "logs": logs, "process": process}


async def ended(call):
    """The status with which it ends."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while hasattr(call, "read") and await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def codes(calls):
    async with asyncio.timeout(15):
        return {name: (await ended(call)).name for name, call in calls.items()}


async def revoke(served, name):
    request = apb.RevokeCredentialRequest(name=f"credentials/{name}")
    await served.admin.RevokeCredential(request, metadata=bearer(served.admin_token))


@pytest.mark.parametrize("opened", [open_streams, planes_streams])
async def test_a_revoked_credentials_streams_end_and_no_others(served, opened):
    token = await credential(served, "mine", Role.ADMIN)
    other = await credential(served, "other", Role.ROUTER)
    calls = await opened(served, token)
    bystander = Stream(served.router.RouteStream(metadata=bearer(other)))
    await bystander.until(lambda: bystander.welcomes)
    await revoke(served, "mine")
    assert set((await codes(calls)).values()) == {"UNAUTHENTICATED"}
    await eventually(lambda: len(served.server.streams) == 1)
    await bystander.send()  # an empty message is a ping, and answered
    seen = bystander.messages
    await bystander.until(lambda: bystander.messages > seen)
    await bystander.lose()


async def test_a_stream_ends_when_its_credential_expires(served):
    soon = datetime.now(UTC) + timedelta(seconds=1)
    calls = await open_streams(served, await credential(served, "mine", Role.ADMIN, expire_time=soon))
    assert set((await codes(calls)).values()) == {"UNAUTHENTICATED"}
    assert datetime.now(UTC) >= soon


async def test_a_rotated_token_counts_until_the_overlap_ends_and_the_new_one_at_once(served):
    old = await credential(served, "mine", Role.ROUTER)
    stream = Stream(served.router.RouteStream(metadata=bearer(old)))
    await stream.until(lambda: stream.welcomes)
    rotation = apb.RotateCredentialRequest(name="credentials/mine", overlap={"seconds": 3600})
    rotated = await served.admin.RotateCredential(rotation, metadata=bearer(served.admin_token))
    for token, shown in ((old, "previous_token"), (rotated.token, "token")):
        me = await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(token))
        assert (me.principal, me.role, me.shown) == ("credentials/mine", "router", shown)
        assert me.HasField("expire_time") == (shown == "previous_token")
    assert not stream.reader.done()
    # Without an overlap: whatever was shown before ends, also the token that was new a moment ago.
    newer = Stream(served.router.RouteStream(metadata=bearer(rotated.token)))
    await newer.until(lambda: newer.welcomes)
    rotation = apb.RotateCredentialRequest(name="credentials/mine")
    last = await served.admin.RotateCredential(rotation, metadata=bearer(served.admin_token))
    for each in (stream, newer):
        assert (await refused(each.reader)).reason == "NO_CREDENTIAL"
    for token in (old, rotated.token):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(token))
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(last.token))).shown == "token"


async def test_what_a_rotation_lost_can_be_rotated_again_without_cutting_anyone_off(served):
    old = await credential(served, "mine", Role.ROUTER)
    rotation = apb.RotateCredentialRequest(name="credentials/mine", overlap={"seconds": 60}, request_id="r1")
    lost = await served.admin.RotateCredential(rotation, metadata=bearer(served.admin_token))
    with pytest.raises(grpc.aio.AioRpcError) as again:  # the retry of a lost answer
        await served.admin.RotateCredential(rotation, metadata=bearer(served.admin_token))
    assert again.value.code() is grpc.StatusCode.ALREADY_EXISTS
    rotation.request_id = "r2"
    found = await served.admin.RotateCredential(rotation, metadata=bearer(served.admin_token))
    shown = {}
    for name, token in {"old": old, "lost": lost.token, "found": found.token}.items():
        try:
            shown[name] = (await served.fleet.WhoAmI(fpb.WhoAmIRequest(), metadata=bearer(token))).shown
        except grpc.aio.AioRpcError as error:
            shown[name] = error.code().name
    assert shown == {"old": "previous_token", "lost": "UNAUTHENTICATED", "found": "token"}


async def test_a_revoked_credential_is_not_rotated_back(served):
    await credential(served, "mine", Role.ROUTER)
    await revoke(served, "mine")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.admin.RotateCredential(
            apb.RotateCredentialRequest(name="credentials/mine"), metadata=bearer(served.admin_token)
        )
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_ends_when_an_admin_changes_what_it_may_do(served):
    stream = Stream(served.router.RouteStream(metadata=bearer(await credential(served, "mine", Role.ROUTER))))
    await stream.until(lambda: stream.welcomes)
    wider = apb.Credential(name="credentials/mine", tenants=["*"])
    await served.admin.UpdateCredential(
        apb.UpdateCredentialRequest(credential=wider, update_mask={"paths": ["tenants"]}),
        metadata=bearer(served.admin_token),
    )
    assert (await refused(stream.reader)).reason == "CREDENTIAL_CHANGED"


async def test_a_credential_has_so_many_streams_and_no_more(served):
    token = await credential(served, "mine", Role.ROUTER)
    held = [Stream(served.router.RouteStream(metadata=bearer(token))) for _ in range(3)]
    for stream in held:
        await stream.until(lambda stream=stream: stream.welcomes)
    over = Stream(served.router.RouteStream(metadata=bearer(token)))
    assert (await refused(over.reader)).reason == "TOO_MANY_STREAMS"
    # Calls go on, others' streams do, and one that ends makes room.
    await served.router.Report(rpb.ReportRequest(), metadata=bearer(token))
    other = Stream(served.router.RouteStream(metadata=bearer(served.admin_token)))
    await other.until(lambda: other.welcomes)
    await held.pop().lose()
    await eventually(lambda: len(served.server.streams) == 3)
    again = Stream(served.router.RouteStream(metadata=bearer(token)))
    await again.until(lambda: again.welcomes)
    for stream in (*held, other, again):
        await stream.lose()


async def test_slow_loris_streams_that_say_nothing_end_and_hurt_nobody(served, monkeypatch):
    """An agent's and Envoy's streams begin with a message. RouteStream may be silent: it is bounded by number."""
    for module in (streams, telemetry):
        monkeypatch.setattr(module, "FIRST_WORD_S", 0.2)
    agent, router = await credential(served, "a", Role.AGENT), await credential(served, "r", Role.ROUTER)
    silent = [served.telemetry.Connect(metadata=bearer(agent)) for _ in range(3)]
    process = external_processor_pb2_grpc.ExternalProcessorStub(served.channel).Process(metadata=bearer(router))
    ends = await codes({**dict(enumerate(silent)), "process": process})
    assert set(ends.values()) == {"INVALID_ARGUMENT"}
    await eventually(lambda: len(served.server.streams) == 0)
    await served.router.Report(rpb.ReportRequest(), metadata=bearer(router))
