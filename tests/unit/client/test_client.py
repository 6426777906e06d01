"""HeadwayClient against a real gRPC server that plays the scheduler."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest
from fakes.router import FakeRouter, status_of
from fakes.waiting import eventually
from headway.routing.v1 import routing_pb2 as pb
from headway_client import ClientOptions, HeadwayClient, RouteRefused, connection, outbox

FAST = ClientOptions(fail_open_after_s=0.3, connect_timeout_s=0.3, backoff_initial_s=0.01, backoff_max_s=0.05)
PATIENT = ClientOptions(fail_open_after_s=30.0, backoff_initial_s=0.01, backoff_max_s=0.05)
A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    fake = FakeRouter([A, B, C])
    await fake.start()
    yield fake
    fake.scene.hung = False
    await fake.kill()


@pytest.fixture
async def second() -> AsyncIterator[FakeRouter]:
    fake = FakeRouter([A, B, C])
    await fake.start()
    yield fake
    await fake.kill()


def make_client(*routers: FakeRouter, options: ClientOptions = PATIENT, token: str = "") -> HeadwayClient:
    return HeadwayClient([r.target for r in routers], options=options, token=token, rng=random.Random(1))


def ask(request_id: str = "", model: str = "m", **fields: object) -> pb.RouteRequest:
    return pb.RouteRequest(request_id=request_id, model=model, tenant="acme", text="hello", **fields)


async def test_routes_and_reports_on_one_stream(router: FakeRouter) -> None:
    async with make_client(router, token="secret") as client:
        reservation = await client.route(ask("r1"))
        assert reservation.endpoint.address == A
        assert [e.address for e in reservation.fallbacks] == [B, C]
        reservation.first_token(12.5)
        reservation.first_token(99.0)
        reservation.progress(40)
        assert reservation.finished(pb.OUTCOME_SUCCESS, pb.Usage(prompt_tokens=3, completion_tokens=5))
        assert not reservation.finished(pb.OUTCOME_SERVER_ERROR)
        await router.until(lambda: not router.live)
    held = router.history[0]
    assert [r.WhichOneof("event") for r in held.events] == ["first_token", "progress", "finished"]
    assert held.events[0].first_token.ttft_ms == 12.5
    assert held.finished is not None and held.finished.usage.completion_tokens == 5
    assert router.metadata[0]["authorization"] == "Bearer secret"
    assert client.live == 0


async def test_what_arrives_while_a_message_is_written_is_the_next_message(router: FakeRouter) -> None:
    async with make_client(router) as client:
        await client.wait_connected()
        reservations = await asyncio.gather(*(client.route(ask(f"r{i}")) for i in range(500)))
        for reservation in reservations:
            reservation.finished(pb.OUTCOME_SUCCESS)
        await router.until(lambda: router.outcomes["OUTCOME_SUCCESS"] == 500)
    assert len({r.id for r in reservations}) == 500
    assert len(router.messages) < 50
    assert sum(len(m.routes) for m in router.messages) == 500


async def test_what_arrives_before_a_message_is_answered_is_the_next_message(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_ANSWER_S", 3600.0)
    router.scene.hold = True
    async with make_client(router) as client:
        await client.wait_connected()
        first = asyncio.ensure_future(client.route(ask("first")))
        await router.until(lambda: router.messages)
        others = [asyncio.ensure_future(client.route(ask(f"r{i}"))) for i in range(20)]
        await eventually(lambda: len(client._outbox._routes) == 20)
        await router.release_holds()
        await asyncio.gather(first, *others)
        assert [len(m.routes) for m in router.messages if m.routes] == [1, 20]


async def test_but_it_does_not_wait_for_one_that_is_held(router: FakeRouter) -> None:
    router.scene.hold = True
    async with make_client(router) as client:
        held = [asyncio.ensure_future(client.route(ask(f"r{i}"))) for i in range(3)]
        await router.until(lambda: sum(len(m.routes) for m in router.messages) == 3)
        last = asyncio.ensure_future(client.route(ask("last")))
        await router.until(lambda: sum(len(m.routes) for m in router.messages) == 4)
        await router.release_holds()
        await asyncio.gather(*held, last)


async def test_a_report_travels_with_a_request_or_at_the_end(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_LINGER_S", 3600.0)
    async with make_client(router) as client:
        first = await client.route(ask("r1"))
        first.first_token(12.5)
        second = await client.route(ask("r2"))
        first.finished(pb.OUTCOME_SUCCESS)
        second.finished(pb.OUTCOME_SUCCESS)
    await router.until(lambda: router.outcomes["OUTCOME_SUCCESS"] == 2)
    assert [(len(m.routes), len(m.reports)) for m in router.messages] == [(1, 0), (1, 1), (0, 2)]


async def test_long_messages_are_split(router: FakeRouter) -> None:
    async with make_client(router) as client:
        await client.wait_connected()
        prompt = "x" * 600_000
        await asyncio.gather(*(client.route(pb.RouteRequest(model="m", tenant="acme", text=prompt)) for _ in range(8)))
    assert max(len(m.routes) for m in router.messages) == 2


async def test_a_request_without_an_id_is_given_one(router: FakeRouter) -> None:
    async with make_client(router) as client:
        first, second = await client.route(ask()), await client.route(ask())
    assert first.request_id and second.request_id and first.request_id != second.request_id


async def test_a_refusal_is_an_exception_with_its_facts(router: FakeRouter) -> None:
    router.scene.refusal = status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "SATURATED", "busy", 2.5)
    async with make_client(router) as client:
        with pytest.raises(RouteRefused) as caught:
            await client.route(ask())
    refusal = caught.value
    assert (refusal.code, refusal.reason, refusal.message, refusal.retry_after_s) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SATURATED",
        "busy",
        2.5,
    )
    assert client.stats.refusals == 1
    assert client.stats.cancels == 0, "what was answered is not given up"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "OUTCOME_SUCCESS"),
        (TimeoutError(), "OUTCOME_TIMEOUT"),
        (ConnectionRefusedError(), "OUTCOME_CONNECT_ERROR"),
        (ConnectionResetError(), "OUTCOME_SERVER_ERROR"),
        (asyncio.CancelledError(), "OUTCOME_CANCELLED"),
        (KeyError("bug"), "OUTCOME_CANCELLED"),
    ],
)
async def test_leaving_the_context_finishes(router: FakeRouter, error: BaseException | None, outcome: str) -> None:
    async with make_client(router) as client:
        try:
            async with client.route(ask()):
                if error is not None:
                    raise error
        except BaseException as raised:
            assert raised is error
        await router.until(lambda: not router.live)
    assert router.outcomes == {outcome: 1}


async def test_cancelling_a_held_call_gives_it_up(router: FakeRouter) -> None:
    router.scene.hold = True
    async with make_client(router) as client:
        task = asyncio.create_task(client.ask(ask("held")))
        await router.until(lambda: len(router.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await router.until(lambda: len(router.cancels) == 1)
        await router.release_holds()
        await client.route(ask("next"))
    assert [h.request_id for h in router.history] == ["next"]


async def test_the_calls_own_timeout_bounds_the_hold_and_ends_it(router: FakeRouter) -> None:
    router.scene.hold = True
    async with make_client(router) as client:
        with pytest.raises(RouteRefused) as caught:
            await client.route(ask(), timeout_s=0.2)
        await router.until(lambda: len(router.cancels) == 1)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
    asked = router.requests[0].max_wait.ToTimedelta().total_seconds()
    assert 0.0 < asked < 0.2


async def test_a_held_call_is_not_a_hung_scheduler(router: FakeRouter) -> None:
    router.scene.hold = True
    async with make_client(router, options=FAST) as client:
        task = asyncio.create_task(client.ask(ask()))
        await eventually(lambda: client.stats.pings >= 4)  # Longer than fail_open_after_s by far.
        assert not task.done()
        await router.release_holds()
        reservation = await task
    assert not reservation.fail_open
    assert client.stats.unresponsive == client.stats.fail_open_routes == 0


async def test_a_hung_scheduler_is_routed_around_and_told_later(router: FakeRouter) -> None:
    async with make_client(router, options=FAST) as client:
        await client.wait_connected()
        router.scene.hung = True
        reservation = await client.route(ask("alone"))
        assert reservation.fail_open
        assert reservation.id == "failopen-alone"
        assert reservation.endpoint.address in (A, B, C)
        assert client.stats.unresponsive == 1
        assert (await client.route(ask("alone-2"))).fail_open  # At once: it is known to be silent.
        reservation.first_token(5.0)
        await router.wake()
        await router.until(lambda: {e.reservation_id for e in router.resumes} >= {"failopen-alone"})
        await eventually(lambda: not reservation.id.startswith("failopen-"))
        assert not reservation.as_resumed().fail_open, "a scheduler has counted it"
        reservation.finished(pb.OUTCOME_SUCCESS)
        await router.until(lambda: router.outcomes["OUTCOME_SUCCESS"] == 1)
        assert not (await client.route(ask("normal"))).fail_open
    resumed = next(e for e in router.resumes if e.reservation_id == "failopen-alone")
    assert (resumed.tenant, resumed.model, resumed.prompt_tokens, resumed.fail_open) == ("acme", "m", 2, True)
    held = next(h for h in router.history if h.outcome == pb.OUTCOME_SUCCESS)
    assert [r.WhichOneof("event") for r in held.events] == ["first_token", "finished"]


async def test_what_ended_while_alone_is_still_accounted_for(router: FakeRouter) -> None:
    async with make_client(router, options=FAST) as client:
        await client.wait_connected()
        await router.kill()
        reservation = await client.route(ask("alone"))
        assert reservation.fail_open
        reservation.finished(pb.OUTCOME_SUCCESS, pb.Usage(completion_tokens=9))
        assert client.live == 1
        await router.start()
        await router.until(lambda: router.outcomes["OUTCOME_SUCCESS"] == 1)
        await eventually(lambda: client.live == 0)
    assert router.history[-1].finished.usage.completion_tokens == 9


async def test_alone_it_takes_the_least_loaded_and_keeps_to_tenant_model_and_exclusions() -> None:
    router = FakeRouter([A, B, C], tenants=("tenants/acme",), models=("m", "other"))
    router.view_inflight = {A: 5, B: 1, C: 2}
    await router.start()
    async with make_client(router, options=FAST) as client:
        await client.wait_connected()
        assert client.models("acme") == ["m", "other"]
        assert client.models("rival") == []
        await router.kill()
        chosen = [(await client.route(ask(f"r{i}"))).endpoint.address for i in range(4)]
        assert chosen[0] == B  # 1, then B and C tie at 2.
        assert sorted(chosen[1:3]) == [B, C]
        assert A not in chosen
        excluding = await client.route(ask(excluded_endpoints=[B, "endpoints/10.0.0.3:8000@0"]))
        assert excluding.endpoint.address == A
        inside = await client.route(ask(subset=pb.Subset(endpoints=["10.0.0.1"])))
        assert inside.endpoint.address == A
        for refused in (
            pb.RouteRequest(model="m", tenant="rival", text="x"),
            pb.RouteRequest(model="m", text="x"),
            ask(model="unknown"),
            ask(subset=pb.Subset(labels={"zone": "a"})),
        ):
            with pytest.raises(RouteRefused) as caught:
                await client.route(refused)
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER")


async def test_alone_it_still_knows_aliases_and_salts(router: FakeRouter) -> None:
    router.scene.aliases = {"nick": "m"}
    router.scene.cache_salt = "salt-of-acme"
    async with make_client(router, options=FAST) as client:
        await client.route(ask(model="nick"))
        await client.wait_connected()
        await router.kill()
        known = await client.route(ask(model="nick"))
        stranger = await client.route(pb.RouteRequest(model="m", tenant="other", text="x"))
    assert (known.fail_open, known.model, known.cache_salt) == (True, "m", "salt-of-acme")
    assert stranger.cache_salt not in ("", "salt-of-acme")


async def test_fail_open_can_be_switched_off(router: FakeRouter) -> None:
    options = ClientOptions(fail_open=False, fail_open_after_s=0.1, backoff_max_s=0.05)
    async with make_client(router, options=options) as client:
        await client.wait_connected()
        await router.kill()
        with pytest.raises(RouteRefused) as caught:
            await client.route(ask())
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE
    assert client.stats.fail_open_routes == 0


async def test_after_a_restart_reservations_are_recreated_under_new_ids(router: FakeRouter) -> None:
    async with make_client(router) as client:
        running = [await client.route(ask(f"r{i}", max_tokens=64)) for i in range(3)]
        running[0].first_token(1.0)
        old = [r.id for r in running]
        await router.kill()
        await eventually(lambda: not client.connected)
        running[1].finished(pb.OUTCOME_SUCCESS)
        await router.start()
        await router.until(lambda: len(router.resumes) == 3)
        await eventually(lambda: client.stats.recreated == 3)
        assert not set(old) & {running[0].id, running[2].id}
        for reservation in running:
            reservation.finished(pb.OUTCOME_SUCCESS)
        await router.until(lambda: router.outcomes["OUTCOME_SUCCESS"] == 3)
        assert not router.live
    by_request = {e.request_id: e for e in router.resumes}
    assert by_request["r0"].first_token_seen and not by_request["r2"].first_token_seen
    assert by_request["r0"].max_tokens == 64
    assert client.stats.reconnects == 1
    assert client.live == 0


async def test_a_reservation_that_is_not_taken_back_is_finished_as_usual(router: FakeRouter) -> None:
    async with make_client(router) as client:
        reservation = await client.route(ask())
        await router.kill()
        router.scene.endpoint_gone = True
        await router.start()
        await eventually(lambda: client.stats.resume_failures == 1)
        assert reservation.finished(pb.OUTCOME_SUCCESS)
        assert client.live == 0


async def test_waiting_calls_are_asked_again_with_the_same_request_id(router: FakeRouter) -> None:
    router.scene.hold = True
    async with make_client(router) as client:
        task = asyncio.create_task(client.ask(ask("patient")))
        await router.until(lambda: len(router.requests) == 1)
        await router.kill()
        await router.start()
        await router.until(lambda: len(router.requests) == 2)
        await router.release_holds()
        reservation = await task
    assert [r.request_id for r in router.requests] == ["patient", "patient"]
    assert not reservation.fail_open


async def test_it_stays_with_the_first_that_answers_and_moves_when_that_dies(
    router: FakeRouter, second: FakeRouter
) -> None:
    standby, active = router, second
    standby.scene.stream_refusal = status_of(grpc.StatusCode.UNAVAILABLE, "STANDBY", "not me")
    async with make_client(standby, active) as client:
        reservations = [await client.route(ask(f"r{i}")) for i in range(4)]
        assert len(active.history) == 4 and not standby.history
        standby.scene.stream_refusal = None
        await active.kill()
        await client.route(ask("r4"))
        assert [h.request_id for h in standby.history if h.request_id == "r4"] == ["r4"]
        await eventually(lambda: client.stats.recreated == 4)
        assert len(reservations) == 4


async def test_an_answer_that_says_standby_moves_the_call_elsewhere(router: FakeRouter, second: FakeRouter) -> None:
    first = router
    first.scene.refusal = status_of(grpc.StatusCode.UNAVAILABLE, "STANDBY", "lost the lock")
    async with make_client(first, second) as client:
        await client.route(ask("r"))
    assert [h.request_id for h in second.history] == ["r"]


async def test_a_draining_scheduler_is_left_and_its_reservations_move(router: FakeRouter, second: FakeRouter) -> None:
    first = router
    async with make_client(first, second) as client:
        running = await client.route(ask("running"))
        await first.drain()
        await second.until(lambda: len(second.resumes) == 1)
        await client.route(ask("new"))
        running.finished(pb.OUTCOME_SUCCESS)
        await second.until(lambda: second.outcomes["OUTCOME_SUCCESS"] == 1)


async def test_a_scheduler_that_only_comes_and_goes_does_not_put_fail_open_off(router: FakeRouter) -> None:
    router.scene.refusal = status_of(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", "going away")
    async with make_client(router, options=FAST) as client:
        await client.wait_connected()
        reservation = await client.route(ask())
        assert reservation.fail_open
        assert client.stats.reconnects >= 1
        assert client.stats.refusals == 0


async def test_an_answer_that_comes_after_its_caller_left_is_given_back(router: FakeRouter) -> None:
    async with make_client(router) as client:
        task = asyncio.create_task(client.ask(ask("late")))
        await router.until(lambda: router.history)
        task.cancel()  # The answer is on its way.
        with pytest.raises(asyncio.CancelledError):
            await task
        await router.until(lambda: not router.live)
    assert router.outcomes == {"OUTCOME_CANCELLED": 1}


async def test_a_silent_target_is_passed_over(router: FakeRouter, second: FakeRouter) -> None:
    router.scene.hung = True
    async with make_client(router, second, options=FAST) as client:
        await client.wait_connected()
        assert not (await client.route(ask("r"))).fail_open
        assert client.stats.connect_failures == 1
    assert [h.request_id for h in second.history] == ["r"]


async def test_of_a_pair_whose_leader_hangs_the_standby_is_asked_until_it_leads(
    router: FakeRouter, second: FakeRouter
) -> None:
    leader, standby = router, second
    standby.scene.stream_refusal = status_of(grpc.StatusCode.UNAVAILABLE, "STANDBY", "not me")
    patient = ClientOptions(fail_open_after_s=0.3, connect_timeout_s=60.0, backoff_max_s=60.0)
    async with make_client(leader, standby, options=patient) as client:
        await client.route(ask("held"))
        leader.scene.hung = True
        assert (await client.route(ask("alone"))).fail_open
        # Were the leader waited for again, or the back-off not bounded, it would be so for a minute.
        await eventually(lambda: client.stats.connect_failures >= 12)
        standby.scene.stream_refusal = None
        await standby.until(lambda: len(standby.resumes) == 2)
        assert not (await client.route(ask("after"))).fail_open
        assert client.stats.unresponsive == 1
        await leader.wake()


async def test_a_scheduler_that_hangs_while_idle_is_noticed(router: FakeRouter) -> None:
    options = ClientOptions(fail_open_after_s=0.2, connect_timeout_s=0.2, idle_ping_s=0.05, backoff_max_s=0.05)
    async with make_client(router, options=options) as client:
        await client.wait_connected()
        await eventually(lambda: client.stats.pings >= 3)
        assert client.stats.unresponsive == 0
        router.scene.hung = True
        await eventually(lambda: client.stats.unresponsive == 1 and not client.connected)
        await router.wake()
        await eventually(lambda: client.connected)


async def test_a_refused_credential_is_told_and_never_routed_around(router: FakeRouter) -> None:
    router.scene.stream_refusal = status_of(grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL", "who?")
    async with make_client(router, options=FAST) as client:
        with pytest.raises(RouteRefused) as caught:
            await client.route(ask())
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")
        router.scene.stream_refusal = None
        await client.wait_connected()
        await client.route(ask())
    assert client.stats.fail_open_routes == 0


async def test_served_by_moves_the_reservation(router: FakeRouter) -> None:
    async with make_client(router) as client:
        reservation = await client.route(ask())
        reservation.served_by(reservation.fallbacks[0])
        assert reservation.endpoint.address == B
        await router.until(lambda: router.history[0].endpoint == "endpoints/10.0.0.2:8000@0")


async def test_closing_ends_what_is_left(router: FakeRouter) -> None:
    client = make_client(router)
    client.start()
    await client.route(ask())
    router.scene.hold = True
    waiting = asyncio.create_task(client.ask(ask()))
    await router.until(lambda: len(router.requests) == 2)
    await client.close()
    await client.close()
    with pytest.raises(RouteRefused, match="CLIENT_CLOSED"):
        await waiting
    with pytest.raises(RouteRefused, match="CLIENT_CLOSED"):
        await client.route(ask())
    await router.until(lambda: router.streams == 0)
    assert router.outcomes == {"OUTCOME_CANCELLED": 1}


async def test_without_any_scheduler_and_view_it_is_unavailable() -> None:
    absent = FakeRouter([A])
    await absent.start()
    await absent.kill()
    async with make_client(absent, options=FAST) as client:
        with pytest.raises(RouteRefused, match="NO_SCHEDULER"):
            await client.route(ask())


async def test_without_any_view_a_call_with_a_deadline_waits_for_a_scheduler(router: FakeRouter) -> None:
    await router.kill()
    async with make_client(router, options=FAST) as client:
        with pytest.raises(RouteRefused, match="NO_SCHEDULER"):
            await client.route(ask("gone"), timeout_s=1)
        waiting = asyncio.create_task(client.ask(ask("kept"), timeout_s=20))
        await eventually(lambda: client.stats.connect_failures > 2)
        assert not waiting.done()
        await router.start()
        assert (await waiting).endpoint.address == A


async def test_an_empty_view_does_not_replace_one_that_offers_something(router: FakeRouter) -> None:
    async with make_client(router, options=FAST) as client:
        await client.wait_connected()
        client._alone.update(pb.FailOpenView())
        await router.kill()
        assert (await client.route(ask())).fail_open


def test_targets_are_required() -> None:
    with pytest.raises(ValueError, match="targets"):
        HeadwayClient([])
