"""Route, Report, Explain and Resume over a real port, with bad input, restarts and callers that leave."""

import asyncio

import grpc
import pytest
from fakes.scheduler import endpoint, finished, first_token, refusal_of, refused, served_by, serving
from fakes.waiting import eventually
from google.protobuf.duration_pb2 import Duration
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as pb
from headway_scheduler.rpc.resume import Resumer

APPLIED, DUPLICATE, UNKNOWN, INVALID = 1, 2, 3, 4
CODE = grpc.StatusCode


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as found:
        found.agents = [await found.agent()]
        yield found


async def full(served):
    """No endpoint may be dispatched to."""
    await served.bind("gpu_aware")
    await served.agents[0].kv_use(e1=0.95, e2=0.95)


class TestRoute:
    async def test_choose_reserve_report(self, served):
        answer = await served.route("r", max_tokens=100)
        assert answer.endpoint.name in ("endpoints/10.0.0.1:8000@0", "endpoints/10.0.0.2:8000@0")
        assert answer.endpoint.node == "nodes/n"
        assert len(answer.fallbacks) == 1
        assert answer.decision.strategy == "strategies/adaptive"
        assert answer.decision.HasField("predicted_ttft_ms")
        assert (answer.request_id, answer.model, answer.reservation_ttl.seconds) == ("r", "m", 300)
        assert set(served.reservations) == {answer.reservation_id}
        assert await served.report(first_token(answer.reservation_id)) == [APPLIED]
        assert await served.finish(answer) == [APPLIED]
        assert await served.finish(answer) == [DUPLICATE]
        assert not served.reservations

    async def test_a_request_id_is_made_up_where_there_is_none(self, served):
        first, second = await served.route(), await served.route()
        assert first.request_id
        assert first.request_id != second.request_id
        assert len(served.reservations) == 2

    async def test_retries_get_the_same_answer(self, served):
        first = await served.route("r")
        again = await served.route("r")
        assert again == first
        refusal = await refused(served.route("r", text="other"))
        assert (refusal.code, refusal.reason, refusal.field) == (CODE.ALREADY_EXISTS, "REQUEST_ID_IN_USE", "request_id")
        moved = await served.route("r", excluded_endpoints=[first.endpoint.name])
        assert moved.reservation_id == first.reservation_id
        assert moved.endpoint.name == first.fallbacks[0].name

    async def test_prompts_of_every_kind(self, served):
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 600)], tools="[]")
        blocks = pb.BlockHashes(scheme="tokens-xxh3-128", block_size=128, hashes=[1, 2], prompt_tokens=300)
        answers = [
            await served.route(chat=chat),
            await served.route(tokens=pb.TokenIds(ids=[1, 2] * 200)),
            await served.route(blocks=blocks),
            await served.route(text=None),
        ]
        assert [a.decision.prompt_tokens for a in answers] == [152, 400, 300, 0]
        again = await served.route(blocks=blocks)
        assert again.decision.matched_tokens in (0, 256)

    async def test_a_5_mb_prompt_is_routed_without_affinity(self, served):
        text = "word " * 1_000_000
        for _ in range(2):
            answer = await served.route(text=text)
            assert answer.decision.matched_tokens == 0
            assert answer.decision.prompt_tokens == 1_250_000
            assert answer.decision.task_class == pb.TASK_CLASS_LONG
        assert len(served.scheduler.index) == 0


