"""Remembered decisions over the wire, and the export of a running scheduler."""

import asyncio
import json

import pytest
from fakes.scheduler import finished, refused, serving
from fakes.waiting import eventually
from google.protobuf import timestamp_pb2
from headway.fleet.v1 import fleet_pb2 as pb
from headway.routing.v1 import routing_pb2 as rpb
from headway_sim.traces import load_trace


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as found:
        await found.agent()
        yield found


async def test_from_the_decision_to_what_came_of_it(served):
    answer = await served.route("r1", text="x" * 2000)
    found = (await served.fleet.GetDecision(pb.GetDecisionRequest(id="r1"))).decision
    assert (found.outcome, found.endpoint, found.tenant) == ("in_flight", answer.endpoint.name, "tenants/default")
    assert found.decision == answer.decision
    (chosen,) = [each for each in found.candidates if each.chosen]
    assert chosen.endpoint == answer.endpoint.name and chosen.predicted_ttft_ms > 0
    assert {each.endpoint for each in found.candidates} == {answer.endpoint.name, answer.fallbacks[0].name}
    report = finished(answer.reservation_id)
    report.finished.usage.completion_tokens = 7
    report.finished.ttft_ms = 33.0
    await served.report(report)
    found = (await served.fleet.GetDecision(pb.GetDecisionRequest(id=answer.reservation_id))).decision
    assert (found.outcome, found.ttft_ms, found.usage.completion_tokens) == ("success", 33.0, 7)
    assert found.served_by == answer.endpoint.name and not found.moved
    assert found.ended.ToNanoseconds() >= found.time.ToNanoseconds()


async def test_pages_and_filters(served):
    for number in range(5):
        await served.route(f"r{number}")
    await refused(served.route("no", model="m", max_wait={"seconds": 0}, subset=rpb.Subset(labels={"a": "b"})))
    first = await served.fleet.ListDecisions(pb.ListDecisionsRequest(page_size=4))
    rest = await served.fleet.ListDecisions(pb.ListDecisionsRequest(page_size=4, page_token=first.next_page_token))
    names = [each.request_id for each in (*first.decisions, *rest.decisions)]
    assert names == ["no", "r4", "r3", "r2", "r1", "r0"]
    assert not rest.next_page_token and not any(each.candidates for each in first.decisions)
    wanted = pb.DecisionFilter(refused=True)
    (only,) = (await served.fleet.ListDecisions(pb.ListDecisionsRequest(filter=wanted))).decisions
    assert only.refusal.reason == "NO_ENDPOINTS"
    late = pb.DecisionFilter(since=timestamp_pb2.Timestamp(seconds=4_000_000_000))
    assert not (await served.fleet.ListDecisions(pb.ListDecisionsRequest(filter=late))).decisions
    assert (await refused(served.fleet.ListDecisions(pb.ListDecisionsRequest(page_size=-1)))).reason == "INVALID_FIELD"
    assert (await refused(served.fleet.GetDecision(pb.GetDecisionRequest(id="x")))).reason == "UNKNOWN_RESOURCE"


async def test_a_watch_brings_each_and_what_came_of_it(served):
    async def traffic():
        while True:
            await served.route()
            await asyncio.sleep(0.05)

    call = served.fleet.WatchDecisions(pb.WatchDecisionsRequest(outcomes=True), timeout=20)
    routing = asyncio.create_task(traffic())
    outcomes, chosen = {}, None
    try:
        async for response in call:
            for each in response.decisions:
                outcomes.setdefault(each.number, []).append(each.outcome)
                chosen = chosen or each
            if outcomes[chosen.number][-1] == "success":
                break
            if len(outcomes[chosen.number]) == 1:
                await served.report(finished(chosen.reservation_id))
    finally:
        routing.cancel()
        call.cancel()
    assert outcomes[chosen.number] == ["in_flight", "success"]


async def test_an_export_can_be_replayed(database_url, tmp_path):
    settings = {"export_dir": tmp_path / "out", "export_share": 1.0}
    async with serving(database_url, **settings) as served:
        await served.agent()
        secret = "the prompt that nobody may read " * 40
        answer = await served.route("r1", text=secret, session_id="me@example.org")
        report = finished(answer.reservation_id)
        report.finished.usage.prompt_tokens, report.finished.usage.completion_tokens = 320, 12
        await served.report(report)
        await refused(served.route("r2", text=secret, max_wait={"seconds": 0}, subset=rpb.Subset(labels={"a": "b"})))
        await eventually(lambda: served.scheduler.export.lines == 2)
        text = (tmp_path / "out" / "decisions-000001.jsonl").read_text()
        assert "nobody" not in text and "example.org" not in text
        first, second = map(json.loads, text.splitlines())
        assert first["blocks"] == second["blocks"] and len(first["blocks"]) == len(secret) // 256
        assert (second["outcome"], second["refusal"]) == ("refused", "NO_ENDPOINTS")
    trace = load_trace(tmp_path / "out")
    assert [request.output_tokens for request in trace] == [12, 12]
    assert trace[0].prompt.tokens == 320
