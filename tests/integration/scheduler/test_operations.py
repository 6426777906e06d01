"""A scheduler in use: strategies swapped, restarts, drains, other processes' changes, a Postgres that goes away."""

import asyncio
import os
import signal
from dataclasses import replace

import grpc
import msgspec
import pytest
from fakes.postgres import FAST, connect
from fakes.rig import Rig, desired_state
from fakes.scheduler import finished, refused, serving
from fakes.standin import Standin
from fakes.waiting import eventually
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as pb
from headway_scheduler.app import Scheduler
from headway_scheduler.config import Config
from headway_scheduler.domain.desired import StrategyBinding, Tenant
from headway_scheduler.domain.report import Usage
from headway_scheduler.errors import StoreDown
from headway_scheduler.store import migrate
from headway_scheduler.store.base import Write
from headway_scheduler.store.embedded import EmbeddedPostgres
from headway_scheduler.store.postgres import PostgresStore

STRATEGIES = ("round_robin", "prefix_match", "gpu_aware", "adaptive")


async def test_strategies_are_swapped_under_load_and_no_route_is_lost(database_url):
    async with serving(database_url) as served:
        await served.agent()
        swapped, seen, settled = asyncio.Event(), set(), 0

        async def load(number):
            nonlocal settled
            while not swapped.is_set():
                answer = await served.route(text=f"prompt {number} " * 50)
                seen.add(answer.decision.strategy)
                assert await served.finish(answer) == [1]
                settled += 1

        clients = [asyncio.create_task(load(n)) for n in range(6)]
        for strategy in STRATEGIES * 2:
            before = settled
            await served.bind(strategy)
            await eventually(lambda before=before: settled > before + 12)
        name = "strategies/adaptive"
        await served.admin.DisableStrategy(apb.DisableStrategyRequest(name=name))
        answer = await served.route()
        assert (answer.decision.strategy, answer.decision.fell_back_from) == ("strategies/least_request", name)
        await served.finish(answer)
        await served.admin.EnableStrategy(apb.EnableStrategyRequest(name=name))
        tuned = apb.Strategy(name=name, parameters={"externality": 0.5})
        mask = {"paths": ["parameters"]}
        await served.admin.UpdateStrategy(apb.UpdateStrategyRequest(strategy=tuned, update_mask=mask))
        assert served.scheduler.registry.installed["adaptive"].strategy.parameters.externality == 0.5
        nonsense = apb.Strategy(name=name, parameters={"externality": "much"})
        error = await refused(
            served.admin.UpdateStrategy(apb.UpdateStrategyRequest(strategy=nonsense, update_mask=mask))
        )
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "strategy.parameters.externality")
        swapped.set()
        await asyncio.gather(*clients)
        assert {f"strategies/{strategy}" for strategy in STRATEGIES} <= seen
        assert not served.reservations
        assert served.scheduler.dispatcher.routes == settled + 1


async def test_an_unknown_strategy_cannot_be_bound(database_url):
    async with serving(database_url) as served:
        error = await refused(served.bind("nope"))
        assert error.code is grpc.StatusCode.NOT_FOUND
        assert error.field.startswith("strategy_binding")


async def test_learned_state_survives_a_restart(database_url):
    async with serving(database_url) as before:
        await before.agent()
        for _ in range(5):
            answer = await before.route(text="x" * 3000)
            report = pb.Report(reservation_id=answer.reservation_id)
            report.first_token.ttft_ms = answer.decision.predicted_ttft_ms * 3
            await asyncio.sleep(report.first_token.ttft_ms / 1e3)  # the engine computes
            usage = pb.Usage(prompt_tokens=1000, completion_tokens=77)
            await before.report(report, finished(answer.reservation_id, usage=usage, duration_ms=1500.0))
        salt = before.scheduler.salts.salt("tenant/default", "vllm")
        learned = before.scheduler.costs.dump(), msgspec.json.decode(before.scheduler.history.dump())
    with connect(database_url) as connection:
        keys = {key for (key,) in connection.execute("SELECT key FROM learned_state").fetchall()}
        assert {key.partition("/")[0] for key in keys} == {"cache_salt_secret", "cost_model", "history", "quotas"}
        assert not {"cost_model", "history"} & keys, "in parts"
    async with serving(database_url) as after:
        assert (after.scheduler.costs.dump(), msgspec.json.decode(after.scheduler.history.dump())) == learned
        assert after.scheduler.history.bytes_per_token("m") == pytest.approx(3.0)
        assert after.scheduler.salts.salt("tenant/default", "vllm") == salt
        await after.agent()
        assert after.scheduler.fleet.columns.tok_ms[0] > 0.07
    with connect(database_url) as connection:
        row = connection.execute("SELECT sum(requests), sum(prompt_tokens) FROM usage").fetchone()
        assert row == (5, 5_000)
        assert connection.execute("SELECT count(*) FROM models WHERE id = 'm'").fetchone() == (1,)