BAD = {
    "no model": ({"model": ""}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "model"),
    "unknown model": ({"model": "nope"}, CODE.NOT_FOUND, "UNKNOWN_MODEL", "model"),
    "unknown tenant": ({"tenant": "nope"}, CODE.NOT_FOUND, "UNKNOWN_TENANT", "tenant"),
    "nonsense tenant": ({"tenant": "No Pe!"}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "tenant"),
    "other collection": ({"tenant": "nodes/default"}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "tenant"),
    "negative token": (
        {"tokens": pb.TokenIds(ids=[5, 6, -1])}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "tokens.ids[2]",
    ),
    "huge token": (
        {"tokens": pb.TokenIds(ids=[2**31])}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "tokens.ids[0]",
    ),
    "unknown scheme": (
        {"blocks": pb.BlockHashes(scheme="sha1-16", block_size=16, hashes=[1])},
        CODE.INVALID_ARGUMENT, "INVALID_FIELD", "blocks.scheme",
    ),
    "wrong block size": (
        {"blocks": pb.BlockHashes(scheme="tokens-xxh3-128", block_size=16, hashes=[1])},
        CODE.INVALID_ARGUMENT, "INVALID_FIELD", "blocks.block_size",
    ),
    "negative wait": ({"max_wait": Duration(seconds=-1)}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "max_wait"),
    "negative objective": (
        {"ttft_objective": Duration(seconds=-1)}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "ttft_objective",
    ),
    "unknown hint": ({"task_hint": 77}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "task_hint"),
    "unknown priority": ({"priority": 77}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "priority"),
    "long request id": ({"request_id": "x" * 257}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "request_id"),
    "long session": ({"session_id": "x" * 257}, CODE.INVALID_ARGUMENT, "INVALID_FIELD", "session_id"),
    "5 MB of model": ({"model": "x" * 5_000_000}, CODE.NOT_FOUND, "UNKNOWN_MODEL", "model"),
    "all excluded": ({"excluded_endpoints": ["10.0.0.1", "10.0.0.2"]}, CODE.UNAVAILABLE, "NO_ENDPOINTS", ""),
    "empty subset": ({"subset": pb.Subset(labels={"a": "b"})}, CODE.UNAVAILABLE, "NO_ENDPOINTS", ""),
}  # fmt: skip


async def test_bad_input_is_answered_by_the_table_naming_the_field(served):
    for name, (fields, code, reason, field) in BAD.items():
        refusal = await refused(served.route(**fields))
        assert (refusal.code, refusal.reason, refusal.field) == (code, reason, field), name
        with_explain = pb.RouteRequest(**({"model": "m", "text": "hello"} | fields))
        if reason != "NO_ENDPOINTS" and "request_id" not in fields:
            refusal = await refused(served.router.Explain(pb.ExplainRequest(request=with_explain)))
            assert (refusal.code, refusal.field) == (code, field), name
    assert not served.reservations
    await served.route()


class TestRefusals:
    async def test_none_draining_unhealthy(self, served):
        async def reason():
            return (await refused(served.route())).reason

        for number in (1, 2):
            await served.admin.SetEndpointState(
                apb.SetEndpointStateRequest(
                    name=f"endpoints/10.0.0.{number}:8000@0", state=apb.SCHEDULING_STATE_DRAINING
                )
            )
        assert await reason() == "ALL_DRAINING"
        await served.admin.SetEndpointState(
            apb.SetEndpointStateRequest(name="endpoints/10.0.0.1:8000@0", state=apb.SCHEDULING_STATE_ACTIVE)
        )
        await served.agents[0].hello(endpoint(1, ready=False), endpoint(2))
        await eventually(lambda: not served.scheduler.fleet.endpoints["10.0.0.1:8000@0"].ready)
        assert await reason() == "ALL_UNHEALTHY"
        await served.agents[0].hello(endpoint(3, models=["other"]))
        await eventually(lambda: len(served.scheduler.fleet.endpoints) == 1)
        assert await reason() == "NO_ENDPOINTS"
        status = await served.fleet.GetStatus(fpb.GetStatusRequest())
        assert dict(status.refusals) == {"ALL_DRAINING": 1, "ALL_UNHEALTHY": 1, "NO_ENDPOINTS": 1}

    async def test_saturated_and_expired(self, served):
        await full(served)
        refusal = await refused(served.route(max_wait=Duration()))
        assert (refusal.code, refusal.reason) == (CODE.RESOURCE_EXHAUSTED, "SATURATED")
        refusal = await refused(served.route(max_wait=Duration(nanos=200_000_000)))
        assert (refusal.code, refusal.reason) == (CODE.RESOURCE_EXHAUSTED, "HOLD_EXPIRED")
        assert not len(served.scheduler.dispatcher.holds)

    async def test_the_calls_own_deadline_cuts_the_hold(self, served):
        await full(served)
        refusal = await refused(served.route(timeout=1.0))
        assert refusal.reason == "HOLD_EXPIRED", "our answer, in time, and not the transport's"


