"""Two schedulers on one database: who answers, who follows, and what of the old leader may still be written."""

import asyncio
import contextlib
import os
import signal
import threading

import grpc
import pytest
from fakes.postgres import FAST, connect
from fakes.scheduler import refused, serving
from fakes.waiting import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as rpb
from headway_client import ClientOptions, HeadwayClient
from headway_scheduler.domain.desired import Quotas, Tenant
from headway_scheduler.errors import Standby, StoreDown, TenantRequests
from headway_scheduler.leadership import Standing
from headway_scheduler.store import migrate
from headway_scheduler.store.base import PostgresAbsent, Term
from headway_scheduler.store.embedded import EmbeddedPostgres
from headway_scheduler.store.leader_lock import LOCK_KEY, PostgresLeaderLock
from headway_scheduler.store.postgres import PostgresStore

LEASE_S = 0.5
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ROUTER, FLEET = "headway.routing.v1.Router", "headway.fleet.v1.Fleet"
REQUEST = rpb.RouteRequest(model="m", text="hello", tenant="default")


def member(database_url, name):
    return serving(database_url, name=name, standby=True, lease_s=LEASE_S, HEADWAY_DATABASE_URL=database_url)


def leads(served):
    return served.scheduler.leadership.leads()


@contextlib.asynccontextmanager
async def pair(database_url):
    """A leads, B stands by; an agent streams to both."""
    async with member(database_url, "a") as a:
        await eventually(lambda: leads(a))
        async with member(database_url, "b") as b:
            for served in (a, b):
                await served.agent()
                served.go_on = threading.Event()
            try:
                yield a, b
            finally:
                a.go_on.set()
                b.go_on.set()


def stop_lease(served):
    """What SIGSTOP does to its lease, while the rest of it goes on and can be asked. Until `go_on`, or `pair` ends."""
    served.go_on = threading.Event()
    served.scheduler.leader_thread._loop.call_soon_threadsafe(served.go_on.wait)


async def _is(found, expected):
    return await found == expected


