"""Telemetry: one stream from each agent, and what wrong ones are told."""

import time

import grpc
import pytest
import structlog
from fakes.scheduler import Agent, endpoint, measured, refused, serving
from fakes.waiting import eventually
from google.protobuf.timestamp_pb2 import Timestamp
from headway.admin.v1 import admin_pb2 as apb
from headway.telemetry.v1 import telemetry_pb2 as pb

CODE = grpc.StatusCode


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as found:
        yield found


def gpu(uuid="g", **fields):
    return pb.Device(uuid=uuid, kind=pb.DEVICE_KIND_GPU, memory_total_bytes=measured(100.0), **fields)


async def test_welcome(served):
    agent = await served.agent()
    welcome = agent.received[0].welcome
    assert (welcome.scheduler, welcome.epoch) == ("s1", served.scheduler.epoch)
    assert welcome.interval.nanos == 200_000_000


async def test_a_sample_is_acknowledged_at_once_where_an_agent_waits_for_it(served):
    agent = await served.agent()
    node = served.scheduler.fleet.nodes["n"]

    def acknowledged():
        return [m.ack.sequence for m in agent.received[1:] if m.HasField("ack")]

    for number in (1, 2, 3):
        await agent.send(sample=pb.Sample(sequence=number))
    await eventually(lambda: node.sequence == 3)
    await agent.send(device_event=pb.DeviceEvent(uuid="g", kind=pb.DEVICE_EVENT_KIND_XID, xid=79))
    await agent.send(endpoint_change=pb.EndpointChange(endpoint=endpoint(3)))
    for number in (4, 5):
        await agent.send(sample=pb.Sample(sequence=number))
    await eventually(lambda: node.sequence == 5)
    await agent.hello(endpoint(1))
    await agent.send(sample=pb.Sample(sequence=6))
    await eventually(lambda: 6 in acknowledged())
    assert acknowledged() == [1, 4, 6]


async def test_hello_first(served):
    agent = Agent(served.telemetry, "n")
    await agent.send(sample=pb.Sample(sequence=1))
    error = await agent.error()
    assert (error.code, error.field) == (CODE.INVALID_ARGUMENT, "hello")


async def test_two_agents_with_one_name(database_url):
    async with serving(database_url, stale_after_s=1.0) as served:
        first = await served.agent()
        second = await served.agent("n", endpoint(5), instance="i2", wait=False)
        while not second.reader.done():
            await first.sample()
        error = await second.error()
        assert (error.code, error.reason, error.field) == (CODE.ALREADY_EXISTS, "DUPLICATE_NODE", "hello.node")
        assert sorted(served.scheduler.fleet.endpoints) == ["10.0.0.1:8000@0", "10.0.0.2:8000@0"]
        await first.leave()
        await eventually(lambda: not served.scheduler.fleet.nodes["n"].connected)
        await served.agent("n", endpoint(5), instance="i2")
        assert list(served.scheduler.fleet.endpoints) == ["10.0.0.5:8000@0"]


async def test_an_older_stream_of_the_same_agent_has_no_say(served):
    old = await served.agent()
    new = await served.agent("n", endpoint(3))
    await old.send(sample=pb.Sample(sequence=9))
    assert (await old.error()).reason == "DUPLICATE_NODE"
    node = served.scheduler.fleet.nodes["n"]
    await eventually(lambda: node.connected)
    await new.sample()
    assert node.sequence == 1


async def test_a_clock_an_hour_off_only_warns(served):
    clock = Timestamp()
    clock.FromNanoseconds(int((time.time() - 3600) * 1e9))
    with structlog.testing.capture_logs() as logs:
        await served.agent(clock=clock)
    warnings = [entry for entry in logs if entry["event"] == "agent_clock_off"]
    assert [round(entry["skew_s"] / 10) for entry in warnings] == [-360]
    await served.route()
    assert abs(served.scheduler.fleet.nodes["n"].clock_skew_s + 3600) < 60


BAD = {
    "hello.node": {"node": ""},
    "hello.instance_id": {"instance": ""},
    "hello.devices[0].uuid": {"devices": [gpu("")]},
    "hello.devices[1].kind": {"devices": [gpu(), pb.Device(uuid="x")]},
    "hello.endpoints[0].address": {"endpoints": [pb.EngineEndpoint(address="nowhere")]},
    "hello.endpoints[1].address": {"endpoints": [endpoint(1), pb.EngineEndpoint(address="h:99999")]},
    "hello.endpoints[0].models[1]": {"endpoints": [endpoint(1, models=["m", "bad name"])]},
    "hello.endpoints[0].role": {"endpoints": [endpoint(1, role=77)]},
}


async def test_a_malformed_hello_names_the_field_and_changes_nothing(served):
    for field, parts in BAD.items():
        parts = dict(parts)
        agent = await served.agent(parts.pop("node", "n"), *parts.pop("endpoints", []), wait=False, **parts)
        error = await agent.error()
        assert (error.code, error.field) == (CODE.INVALID_ARGUMENT, field)
    assert not served.scheduler.fleet.nodes
    assert not served.scheduler.fleet.endpoints


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("device_event.uuid", {"device_event": pb.DeviceEvent(kind=pb.DEVICE_EVENT_KIND_XID)}),
        ("device_event.kind", {"device_event": pb.DeviceEvent(uuid="g", kind=0)}),
        ("endpoint_change.endpoint.address", {"endpoint_change": pb.EndpointChange()}),
        ("kv_events.scheme", {"kv_events": pb.KvEventBatch(address="10.0.0.1:8000", scheme="x")}),
        ("message", {}),
        ("hello.node", {"hello": pb.Hello(node="other", instance_id="i1")}),
    ],
)
async def test_a_malformed_message_names_the_field(served, field, message):
    agent = await served.agent()
    await agent.send(**message)
    error = await agent.error()
    assert (error.code, error.field) == (CODE.INVALID_ARGUMENT, field)
    assert len(served.scheduler.fleet.endpoints) == 2, "its endpoints stay until they are stale"