class TestCallersThatLeave:
    async def test_a_cancelled_hold_leaves_no_trace(self, served):
        await full(served)
        call = served.router.Route(pb.RouteRequest(model="m", text="x"))
        await eventually(lambda: len(served.scheduler.dispatcher.holds) == 1)
        call.cancel()
        await eventually(lambda: not len(served.scheduler.dispatcher.holds))
        await served.agents[0].kv_use(e1=0.1)
        assert not served.reservations

    async def test_a_retry_keeps_its_place_and_joins(self, served):
        await full(served)
        request = pb.RouteRequest(request_id="r", model="m", text="x")
        first = served.router.Route(request)
        await eventually(lambda: len(served.scheduler.dispatcher.holds) == 1)
        second = served.router.Route(request)
        holds = served.scheduler.dispatcher.holds
        await eventually(lambda: len(next(iter(holds)).waiters) == 2)
        first.cancel()
        await eventually(lambda: len(next(iter(holds)).waiters) == 1)
        await served.agents[0].kv_use(e1=0.1)
        answer = await second
        assert list(served.reservations) == [answer.reservation_id]


class TestReport:
    async def test_each_is_answered_and_one_bad_one_spoils_no_other(self, served):
        first, second = await served.route(), await served.route()
        reports = [
            pb.Report(reservation_id=first.reservation_id),
            finished(first.reservation_id, outcome=0),
            finished(first.reservation_id, duration_ms=-1.0),
            served_by(first.reservation_id, ""),
            served_by(first.reservation_id, "10.9.9.9:1"),
            finished("s1.x.1"),
            finished(first.reservation_id),
            finished(second.reservation_id),
        ]
        response = await served.router.Report(pb.ReportRequest(reports=reports))
        assert [r.status for r in response.results] == [INVALID] * 5 + [UNKNOWN, APPLIED, APPLIED]
        fields = [r.detail.split(":")[0] for r in response.results[:5]]
        assert fields == ["event", "finished.outcome", "finished.duration_ms"] + ["served_by.endpoint"] * 2
        assert not served.reservations

    async def test_served_by_moves_it(self, served):
        answer = await served.route()
        assert await served.report(served_by(answer.reservation_id, answer.fallbacks[0].name)) == [APPLIED]
        columns = served.scheduler.fleet.columns
        slot = served.scheduler.fleet.find(answer.fallbacks[0].address).slot
        assert columns.inflight[slot] == columns.inflight.sum() == 1

    async def test_too_many_at_once(self, served):
        refusal = await refused(served.report(*[finished("x")] * 10_001))
        assert (refusal.code, refusal.field) == (CODE.INVALID_ARGUMENT, "reports")


class TestExplain:
    async def test_the_whole_table(self, served):
        await full(served)
        response = await served.router.Explain(pb.ExplainRequest(request=pb.RouteRequest(model="m", text="x")))
        assert response.would_hold
        assert [list(row.soft_guards) for row in response.rows] == [["memory_pressure"]] * 2
        assert all(row.HasField("cost") and row.HasField("sample_age_ms") for row in response.rows)
        assert not any(row.HasField("utilization") for row in response.rows), "unknown is unset"
        response = await served.router.Explain(
            pb.ExplainRequest(request=pb.RouteRequest(model="m", text="x", max_wait=Duration()), strategy="adaptive")
        )
        assert response.decision.strategy == "strategies/adaptive"
        assert [row.chosen for row in response.rows].count(True) == 1
        refusal = await refused(
            served.router.Explain(pb.ExplainRequest(request=pb.RouteRequest(model="m"), strategy="strategies/nope"))
        )
        assert (refusal.code, refusal.field) == (CODE.NOT_FOUND, "strategy")
        response = await served.router.Explain(
            pb.ExplainRequest(request=pb.RouteRequest(model="m", subset=pb.Subset(labels={"a": "b"})))
        )
        assert refusal_of(response.refusal).reason == "NO_ENDPOINTS"
        assert not served.reservations


def resumed(answer, **fields):
    parts = {
        "reservation_id": answer.reservation_id,
        "request_id": answer.request_id,
        "model": answer.model,
        "endpoint": answer.endpoint.name,
        "prompt_tokens": answer.decision.prompt_tokens,
    }
    return pb.ResumedReservation(**(parts | fields))


def waiting_for(served):
    """How many resumes wait for their endpoint's agent."""
    (announced,) = [each for each in served.scheduler.fleet.on_announced if isinstance(each.__self__, Resumer)]
    return sum(len(each) for each in announced.__self__._waiting.values())