async def test_a_learned_state_that_cannot_be_read_is_ignored(database_url):
    store = PostgresStore(database_url)
    await store.save_learned({"cost_model": b"nonsense", "history": b"\xff"})
    await store.close()
    async with serving(database_url) as served:
        await served.agent()
        await served.route()


async def test_changes_of_another_process_arrive(database_url):
    async with serving(database_url) as served:
        await served.agent()
        other = PostgresStore(database_url)
        write = Write("someone", "Test")
        assert (await refused(served.route(tenant="acme"))).reason == "UNKNOWN_TENANT"
        await other.create(Tenant("acme"), write)
        await eventually(lambda: "acme" in served.scheduler.desired.tenants)
        binding = await other.get(StrategyBinding, "default")
        await other.update(replace(binding, strategy="random"), write)
        await eventually(lambda: served.scheduler.registry.bound("default", "m").active.config.id == "random")
        assert (await served.route()).decision.strategy == "strategies/random"
        await other.close()


class TestDrain:
    async def test_refuses_what_is_new_finishes_what_is_in_flight_and_closes(self, database_url):
        async with serving(database_url) as served:
            agent = await served.agent()
            await served.bind("gpu_aware")
            stream = await served.stream()
            await stream.route(1)
            (answer,) = await stream.answered(1)
            unary = await served.route()
            await agent.kv_use(e1=0.95, e2=0.95)
            held = asyncio.create_task(refused(served.route()))
            await eventually(lambda: len(served.scheduler.dispatcher.holds) == 1)
            served.scheduler.drain()
            stopping = asyncio.create_task(served.server.stop(30.0))
            assert (await held).reason == "SHUTTING_DOWN"
            assert (await refused(served.route())).reason == "SHUTTING_DOWN"
            await stream.route(2)
            await stream.until(lambda: 2 in stream.answers and stream.draining)
            health = health_pb2_grpc.HealthStub(served.channel)
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await served.fleet.GetStatus(fpb.GetStatusRequest())).draining
            assert await served.finish(unary) == [1]
            assert not stopping.done(), "one is in flight still"
            await stream.send(reports=[finished(answer.response.reservation_id)])
            await asyncio.wait_for(stopping, 15)
            assert not served.reservations
            assert agent.reader.done() or await eventually(agent.reader.done)

    async def test_not_longer_than_it_may(self, database_url):
        async with serving(database_url) as served:
            await served.agent()
            await served.route()
            served.scheduler.drain()
            await asyncio.wait_for(served.server.stop(0.2), 15)
            assert len(served.reservations) == 1


class TestPostgresAway:
    @pytest.fixture
    def postgres_of_its_own(self, postgres_dir):
        server = EmbeddedPostgres(postgres_dir, settings=FAST)
        migrate.upgrade(server.start())
        yield server
        server.stop()

    async def test_route_goes_on_writes_say_so_and_it_recovers(self, postgres_of_its_own):
        server = postgres_of_its_own
        async with serving(server.url) as served:
            await served.agent()
            await served.route()
            os.kill(server.pid, signal.SIGKILL)
            await eventually(lambda: not served.store.available)
            answer = await served.route()
            assert await served.finish(answer) == [1]
            tenant = apb.CreateTenantRequest(tenant=apb.Tenant(name="tenants/acme"))
            error = await refused(served.admin.CreateTenant(tenant))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_DOWN")
            assert not (await served.fleet.GetStatus(fpb.GetStatusRequest())).store_available
            server.stop()
            server.start()
            await eventually(lambda: served.store.available)
            await served.admin.CreateTenant(tenant)
            assert "acme" in served.scheduler.desired.tenants