async def test_values_that_are_no_numbers_are_unknown(served):
    agent = await served.agent("n", endpoint(1, device_uuids=["g"], kv_capacity_tokens=measured(0.0)), devices=[gpu()])
    engine = pb.EngineSample(
        address="10.0.0.1:8000", ready=True, running=measured(float("inf")), kv_use=measured(float("nan"))
    )
    device = pb.DeviceSample(uuid="g", memory_used_bytes=pb.Measurement(missing=pb.MISSING_REASON_NO_PERMISSION))
    await agent.sample(engine, devices=[device])
    answer = await served.route()
    assert answer.decision.strategy == "strategies/adaptive"
    assert answer.decision.fell_back_from == ""
    assert served.scheduler.fleet.columns.kv_capacity[0] > 0


async def test_samples_of_the_same_words_are_seen_as_others_are(served):
    agent = await served.agent("n", endpoint(1, device_uuids=["g"]), devices=[gpu()])
    fleet = served.scheduler.fleet
    said = []
    for use, ready in ((0.1, True), (0.2, True), (0.3, True), (0.4, False), (0.5, False), (0.6, False), (0.7, True)):
        device = pb.DeviceSample(uuid="g", utilization=measured(use), memory_used_bytes=measured(50.0))
        await agent.sample(
            pb.EngineSample(address="10.0.0.1:8000", ready=ready, kv_use=measured(use)), devices=[device]
        )
        found = fleet.find("10.0.0.1:8000")
        assert found.ready is ready
        assert (found.sample.kv_use.value, found.node.samples["g"].utilization.value) == (use, use)
        assert (fleet.columns.kv_use[found.slot], fleet.columns.utilization[found.slot]) == (use, use)
        said.append(found.node.readings is not None)
    assert said == [False, True, True, False, True, True, False], "by numbers from the third of the same words on"


async def test_bytes_that_are_no_message_end_the_stream(served):
    call = served.channel.stream_stream("/headway.telemetry.v1.Telemetry/Connect")()
    await call.write(b"\x12\xff")
    with structlog.testing.capture_logs() as logs:
        error = await refused(call.read())
    assert (error.code, error.reason, error.field) == (CODE.INVALID_ARGUMENT, "INVALID_FIELD", "message")
    assert [line["event"] for line in logs if line["log_level"] == "error"] == []


async def test_events_open_and_close_endpoints(served):
    agent = await served.agent("n", endpoint(1, device_uuids=["g"]), devices=[gpu()])
    fleet = served.scheduler.fleet
    await agent.send(device_event=pb.DeviceEvent(uuid="g", kind=pb.DEVICE_EVENT_KIND_XID, xid=79))
    await eventually(lambda: fleet.hard_guards(fleet.find("10.0.0.1:8000")) == ["device_xid"])
    await agent.send(device_event=pb.DeviceEvent(uuid="g", kind=pb.DEVICE_EVENT_KIND_RECOVERED))
    await eventually(lambda: not fleet.hard_guards(fleet.find("10.0.0.1:8000")))
    await agent.send(endpoint_change=pb.EndpointChange(endpoint=endpoint(2)))
    await eventually(lambda: len(fleet.endpoints) == 2)
    answer = await served.route()
    await agent.send(endpoint_change=pb.EndpointChange(endpoint=endpoint(1), removed=True))
    await agent.send(endpoint_change=pb.EndpointChange(endpoint=endpoint(2), removed=True))
    await agent.send(endpoint_change=pb.EndpointChange(endpoint=endpoint(2), removed=True))
    await eventually(lambda: not fleet.endpoints)
    assert not served.reservations, "what vanished took its requests along"
    assert await served.finish(answer) == [2]


async def test_a_cleared_cache_is_forgotten(served):
    agent = await served.agent("n", endpoint(1))
    await served.route(text="x" * 5000)
    index = served.scheduler.index
    assert index.blocks(0) > 0
    batch = pb.KvEventBatch(address="10.0.0.1:8000", scheme="tokens-xxh3-128", cleared=True)
    await agent.send(kv_events=batch)
    await eventually(lambda: index.blocks(0) == 0)


async def test_resync_after_being_forgotten(served):
    agent = await served.agent()
    served.scheduler.fleet.forget_node("n")
    for number in (1, 2, 3):
        await agent.send(sample=pb.Sample(sequence=number))
    await eventually(lambda: any(m.HasField("resync") for m in agent.received))
    await agent.hello(endpoint(1))
    await eventually(lambda: list(served.scheduler.fleet.endpoints) == ["10.0.0.1:8000@0"])
    assert sum(m.HasField("resync") for m in agent.received) == 1
    assert not agent.reader.done()


async def test_draining_is_told(served):
    agent = await served.agent()

    async def set_state(state):
        await served.admin.SetNodeState(apb.SetNodeStateRequest(name="nodes/n", state=state))
        await agent.sample()

    await set_state(apb.SCHEDULING_STATE_DRAINING)
    await set_state(apb.SCHEDULING_STATE_ACTIVE)
    await eventually(lambda: sum(m.HasField("drain") for m in agent.received) == 2)
    assert [m.drain.draining for m in agent.received if m.HasField("drain")] == [True, False]