async def resume(served, *reservations):
    return (await served.router.Resume(pb.ResumeRequest(reservations=reservations))).results


class TestResume:
    async def test_what_is_still_here(self, served):
        answer = await served.route("r")
        (result,) = await resume(served, resumed(answer, first_token_seen=True))
        assert result.status == pb.RESUME_STATUS_RESUMED
        assert len(served.reservations) == 1
        assert served.scheduler.fleet.columns.prefill_us.sum() == 0

    async def test_after_a_restart_and_before_the_agents(self, database_url):
        async with serving(database_url) as before:
            await before.agent()
            answers = [await before.route(f"r{n}") for n in range(3)]
            epoch = before.scheduler.epoch
            await before.scheduler._save()
        async with serving(database_url) as after:
            assert after.scheduler.epoch != epoch
            both = [asyncio.create_task(resume(after, *map(resumed, answers))) for _ in range(2)]
            await eventually(lambda: waiting_for(after) == 6)
            await after.agent()
            results, again = await asyncio.gather(*both)
            assert {r.status for r in results} == {pb.RESUME_STATUS_RECREATED}
            assert [r.new_reservation_id for r in results] == [r.new_reservation_id for r in again]
            assert len(after.reservations) == 3, "each once, however often announced"
            assert after.scheduler.fleet.columns.inflight.sum() == 3
            retried = await after.route("r0")
            assert retried.reservation_id == results[0].new_reservation_id
            assert retried.endpoint == answers[0].endpoint
            assert await after.finish(*answers) == [APPLIED] * 3, "reports under the old ids"
            assert await after.finish(*answers) == [DUPLICATE] * 3
            assert not after.reservations

    async def test_a_retry_that_came_first_is_the_same_request(self, database_url):
        async with serving(database_url) as before:
            await before.agent()
            answer = await before.route("r")
            await before.scheduler._save()
        async with serving(database_url) as after:
            await after.agent()
            retried = await after.route("r")
            (result,) = await resume(after, resumed(answer))
            assert result.new_reservation_id == retried.reservation_id
            assert len(after.reservations) == 1

    async def test_an_orphan_given_up_for_lost_counts_again(self, served):
        answer = await served.route("r")
        ledger = served.scheduler.ledger
        ledger.lose_owner(ledger.find(answer.reservation_id).owner, served.scheduler.clock() - 100)
        await eventually(lambda: not served.reservations)
        (result,) = await resume(served, resumed(answer))
        assert result.status == pb.RESUME_STATUS_RECREATED
        assert len(served.reservations) == 1

    async def test_what_the_holder_finished_does_not(self, served):
        answer = await served.route("r")
        await served.finish(answer)
        (result,) = await resume(served, resumed(answer))
        assert result.status == pb.RESUME_STATUS_ENDPOINT_GONE
        assert not served.reservations

    async def test_what_is_wrong_is_named(self, served):
        answer = await served.route("r")
        served.scheduler.ledger.reservations[answer.reservation_id].principal = "another"
        wrong = {
            "reservation_id": [resumed(answer), resumed(answer, reservation_id="")],
            "endpoint": [resumed(answer, reservation_id="x", endpoint="")],
            "tenant": [resumed(answer, reservation_id="x", tenant="nope")],
            "model": [resumed(answer, reservation_id="x", model="nope")],
        }
        for field, entries in wrong.items():
            for result in await resume(served, *entries):
                assert result.status == pb.RESUME_STATUS_INVALID
                assert result.detail.split(":")[0] == field
        served.scheduler.ledger.reservations[answer.reservation_id].principal = "local"

    async def test_not_on_an_endpoint_that_the_tenant_may_not_use(self, served):
        await served.agent("n2", endpoint(7, models=["other"]))
        answer = await served.route("r")
        (result,) = await resume(served, resumed(answer, reservation_id="x", endpoint="endpoints/10.0.0.7:8000@0"))
        assert result.status == pb.RESUME_STATUS_INVALID
        assert result.detail.startswith("endpoint: ")


async def test_fair_to_all_strategies_in_the_wire_words(served):
    for strategy in ("round_robin", "random", "consistent_hash", "global_least_request", "prefix_match", "gpu_aware"):
        await served.bind(strategy)
        answer = await served.route()
        assert answer.decision.strategy == f"strategies/{strategy}"
        await served.finish(answer)
