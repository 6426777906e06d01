"""Traces through gateway, scheduler and Envoy: one trace, whoever began it, and the context goes on to the engine."""

import asyncio
import json

import aiohttp
import pytest
from fakes.collector import attributes, collecting
from fakes.scheduler import endpoint, measured, refused, serving
from fakes.waiting import eventually
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_gateway.app import Gateway
from headway_gateway.config import GatewaySettings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "tracestate": "a=b"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-00"}


@pytest.fixture
async def collector():
    async with collecting() as found:
        yield found


def parents(collector, *names):
    """Names of the spans above each, by its name: what the ids say."""
    spans = {span.span_id: name for name, each in collector.spans.items() for span in each}
    return {name: spans.get(collector.one(name).parent_span_id) for name in names}


async def flushed(*traced):
    """In a thread: the collector is on this loop."""
    for each in traced:
        await asyncio.to_thread(each.flush)


async def test_a_route_and_its_hold(database_url, collector):
    async with serving(database_url, trace_endpoint=collector.endpoint, trace_share=0.0) as served:
        agent = await served.agent("n", endpoint(1))
        await served.bind("gpu_aware")
        await agent.sample(tpb.EngineSample(address="10.0.0.1:8000", ready=True, kv_use=measured(0.95)))
        await eventually(lambda: served.scheduler.fleet.columns.memory_pressure[0] > 0.9)
        stream = await served.stream()
        await stream.route(7, text="x", **PARENT)
        await eventually(lambda: len(served.scheduler.dispatcher.holds) == 1)
        await agent.sample(tpb.EngineSample(address="10.0.0.1:8000", ready=True, kv_use=measured(0.1)))

        async def calm():
            await agent.sample(tpb.EngineSample(address="10.0.0.1:8000", ready=True, kv_use=measured(0.1)))
            return 7 in stream.answers

        await eventually(calm, timeout_s=20)
        await served.route()  # whose caller decides nothing, and of those no share is traced
        await flushed(served.scheduler.tracing)
        await eventually(lambda: "headway.hold" in collector.spans)
    route, hold = collector.one("headway.route"), collector.one("headway.hold")
    assert route.trace_id.hex() == hold.trace_id.hex() == TRACE
    assert route.parent_span_id.hex() == "00f067aa0ba902b7"
    assert parents(collector, "headway.hold") == {"headway.hold": "headway.route"}
    assert hold.end_time_unix_nano - hold.start_time_unix_nano > 1e6
    told = attributes(route)
    assert told["headway.strategy"] == "gpu_aware" and told["headway.endpoint"] == "10.0.0.1:8000@0"
    assert collector.services == {"headway-scheduler/s1"}


async def test_a_refusal(database_url, collector):
    async with serving(database_url, trace_endpoint=collector.endpoint, trace_share=1.0) as served:
        await refused(served.route(model="nope"))
        await flushed(served.scheduler.tracing)
        await eventually(lambda: "headway.route" in collector.spans)
    assert attributes(collector.one("headway.route"))["headway.refusal"] == "UNKNOWN_MODEL"


async def test_off_nothing_is_traced_nor_kept(database_url):
    async with serving(database_url) as served:
        await served.agent()
        stream = await served.stream()
        await stream.route(1, text="x", **PARENT)
        await eventually(lambda: 1 in stream.answers)
        assert served.scheduler.tracing is None


async def test_behind_envoy(planes, collector):
    async with planes(settings={"trace_endpoint": collector.endpoint, "trace_share": 0.0}) as plane:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with plane.post(body, headers=list(PARENT.items())) as answer:
            assert answer.status == 200
            await answer.text()
        async with plane.post(body, headers=list(UNSAMPLED.items())) as answer:
            await answer.text()
        await plane.settled()
        first, _ = [request for engine in plane.engines for request in engine.seen]
        assert first.headers["traceparent"] == PARENT["traceparent"]  # passed on as it came
        await flushed(plane.served.scheduler.tracing)
        await eventually(lambda: "headway.upstream" in collector.spans)
    upstream = collector.one("headway.upstream")
    assert upstream.trace_id.hex() == TRACE and attributes(upstream)["headway.outcome"] == "success"
    assert [event.name for event in upstream.events] == ["first_token"]
    assert collector.one("headway.route").trace_id.hex() == TRACE


async def test_through_the_gateway(planes, collector):
    """Client → gateway → scheduler and engine: one trace of two processes."""
    async with planes(settings={"trace_endpoint": collector.endpoint, "trace_share": 0.0}) as plane:
        target = f"127.0.0.1:{plane.served.server.port}"
        settings = {"trace_endpoint": collector.endpoint, "trace_share": 0.0, "anonymous_tenant": "default"}
        async with Gateway(GatewaySettings(port=0, schedulers=[target], **settings)) as gateway:
            await gateway.client.wait_connected()
            url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
            async with aiohttp.ClientSession() as http, http.post(url, data=json.dumps(body), headers=PARENT) as answer:
                assert answer.status == 200
                await answer.text()
            await plane.settled()
            await flushed(plane.served.scheduler.tracing, gateway._tracing)
            names = ("POST /v1/chat/completions", "route", "upstream", "headway.route")
            await eventually(lambda: all(name in collector.spans for name in names))
    (seen,) = [request for engine in plane.engines for request in engine.seen]
    upstream = collector.one("upstream")
    assert seen.headers["traceparent"] == f"00-{TRACE}-{upstream.span_id.hex()}-01"
    assert seen.headers["tracestate"] == "a=b"
    assert parents(collector, *names) == {
        names[0]: None,
        "route": names[0],
        "upstream": names[0],
        "headway.route": "route",
    }
    assert {span.trace_id.hex() for each in collector.spans.values() for span in each} == {TRACE}
    assert attributes(upstream)["headway.outcome"] == "success"
    assert collector.services == {"headway-scheduler/s1", "headway-gateway"}
