"""RouteStream: many calls on one stream, in any order, and what becomes of them when it is lost."""

import asyncio

import grpc
import pytest
from fakes.scheduler import finished, first_token, refusal_of, serving
from fakes.standin import Standin
from fakes.waiting import eventually
from google.protobuf.duration_pb2 import Duration
from headway.routing.v1 import routing_pb2 as pb
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.rpc import resume, route_stream


@pytest.fixture
async def served(database_url):
    async with serving(database_url, resume_grace_s=0.3) as found:
        found.agents = [await found.agent()]
        await found.bind("gpu_aware")
        yield found


async def full(served, use=0.95):
    await served.agents[0].kv_use(e1=use, e2=use)


def holds(served):
    return len(served.scheduler.dispatcher.holds)


async def test_welcome_first(served):
    stream = await served.stream()
    (welcome,) = stream.welcomes
    assert (welcome.scheduler, welcome.epoch) == ("s1", served.scheduler.epoch)
    assert welcome.resume_grace.nanos == 300_000_000
    assert stream.views == 1


async def test_the_view_follows_what_may_be_chosen(served):
    """Not only who is there: a data plane must not go by itself where no Route would send it."""
    stream = await served.stream()
    both = ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert sorted(stream.view) == both
    (agent,) = served.agents
    await agent.sample(tpb.EngineSample(address=both[0], ready=False), tpb.EngineSample(address=both[1], ready=True))
    await stream.until(lambda: stream.view == both[1:])
    await agent.sample(tpb.EngineSample(address=both[0], ready=True))
    await stream.until(lambda: sorted(stream.view) == both)
    seen = stream.views
    await agent.sample(tpb.EngineSample(address=both[0], ready=True, running=tpb.Measurement(value=3)))
    await stream.route(1)
    await stream.answered(1)
    assert stream.views == seen, "load alone is no news"


async def test_the_view_of_a_large_fleet_comes_too(served, monkeypatch):
    """It is written in turns, after the welcome."""
    monkeypatch.setattr(route_stream, "AT_ONCE", 1)
    stream = await served.stream()
    await stream.until(lambda: stream.view)
    assert len(stream.welcomes) == 1
    assert sorted(stream.view) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    await served.agents[0].sample(tpb.EngineSample(address="10.0.0.1:8000", ready=False))
    await stream.until(lambda: stream.view == ["10.0.0.2:8000"])


async def test_routes_and_reports_many_a_message(served):
    stream = await served.stream()
    await stream.route(*range(50))
    answers = await stream.answered(*range(50))
    ids = [answer.response.reservation_id for answer in answers]
    assert set(ids) == set(served.reservations)
    await stream.send(reports=[*map(finished, ids), finished(ids[0]), pb.Report(reservation_id="x")])
    await stream.until(lambda: len(stream.report_results) == 2)
    assert [r.status for r in stream.report_results] == [pb.REPORT_STATUS_DUPLICATE, pb.REPORT_STATUS_INVALID]
    assert not served.reservations


async def test_a_held_call_does_not_block_the_line(served):
    stream = await served.stream()
    await full(served)
    await stream.route(1)
    await eventually(lambda: holds(served) == 1)
    await stream.route(2, max_wait=Duration())
    (refused,) = await stream.answered(2)
    assert refusal_of(refused.error).reason == "SATURATED"
    assert 1 not in stream.answers
    await full(served, 0.1)
    (answer,) = await stream.answered(1)
    assert answer.response.decision.held_ms > 0


async def test_one_bad_request_fails_alone(served, monkeypatch):
    stream = await served.stream()
    good = pb.RouteRequest(model="m", text="hello")
    requests = [good, pb.RouteRequest(model="nope"), pb.RouteRequest(), pb.RouteRequest(model="m", tenant="nope"), good]
    await stream.send(routes=[pb.RouteCall(correlation_id=n, request=r) for n, r in enumerate(requests)])
    answers = await stream.answered(*range(5))
    reasons = [refusal_of(a.error).reason if a.HasField("error") else "" for a in answers]
    assert reasons == ["", "UNKNOWN_MODEL", "INVALID_FIELD", "UNKNOWN_TENANT", ""]
    submit = served.scheduler.dispatcher.submit

    def poisoned(request, *rest):
        if request.request_id == "poison":
            raise ZeroDivisionError("quoting the prompt")
        return submit(request, *rest)

    monkeypatch.setattr(served.scheduler, "dispatcher", Standin(served.scheduler.dispatcher, submit=poisoned))
    await stream.route(10, request_id="poison")
    await stream.route(11)
    poison, fine = await stream.answered(10, 11)
    assert refusal_of(poison.error).code is grpc.StatusCode.INTERNAL
    assert "quoting" not in str(poison)
    assert fine.HasField("response")


async def test_a_correlation_id_that_is_open(served):
    stream = await served.stream()
    await full(served)
    await stream.route(1)
    await stream.route(1, request_id="other")
    (answer,) = await stream.answered(1)
    assert refusal_of(answer.error).field == "correlation_id"


async def test_cancels(served):
    stream = await served.stream()
    await stream.route(1)
    await stream.answered(1)
    await stream.send(cancels=[1, 99])
    await eventually(lambda: not served.reservations)
    await full(served)
    await stream.route(2)
    await eventually(lambda: holds(served) == 1)
    await stream.send(cancels=[2])
    await eventually(lambda: not holds(served))
    call = pb.RouteCall(correlation_id=3, request=pb.RouteRequest(model="m", text="x"))
    await stream.send(routes=[call], cancels=[3])
    await stream.send(routes=[pb.RouteCall(correlation_id=4, request=pb.RouteRequest(model="nope"))])
    await stream.answered(4)
    assert not holds(served), "asked for and given up in one message"
    assert set(stream.answers) == {1, 4}