async def health(served, service):
    stub = health_pb2_grpc.HealthStub(served.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


class TestLock:
    @pytest.fixture
    async def locks(self, database_url):
        made = [PostgresLeaderLock(database_url, name, LEASE_S) for name in ("a", "b")]
        yield made
        for lock in made:
            await lock.close()

    async def test_one_has_it(self, locks):
        a, b = locks
        assert await a.take() == Term(1, 0.0)
        assert await b.take() is None
        await a.renew()
        await a.release()
        assert await b.take() == Term(2, 0.0)

    async def test_who_takes_it_from_one_that_did_not_give_it_must_wait(self, locks):
        a, b = locks
        await a.take()
        await a.close()
        term = await eventually(b.take)
        assert term == Term(2, LEASE_S)

    async def test_postgres_ends_the_session_of_one_that_says_nothing(self, locks):
        a, b = locks
        await a.take()
        assert await eventually(b.take) == Term(2, LEASE_S)
        with pytest.raises(StoreDown):
            await a.renew()
        with pytest.raises(StoreDown):
            await a.renew()

    async def test_nothing_listens_there(self, postgres_dir):
        lock = PostgresLeaderLock(f"postgresql://x@/x?host={postgres_dir}", "a", LEASE_S)
        with pytest.raises(PostgresAbsent):
            await lock.take()
        lock = PostgresLeaderLock("postgresql://x@127.0.0.1:1/x", "a", LEASE_S)
        with pytest.raises(PostgresAbsent):
            await lock.take()

    async def test_something_that_listens_and_says_nothing_is_no_proof(self):
        open_ = []
        server = await asyncio.start_server(lambda _reader, writer: open_.append(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        lock = PostgresLeaderLock(f"postgresql://x@127.0.0.1:{port}/x", "a", 0.2)
        with pytest.raises(StoreDown) as down:
            await lock.take()
        assert not isinstance(down.value, PostgresAbsent)
        await lock.close()
        for writer in open_:
            writer.close()
        server.close()
        await server.wait_closed()

    async def test_one_host_of_two_that_refuses_is_no_proof(self, database_url):
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        one, other = "host=127.0.0.1:1", f"host=127.0.0.1:{port}"
        for hosts, proof in (((one, other), False), ((one, one), True)):
            lock = PostgresLeaderLock(f"postgresql://x@/x?{'&'.join(hosts)}", "a", LEASE_S)
            with pytest.raises(StoreDown) as down:
                await lock.take()
            assert isinstance(down.value, PostgresAbsent) == proof
        server.close()
        await server.wait_closed()

    async def test_it_asks_again_after_the_session_was_ended(self, locks, database_url):
        a, _ = locks
        await a.reach()
        with connect(database_url) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headway-leader'"
            )
        with pytest.raises(StoreDown):
            await a.reach()
        await a.reach()


class TestLearnedState:
    async def test_only_of_the_newest_epoch(self, database_url):
        store, lock = PostgresStore(database_url), PostgresLeaderLock(database_url, "a", LEASE_S)
        await lock.take()
        await store.save_learned({"k": b"1"}, epoch=1)
        await lock.release()
        await lock.take()
        with pytest.raises(Standby):
            await store.save_learned({"k": b"old"}, epoch=1)
        with pytest.raises(Standby):
            await store.forget_learned(["k"], epoch=1)
        await store.save_learned({"k": b"2", "l": b"\x00"}, epoch=2)
        assert await store.load_learned() == {"k": b"2", "l": b"\x00"}
        await store.forget_learned(["k", "never/there"], epoch=2)
        await store.forget_learned(["k"], epoch=2)
        assert await store.load_learned() == {"l": b"\x00"}
        await lock.close()
        await store.close()

    async def test_the_first_secret_is_kept(self, database_url):
        store = PostgresStore(database_url)
        kept = await asyncio.gather(*(store.keep_learned("salt", bytes([number])) for number in range(4)))
        assert len(set(kept)) == 1
        await store.close()


class TestStandby:
    async def test_it_refuses_all_that_the_leader_answers_and_serves_the_rest(self, database_url):
        async with pair(database_url) as (a, b):
            assert (await a.route()).endpoint.name
            calls = (
                b.route(),
                b.router.Report(rpb.ReportRequest()),
                b.router.Resume(rpb.ResumeRequest()),
                b.router.Explain(rpb.ExplainRequest(request=REQUEST)),
            )
            for call in calls:
                refusal = await refused(call)
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "STANDBY")
            stream = b.router.RouteStream()
            assert (await refused(stream.read())).reason == "STANDBY"
            assert [(await health(b, name)) for name in ("", FLEET, ROUTER)] == [SERVING, SERVING, NOT_SERVING]
            assert (await health(a, ROUTER)) == SERVING
            standings = [(await each.fleet.GetStatus(fpb.GetStatusRequest())).standing for each in (a, b)]
            assert standings == ["leader", "standby"]
            assert len((await b.fleet.ListEndpoints(fpb.ListEndpointsRequest())).endpoints) == 2

    async def test_it_takes_over_when_the_leader_drains(self, database_url):
        async with pair(database_url) as (a, b):
            given = await a.route()
            a.scheduler.drain()
            await a.scheduler.hand_over()
            await eventually(lambda: leads(b))
            assert (await b.route()).endpoint.name
            assert await a.finish(given) == [rpb.REPORT_STATUS_APPLIED], "what is in flight ends where it began"

    async def test_one_that_drains_without_having_led_still_says_standby(self, database_url):
        async with pair(database_url) as (_, b):
            b.scheduler.drain()
            await b.scheduler.hand_over()
            assert (await refused(b.router.Report(rpb.ReportRequest()))).reason == "STANDBY"
            assert (await refused(b.route())).reason in ("STANDBY", "SHUTTING_DOWN")

    async def test_a_call_that_comes_while_it_takes_over_waits(self, database_url):
        async with pair(database_url) as (a, b):
            stop_lease(a)
            await eventually(lambda: b.scheduler.leadership.standing is Standing.TAKING_OVER)
            stream, answer = await asyncio.gather(b.stream(), b.route())
            assert stream.welcomes
            assert answer.reservation_id.startswith("b.")
            assert not leads(a)

    async def test_an_old_leader_answers_nothing_more(self, database_url):
        async with pair(database_url) as (a, b):
            stream = await a.stream()
            await stream.route(1)
            await stream.answered(1)
            await a.route()
            stop_lease(a)
            await eventually(lambda: leads(b))
            assert (await refused(a.route())).reason == "STANDBY"
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.route(2)
            assert (await refused(stream.reader)).reason == "STANDBY"
            assert set(stream.answers) == {1}
            a.go_on.set()
            await eventually(lambda: a.scheduler.leadership.standing is Standing.STANDBY)
            await eventually(lambda: not a.reservations)
            assert {name: column.sum() for name, column in a.scheduler.ledger.recompute().items() if column.sum()} == {}
            await eventually(lambda: _is(health(a, ROUTER), NOT_SERVING))

    async def test_what_it_holds_is_refused_by_one_that_stands_down(self, database_url):
        async with member(database_url, "a") as a:
            await eventually(lambda: leads(a))
            agent = await a.agent("n")
            await a.bind("gpu_aware")
            await agent.kv_use(e1=0.95, e2=0.95)
            held = asyncio.create_task(refused(a.route()))
            await eventually(lambda: len(a.scheduler.dispatcher.holds) == 1)
            with connect(database_url) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headway-leader'"
                )
                connection.execute("SELECT pg_advisory_lock(%s)", [LOCK_KEY])
                assert (await held).reason == "STANDBY"

    async def test_quotas_and_what_was_learned_go_over(self, database_url):
        async with pair(database_url) as (a, b):
            used_up = Tenant("default", quotas=Quotas(requests_per_minute=60))
            quotas, now = a.scheduler.dispatcher.quotas, a.scheduler.clock()
            for _ in range(60):
                quotas.admit(used_up, "m", 1.0, now)
            a.scheduler.drain()
            await a.scheduler.hand_over()
            await eventually(lambda: leads(b))
            with pytest.raises(TenantRequests):
                for _ in range(55):
                    b.scheduler.dispatcher.quotas.admit(used_up, "m", 1.0, b.scheduler.clock())