class TestSaving:
    def scheduler(self):
        rig = Rig(desired_state())
        rig.endpoints(1)
        return rig

    async def test_usage_that_could_not_be_saved_is_kept(self):
        rig = self.scheduler()
        rig.finish(rig.route(), usage=Usage(5, 6, 7))
        saved, rig.store.save_learned = rig.store.save_learned, failing
        with pytest.raises(StoreDown):
            await rig.scheduler._save()
        rig.finish(rig.route(), usage=Usage(5, 6, 7))
        rig.store.save_learned = saved
        rig.store.create = none
        await rig.scheduler._save()
        assert sum(row.requests for row in rig.store.usage) == 2

    async def test_also_when_it_is_cancelled_meanwhile(self):
        rig = self.scheduler()
        rig.finish(rig.route(), usage=Usage(5, 6, 7))
        rig.store.save_learned = forever
        task = asyncio.create_task(rig.scheduler._save())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert len(rig.scheduler.usage) == 1

    async def test_a_change_that_could_not_be_read_at_once_is_read_later(self, monkeypatch):
        rig = self.scheduler()
        monkeypatch.setattr("headway_scheduler.app._RETRY_S", 0.001)
        load, tries = rig.store.load, []

        async def unsteady():
            tries.append(1)
            if len(tries) < 4:
                raise StoreDown("away")
            return await load()

        async def changes():
            yield 99

        rig.store.load, rig.store.changes = unsteady, changes
        rig.store.desired = replace(rig.store.desired, version=99)
        await rig.scheduler._follow_changes()
        assert len(tries) == 4
        assert rig.scheduler.desired.version == 99

    async def test_snapshots_are_applied_in_the_order_they_were_read(self):
        rig = self.scheduler()
        first, gate = rig.store.desired, asyncio.Event()

        async def slow_then_fast():
            found = rig.store.desired
            if found is first:
                await gate.wait()
            return found

        rig.store.load = slow_then_fast
        earlier = asyncio.create_task(rig.scheduler.refresh())
        await asyncio.sleep(0)
        rig.store.desired = replace(first, version=50)
        later = asyncio.create_task(rig.scheduler.refresh())
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(earlier, later)
        assert rig.scheduler.desired.version == 50

    async def test_a_model_that_an_admin_deleted_stays_deleted(self):
        rig = self.scheduler()
        created = []

        async def create(model, write):
            created.append(model.id)

        rig.store.create = create
        rig.connect("n2", *[])
        rig.desire(models={})
        await rig.scheduler._save()
        assert created == ["m"], "an endpoint serves it"
        rig.fleet.forget_node("n")
        rig.desire(models={})
        await rig.scheduler._save()
        assert created == ["m"]
        assert not rig.scheduler.intake.desired.models

    async def test_a_task_that_fails_is_started_again(self, monkeypatch):
        monkeypatch.setattr("headway_scheduler.app._RESTART_S", 0.001)
        monkeypatch.setattr("headway_scheduler.app.TICK_S", 0.001)
        rig = self.scheduler()
        sweeps = []

        def sweep(now):
            sweeps.append(now)
            raise RuntimeError

        rig.scheduler.core.fleet = Standin(rig.fleet, sweep=sweep)
        rig.store.load_learned = nothing_learned
        rig.store.changes = no_changes
        await rig.scheduler.start()

        def swept_again():
            rig.clock.now += 1
            return len(sweeps) >= 3

        await eventually(swept_again)
        rig.store.create = none
        await rig.scheduler.stop()


async def failing(*_args, **_options):
    raise StoreDown("away")


async def none(*_args):
    return None


async def forever(*_args, **_options):
    await asyncio.Event().wait()


async def nothing_learned():
    return {}


async def no_changes():
    await asyncio.Event().wait()
    yield 0


def test_duration_zero_is_set():
    assert pb.RouteRequest(max_wait=Duration()).HasField("max_wait")


def test_a_scheduler_has_an_epoch_of_its_own():
    config = Config(name="s1")
    one, other = (Scheduler(config, None) for _ in range(2))
    assert one.epoch != other.epoch
