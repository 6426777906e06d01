"""Fleet, health and reflection: what people and generic tools see."""

import grpc
import pytest
from fakes.scheduler import endpoint, measured, refused, serving
from fakes.waiting import eventually
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from headway.admin.v1 import admin_pb2, admin_pb2_grpc
from headway.fleet.v1 import fleet_pb2 as pb
from headway.routing.v1 import routing_pb2 as rpb
from headway.telemetry.v1 import telemetry_pb2 as tpb


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as found:
        yield found


async def test_status(served):
    await served.agent()
    answer = await served.route()
    await refused(served.route(model="nope"))
    status = await served.fleet.GetStatus(pb.GetStatusRequest())
    assert (status.scheduler, status.epoch) == ("s1", served.scheduler.epoch)
    assert (status.nodes, status.endpoints, status.endpoints_healthy) == (1, 2, 2)
    assert (status.reservations, status.holds, status.routes) == (1, 0, 1)
    assert dict(status.refusals) == {"UNKNOWN_MODEL": 1}
    assert status.store_available
    assert not status.draining
    assert len(status.strategies) == 8
    adaptive = next(s for s in status.strategies if s.name == "strategies/adaptive")
    assert (adaptive.decisions, adaptive.failures, adaptive.tripped) == (1, 0, False)
    await served.finish(answer)


async def test_nodes_and_endpoints(served):
    device = tpb.Device(uuid="g", kind=tpb.DEVICE_KIND_GPU)
    agent = await served.agent("n", endpoint(1, device_uuids=["g"], labels={"a": "b"}), devices=[device])
    lost = tpb.DeviceSample(uuid="g", memory_used_bytes=tpb.Measurement(missing=tpb.MISSING_REASON_LOST))
    engine = tpb.EngineSample(
        address="10.0.0.1:8000", ready=True, running=measured(2.0), kv_use=measured(0.5),
        prefix_queries=measured(10.0), prefix_hits=measured(4.0),
    )  # fmt: skip
    await agent.sample(engine, devices=[lost])
    (node,) = (await served.fleet.ListNodes(pb.ListNodesRequest())).nodes
    assert (node.name, node.connected, node.state) == ("nodes/n", True, "active")
    assert [(d.health, d.health_detail) for d in node.devices] == [("lost", "lost")]
    (state,) = (await served.fleet.ListEndpoints(pb.ListEndpointsRequest())).endpoints
    assert list(state.hard_guards) == ["device_lost"]
    assert not state.healthy
    assert (state.inflight, state.reservations, state.memory_pressure, state.hit_ratio) == (2, 0, 0.5, 0.4)
    assert list(state.gpu_groups) == ["gpuGroups/all"]


@pytest.mark.parametrize("absurd", [5e9, -5e9, 1e300])
async def test_absurd_numbers_of_one_agent_blind_nobody(served, absurd):
    agent = await served.agent(
        "n", endpoint(1, device_uuids=["g"]), devices=[tpb.Device(uuid="g", kind="DEVICE_KIND_GPU")]
    )
    await served.agent("other", endpoint(2))
    engine = dict.fromkeys(("running", "waiting", "kv_use"), measured(absurd))
    device = dict.fromkeys(("utilization", "temperature_c", "power_w"), measured(absurd))
    if absurd != 5e9:  # as many bytes and tokens there may be
        engine |= dict.fromkeys(("prefix_queries", "prefix_hits"), measured(absurd))
        device |= {"memory_used_bytes": measured(absurd)}
    for numbers in ({"running": measured(1.0)}, {"running": measured(2.0)}, {"running": measured(3.0)}, engine, engine):
        await agent.sample(
            tpb.EngineSample(address="10.0.0.1:8000", ready=True, **numbers),
            devices=[tpb.DeviceSample(uuid="g", **(device if numbers is engine else {}))],
        )
    states = (await served.fleet.ListEndpoints(pb.ListEndpointsRequest())).endpoints
    assert [(state.name, state.inflight, state.sample.running.WhichOneof("kind")) for state in states] == [
        ("endpoints/10.0.0.1:8000@0", 0, "missing"),
        ("endpoints/10.0.0.2:8000@0", 0, None),
    ]
    assert len((await served.fleet.WatchFleet(pb.WatchFleetRequest()).read()).endpoints) == 2
    rows = (await served.router.Explain(rpb.ExplainRequest(request=rpb.RouteRequest(model="m", text="x")))).rows
    assert [(row.inflight, row.HasField("kv_use"), row.HasField("temperature_c")) for row in rows] == [
        (0, False, False)
    ] * 2
    admin = admin_pb2_grpc.AdminStub(served.channel)
    listed = await admin.ListEndpoints(admin_pb2.ListEndpointsRequest())
    assert [each.inflight for each in listed.endpoints] == [0, 0]