async def test_postgres_killed_and_started_again_leaves_the_leader_leading(postgres_dir):
    server = EmbeddedPostgres(postgres_dir, settings=FAST)
    migrate.upgrade(server.start())
    try:
        async with pair(server.url) as (a, b):
            epoch = a.scheduler.leadership.epoch
            os.kill(server.pid, signal.SIGKILL)
            await eventually(lambda: not a.store.available)
            until = a.scheduler.clock() + 3 * LEASE_S
            while a.scheduler.clock() < until:
                assert (await a.route()).reservation_id.startswith("a.")
                assert not leads(b)
                await asyncio.sleep(0.02)
            server.start()
            await eventually(lambda: a.scheduler.leadership.epoch == epoch + 1)
            assert (leads(a), leads(b)) == (True, False)
            await eventually(lambda: a.store.available)
    finally:
        server.stop()


async def test_clients_follow_and_lose_nothing(database_url):
    """The leader stops renewing, as when it hangs, but goes on refusing: clients move with what they hold."""
    options = ClientOptions(fail_open=False, fail_open_after_s=10.0)
    async with pair(database_url) as (a, b):
        targets = [f"127.0.0.1:{served.server.port}" for served in (a, b)]
        async with HeadwayClient(targets, options=options) as client, asyncio.timeout(30):
            held = [await client.route(REQUEST) for _ in range(5)]
            assert len(a.reservations) == 5
            stop_lease(a)
            more = await asyncio.gather(*(client.route(REQUEST) for _ in range(5)))
            assert {reservation.id.partition(".")[0] for reservation in more} <= {"a", "b"}
            await eventually(lambda: len(b.reservations) == 10)
            await eventually(lambda: client.stats.recreated >= 5)  # its answers are still on their way
            assert client.stats.refusals == client.stats.resume_failures == client.stats.fail_open_routes == 0
            for reservation in (*held, *more):
                reservation.finished(rpb.OUTCOME_SUCCESS)
            await eventually(lambda: not b.reservations)
            a.go_on.set()