async def test_an_empty_message_is_a_ping(served):
    stream = await served.stream()
    before = stream.messages
    await stream.send()
    await stream.until(lambda: stream.messages == before + 1)


async def test_who_only_reports_is_answered_with_the_next_answer(served, monkeypatch):
    """Else a busy stream would carry as many empty messages as others."""
    monkeypatch.setattr(route_stream, "_ECHO_S", 3600.0)
    stream = await served.stream()
    await stream.route(1)
    (answer,) = await stream.answered(1)
    before = stream.messages
    await stream.send(reports=[first_token(answer.response.reservation_id)])
    for _ in range(5):
        await stream.send(reports=[pb.Report(reservation_id=answer.response.reservation_id, progress=pb.Progress())])
    await stream.send(reports=[finished(answer.response.reservation_id)])
    await eventually(lambda: not served.reservations)
    await stream.route(2)
    await stream.answered(2)
    assert stream.messages == before + 1


async def test_or_by_itself_soon(served):
    stream = await served.stream()
    await stream.route(1)
    (answer,) = await stream.answered(1)
    before = stream.messages
    await stream.send(reports=[finished(answer.response.reservation_id)])
    await stream.until(lambda: stream.messages == before + 1)
    assert not served.reservations


class TestHalfClose:
    async def test_answers_all_that_was_asked(self, served):
        stream = await served.stream()
        await full(served)
        await stream.route(1, 2, 3)
        await stream.route(4, max_wait=Duration())
        await stream.call.done_writing()
        await stream.answered(4)
        await full(served, 0.1)
        await asyncio.wait_for(stream.reader, 15)
        assert set(stream.answers) == {1, 2, 3, 4}
        assert await stream.call.code() is grpc.StatusCode.OK

    async def test_at_once_after_the_last_message(self, served):
        for _ in range(5):
            stream = await served.stream()
            await stream.route(1)
            await stream.call.done_writing()
            await asyncio.wait_for(stream.reader, 15)
            assert set(stream.answers) == {1}

    async def test_also_resumes(self, served, monkeypatch):
        monkeypatch.setattr(resume, "_PATIENCE_S", 0.1)
        stream = await served.stream()
        entry = pb.ResumedReservation(reservation_id="x", model="m", endpoint="endpoints/10.9.9.9:1@0")
        await stream.send(resumes=[entry])
        await stream.call.done_writing()
        await asyncio.wait_for(stream.reader, 15)
        assert [r.status for r in stream.resume_results] == [pb.RESUME_STATUS_ENDPOINT_GONE]


class TestLostStream:
    async def test_orphans_end_after_the_grace(self, served):
        stream = await served.stream()
        await stream.route(1, 2)
        await stream.answered(1, 2)
        assert all(r.expires_at is None for r in served.reservations.values())
        await stream.lose()
        await eventually(lambda: not served.reservations)

    async def test_resumed_on_another_stream_they_live(self, served):
        stream = await served.stream()
        await stream.route(1, 2)
        answers = [a.response for a in await stream.answered(1, 2)]
        await stream.lose()
        await eventually(lambda: all(r.owner is None for r in served.reservations.values()))
        fresh = await served.stream()
        entries = [
            pb.ResumedReservation(reservation_id=a.reservation_id, model="m", endpoint=a.endpoint.name) for a in answers
        ]
        await fresh.send(resumes=entries)
        await fresh.until(lambda: len(fresh.resume_results) == 2)
        assert {r.status for r in fresh.resume_results} == {pb.RESUME_STATUS_RESUMED}
        assert all(r.expires_at is None for r in served.reservations.values())
        await fresh.send(reports=[finished(a.reservation_id) for a in answers])
        await eventually(lambda: not served.reservations)

    async def test_its_holds_go_with_it(self, served):
        stream = await served.stream()
        await full(served)
        await stream.route(*range(10))
        await eventually(lambda: holds(served) == 10)
        await stream.lose()
        await eventually(lambda: not holds(served))
        await full(served, 0.1)
        assert not served.reservations

    async def test_a_retry_on_another_stream_keeps_the_place(self, served):
        stream = await served.stream()
        await full(served)
        await stream.route(1, request_id="r")
        await eventually(lambda: holds(served) == 1)
        fresh = await served.stream()
        await fresh.route(7, request_id="r")
        (hold,) = served.scheduler.dispatcher.holds
        await eventually(lambda: len(hold.waiters) == 2)
        await stream.lose()
        await eventually(lambda: len(hold.waiters) == 1)
        await full(served, 0.1)
        await fresh.answered(7)
        await fresh.lose()
        await eventually(lambda: not served.reservations)


async def test_answers_that_nobody_reads_are_bounded(served, monkeypatch):
    monkeypatch.setattr(route_stream, "_MAX_UNREAD", 64)
    call = served.router.RouteStream()
    await call.read()
    request = pb.RouteRequest(model="nope", tenant="default")
    message = pb.RouteStreamRequest(routes=[pb.RouteCall(correlation_id=n, request=request) for n in range(64)])
    written = 0

    async def flood():
        nonlocal written
        while True:
            await call.write(message)
            written += 1

    task = asyncio.create_task(flood())
    before = -1
    while written != before:  # until flow control stops us
        before = written
        await asyncio.sleep(0.5)
    refusals = served.scheduler.refusals["UNKNOWN_MODEL"]
    assert refusals < written * 64, "the scheduler stopped reading, and with it deciding"
    task.cancel()
    call.cancel()
    await served.route()