async def test_pages(served):
    await served.agent("n", *[endpoint(n, models=["m"] if n % 2 else ["x"]) for n in range(1, 8)])

    async def names(**fields):
        found, token = [], ""
        while True:
            response = await served.fleet.ListEndpoints(
                pb.ListEndpointsRequest(page_size=2, page_token=token, **fields)
            )
            assert len(response.endpoints) <= 2
            found += [state.name for state in response.endpoints]
            token = response.next_page_token
            if not token:
                return found

    assert await names() == [f"endpoints/10.0.0.{n}:8000@0" for n in range(1, 8)]
    assert len(await names(model="models/m")) == 4
    for fields in ({"page_token": "nonsense"}, {"page_size": -1}):
        refusal = await refused(served.fleet.ListNodes(pb.ListNodesRequest(**fields)))
        assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, next(iter(fields)))


async def test_watch_sends_all_then_what_changed(served):
    agent = await served.agent()
    watch = served.fleet.WatchFleet(pb.WatchFleetRequest(interval_ms=100))
    first = await watch.read()
    assert ([n.name for n in first.nodes], len(first.endpoints)) == (["nodes/n"], 2)
    answer = await served.route()
    change = await watch.read()
    assert [e.name for e in change.endpoints] == [answer.endpoint.name]
    assert not change.nodes, "that time passes is no change"
    await served.finish(answer)
    await agent.send(endpoint_change=tpb.EndpointChange(endpoint=endpoint(1), removed=True))
    await eventually(lambda: len(served.scheduler.fleet.endpoints) == 1)
    removed = []
    while not removed:
        removed = list((await watch.read()).removed)
    assert removed == ["endpoints/10.0.0.1:8000@0"]
    watch.cancel()


async def test_health(served):
    health = health_pb2_grpc.HealthStub(served.channel)
    for service in ("", "headway.routing.v1.Router", "headway.admin.v1.Admin"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_use_by_reflection_alone(served):
    """List the services, learn Route's messages from the server, and call it: no generated code of ours."""
    await served.agent()
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)

    async def ask(**fields):
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**fields)]))
        return await call.read()

    listed = await ask(list_services="")
    names = {service.name for service in listed.list_services_response.service}
    ours = ("routing.v1.Router", "telemetry.v1.Telemetry", "admin.v1.Admin", "fleet.v1.Fleet")
    assert {f"headway.{name}" for name in ours} < names
    pool, seen = descriptor_pool.DescriptorPool(), set()

    async def learn(**fields):
        for raw in (await ask(**fields)).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            if file.name not in seen:
                seen.add(file.name)
                for needed in file.dependency:
                    await learn(file_by_filename=needed)
                pool.Add(file)

    await learn(file_containing_symbol="headway.routing.v1.Router")
    method = pool.FindServiceByName("headway.routing.v1.Router").methods_by_name["Route"]
    ask_type, answer_type = (message_factory.GetMessageClass(t) for t in (method.input_type, method.output_type))
    route = served.channel.unary_unary(
        "/headway.routing.v1.Router/Route",
        request_serializer=ask_type.SerializeToString,
        response_deserializer=answer_type.FromString,
    )
    answer = await route(ask_type(model="m", text="hello"))
    assert answer.endpoint.address.startswith("10.0.0.")
    assert answer.reservation_id in served.reservations
