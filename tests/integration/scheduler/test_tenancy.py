"""Tenancy over the wire: exclusive groups, disruption budgets, usage, quotas that outlive a kill, failing open."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import grpc
import pytest
from fakes.postgres import connect
from fakes.scheduler import Served, endpoint, finished, refused, serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as rpb
from headway_scheduler.domain.desired import Binding, BindingMode, GpuGroup, Quotas, Tenant
from headway_scheduler.domain.usage import Usage
from headway_scheduler.http import HttpServer
from headway_scheduler.store.base import Write
from headway_scheduler.store.postgres import PostgresStore

WRITE = Write("test", "Test")
DEDICATED = BindingMode.DEDICATED
ROOT = Path(__file__).parents[3]


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as running:
        yield running


async def desire(served, *resources):
    for resource in resources:
        await served.store.update(resource, WRITE, allow_missing=True)
    await served.scheduler.refresh()


class TestExclusive:
    """`acme` has gold alone; the endpoints of `fast` and `gold` are named by labels."""

    async def prepared(self, served, **labels):
        await desire(
            served,
            Tenant("acme"),
            Tenant("beta"),
            GpuGroup("gold", selector={"tier": "gold"}),
            GpuGroup("fast", selector={"gpu": "h200"}),
            Binding("acme", "gold", DEDICATED),
        )
        return await served.agent("n", endpoint(1, labels=labels), endpoint(2))

    async def bind(self, served, mode):
        binding = apb.Binding(name="tenants/beta/bindings/fast", mode=mode)
        await served.admin.CreateBinding(apb.CreateBindingRequest(binding=binding))

    async def test_groups_that_share_an_endpoint_cannot_both_be_somebodys_alone(self, served):
        await self.prepared(served, tier="gold", gpu="h200")
        error = await refused(self.bind(served, apb.BINDING_MODE_DEDICATED))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GROUP_NOT_FREE")
        assert (error.field, error.facts["user"]) == ("binding.mode", "tenants/acme")
        assert "10.0.0.1:8000@0" in error.message
        await self.bind(served, apb.BINDING_MODE_SHARED)  # it shares all of fast but what is acme's
        assert (await served.route(tenant="acme")).endpoint.address == "10.0.0.1:8000"
        assert (await refused(served.route(tenant="beta"))).reason == "NO_ENDPOINTS"

    async def test_also_when_a_group_is_changed(self, served):
        await self.prepared(served, tier="gold")
        await self.bind(served, apb.BINDING_MODE_DEDICATED)
        group = apb.GpuGroup(name="gpuGroups/fast", endpoints=["10.0.0.1:8000@0"])
        request = apb.UpdateGpuGroupRequest(gpu_group=group, update_mask={"paths": ["endpoints"]})
        error = await refused(served.admin.UpdateGpuGroup(request))
        assert (error.reason, error.field) == ("GROUP_NOT_FREE", "gpu_group")
        request.gpu_group.endpoints[:] = ["10.0.0.2:8000@0"]
        await served.admin.UpdateGpuGroup(request)

    async def test_one_that_comes_into_it_later_is_closed_and_says_so(self, served):
        await self.prepared(served, tier="gold")
        await self.bind(served, apb.BINDING_MODE_DEDICATED)
        await served.agent("m", endpoint(3, labels={"tier": "gold", "gpu": "h200"}))
        listed = await served.fleet.ListEndpoints(fpb.ListEndpointsRequest())
        found = {each.name: each for each in listed.endpoints}
        assert list(found["endpoints/10.0.0.3:8000@0"].hard_guards) == ["contested"]
        assert not found["endpoints/10.0.0.3:8000@0"].healthy


class TestDisruptionBudget:
    async def budget(self, served, **budget):
        model = apb.Model(name="models/m", disruption_budget=apb.DisruptionBudget(**budget))
        await served.admin.UpdateModel(apb.UpdateModelRequest(model=model, allow_missing=True))

    def drain(self, served, number, force=False):
        return served.admin.SetEndpointState(
            apb.SetEndpointStateRequest(
                name=f"endpoints/10.0.0.{number}:8000@0", state=apb.SCHEDULING_STATE_DRAINING, force=force
            )
        )

    async def test_a_share_is_rounded_up_and_what_is_closed_already_costs_nothing(self, served):
        await self.budget(served, min_available_share=0.5)
        await served.agent("n", *(endpoint(number) for number in (1, 2, 3)))
        await self.drain(served, 1)
        error = await refused(self.drain(served, 2))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DISRUPTION_BUDGET")
        assert {name: error.facts[name] for name in ("model", "left", "required")} == {
            "model": "models/m", "left": "1", "required": "2"
        }  # fmt: skip
        await self.drain(served, 1)  # once more
        await self.drain(served, 2, force=True)

    async def test_drains_at_the_same_time_do_not_both_see_room(self, served):
        await self.budget(served, min_available=2)
        await served.agent("n", *(endpoint(number) for number in (1, 2, 3)))
        outcomes = await asyncio.gather(*(self.drain(served, n) for n in (1, 2, 3)), return_exceptions=True)
        assert sorted(isinstance(each, grpc.aio.AioRpcError) for each in outcomes) == [False, True, True]

    async def test_a_node_counts_with_all_of_its_endpoints(self, served):
        await self.budget(served, min_available=1)
        await served.agent("n", endpoint(1), endpoint(2))
        cordon = apb.SetNodeStateRequest(name="nodes/n", state=apb.SCHEDULING_STATE_CORDONED)
        assert (await refused(served.admin.SetNodeState(cordon))).reason == "DISRUPTION_BUDGET"
        await served.agent("o", endpoint(3))
        await served.admin.SetNodeState(cordon)
        uncordon = apb.SetNodeStateRequest(name="nodes/n", state=apb.SCHEDULING_STATE_ACTIVE)
        await served.admin.SetNodeState(uncordon)

    async def test_what_is_in_flight_on_a_drained_endpoint_ends_well(self, served):
        await served.agent("n", endpoint(1))
        answer = await served.route()
        await self.drain(served, 1)
        assert (await refused(served.route(max_wait={"seconds": 0}))).reason == "ALL_DRAINING"
        assert (await served.admin.GetNode(apb.GetNodeRequest(name="nodes/n"))).node.inflight == 1
        assert await served.finish(answer) == [rpb.REPORT_STATUS_APPLIED]
        assert (await served.admin.GetNode(apb.GetNodeRequest(name="nodes/n"))).node.inflight == 0


class TestUsage:
    async def listed(self, served, **fields):
        rows, request = [], apb.ListUsageRequest(**{"parent": "tenants/-"} | fields)
        while True:
            response = await served.admin.ListUsage(request)
            rows += response.usage
            request.page_token = response.next_page_token
            if not request.page_token:
                return rows

    async def test_what_is_served_refused_and_failed_is_counted_once(self, database_url):
        async with serving(database_url, save_interval_s=0.05) as served:
            await served.agent()
            answer, failed = await served.route(), await served.route()
            usage = rpb.Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=40)
            for _ in range(3):
                await served.report(finished(answer.reservation_id, usage=usage))
            await served.report(finished(failed.reservation_id, outcome=rpb.OUTCOME_SERVER_ERROR))
            await refused(served.route(subset={"endpoints": ["10.9.9.9"]}))
            assert (await refused(served.route(model="nope"))).reason == "UNKNOWN_MODEL"
            await eventually(lambda: not len(served.scheduler.usage))
            (row,) = await self.listed(served, interval=apb.USAGE_INTERVAL_TOTAL)
            assert (row.tenant, row.model) == ("tenants/default", "models/m")
            assert (row.requests, row.refusals, row.failures, row.fail_open_requests) == (1, 1, 1, 0)
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (100, 40, 7)

    async def test_pages_have_every_row_once_also_without_times(self, served):
        now = datetime.now(UTC).replace(second=0, microsecond=0)
        rows = [Usage("acme", f"m{n % 3}", now - timedelta(minutes=n + 5), 1) for n in range(12)]
        await served.store.record_usage(rows)
        found = await self.listed(served, parent="tenants/acme", page_size=5)
        assert len(found) == 12
        assert [row.start_time.seconds for row in found] == sorted(row.start_time.seconds for row in found)
        assert len(await self.listed(served, parent="tenants/beta")) == 0
        assert len(await self.listed(served, model="models/m1")) == 4

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"parent": ""}, "parent"),
            ({"interval": 9}, "interval"),
            ({"start_time": {"seconds": 10}, "end_time": {"seconds": 10}}, "start_time"),
            ({"end_time": {"seconds": 1 << 60}}, "end_time"),
            ({"page_token": "x"}, "page_token"),
            ({"page_size": -1}, "page_size"),
        ],
    )
    async def test_what_is_wrong_is_named(self, served, fields, field):
        assert (await refused(self.listed(served, **fields))).field == field

    async def test_a_store_that_is_slow_to_answer_gets_a_batch_once(self, served):
        """The answer is lost after the commit: the next flush sends the same batch."""
        record, tries = served.store.record_usage, []

        async def lossy(rows, batch=""):
            await record(rows, batch)
            tries.append(batch)
            if len(tries) == 1:
                raise ConnectionResetError

        served.store.record_usage = lossy
        served.scheduler.usage.add("acme", "m", requests=1)
        with contextlib.suppress(ConnectionResetError):
            await served.scheduler.usage.flush(served.store)
        served.scheduler.usage.add("acme", "m", requests=10)
        await served.scheduler.usage.flush(served.store)
        assert (tries[0], len(tries)) == (tries[1], 3)
        (row,) = await self.listed(served, interval=apb.USAGE_INTERVAL_TOTAL)
        assert row.requests == 11


async def test_usage_that_is_old_enough_is_forgotten(database_url):
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    store = PostgresStore(database_url)
    await store.record_usage([Usage("acme", "m", now - timedelta(days=days), 1) for days in (1, 3)])
    async with serving(database_url, usage_retention_days=2):
        span = {"since": now - timedelta(days=9), "until": now}

        async def left():
            return [row.minute for row in await store.usage(**span)] == [now - timedelta(days=1)]

        await eventually(left)
    await store.close()


class TestFailingOpen:
    async def test_what_was_placed_alone_is_charged_and_counted_at_the_reconnect(self, database_url):
        async with serving(database_url) as served:
            tenant = Tenant("acme", quotas=Quotas(requests_per_minute=2))
            await desire(served, tenant, Binding("acme", "all"))
            await served.agent()
            stream = await served.stream()
            entries = [
                rpb.ResumedReservation(
                    reservation_id=f"failopen-{n}",
                    tenant="acme",
                    model="m",
                    endpoint="10.0.0.1:8000@0",
                    prompt_tokens=10,
                    fail_open=True,
                )
                for n in range(5)
            ]
            await stream.send(resumes=[*entries, entries[0]])
            await stream.until(lambda: len(stream.resume_results) == 6)
            assert (await refused(served.route(tenant="acme"))).reason == "TENANT_REQUESTS"
            await served.scheduler.usage.flush(served.store)
            since = datetime.now(UTC) - timedelta(hours=1)
            (row,) = await served.store.usage(since=since, until=since + timedelta(hours=2))
            assert (row.tenant, row.fail_open, row.requests, row.refusals) == ("acme", 5, 0, 1)
            assert 'headway_fail_open_routes_total{tenant="acme"} 5.0' in await metrics(served.scheduler)


async def metrics(scheduler):
    server = HttpServer(scheduler)
    await server.start("127.0.0.1:0")
    try:
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{server.port}/metrics") as answer:
            return await answer.text()
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def process(database_url, folder):
    """A scheduler in a process of its own, and a client of it."""
    ports = folder / "ports.json"
    ports.unlink(missing_ok=True)
    settings = {
        "LISTEN": "127.0.0.1:0",
        "LISTEN_HTTP": "127.0.0.1:0",
        "PORT_FILE": str(ports),
        "SAVE_INTERVAL_S": "0.05",
        "STALE_AFTER_S": "60",
        "SETTLE_S": "0",
        "NAME": "killed",
    }
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")},
        **{f"HEADWAY_SCHEDULER_{name}": value for name, value in settings.items()},
        "HEADWAY_DATABASE_URL": database_url,
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("services", "protos/gen")),
    }
    null = asyncio.subprocess.DEVNULL
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headway_scheduler.main", env=environment, cwd=folder, stdout=null, stderr=null
    )
    try:
        await eventually(lambda: ports.exists() and ports.read_text().endswith("}"), 30)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{json.loads(ports.read_text())['grpc']}")
        async with channel:
            yield running, Served(None, None, None, channel)
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


async def test_quotas_outlive_a_kill(database_url, tmp_path):
    store = PostgresStore(database_url)
    for resource in (Tenant("acme", quotas=Quotas(requests_per_minute=2)), Binding("acme", "all")):
        await store.create(resource, WRITE)
    await store.close()
    async with process(database_url, tmp_path) as (running, served):
        await served.agent()
        for _ in range(2):
            await served.finish(await served.route(tenant="acme"))
        assert (await refused(served.route(tenant="acme"))).reason == "TENANT_REQUESTS"

        def saved():
            with connect(database_url) as connection:
                row = connection.execute("SELECT state FROM learned_state WHERE key = 'quotas'").fetchone()
            levels = json.loads(bytes(row[0]))["levels"] if row else {}
            return "acme" in levels and levels["acme"][0][0] < 1

        await eventually(saved)
        running.send_signal(signal.SIGKILL)
        await running.wait()
    async with process(database_url, tmp_path) as (_, served):
        await served.agent()
        error = await refused(served.route(tenant="acme"))
        assert error.reason == "TENANT_REQUESTS"
        assert 0 < error.retry_s <= 30
