"""Pages: what they say, to whom, and that no name becomes markup."""

import re
from datetime import UTC, datetime
from urllib.parse import unquote

import pytest
from fakes.console import Log, console_of, decision, fill, rigged
from fakes.rig import desired_state, gpu
from headway_console.doorkeeper import PARTS
from headway_scheduler.domain.desired import AuditEntry, Binding, GpuGroup, Model, StrategyConfig, Tenant
from headway_scheduler.domain.device import DeviceEvent, DeviceEventKind
from headway_scheduler.domain.endpoint import EndpointSpec, SchedulingState
from headway_scheduler.domain.telemetry import Hello
from headway_scheduler.domain.usage import Usage

HOSTILE = """<script>alert(1)</script>"'&{{7*7}}"""
PATHS = (
    "fleet",
    "fleet?by=heat&sort=kv&state=open&q=gpu",
    "fleet/nodes/gpu-003",
    "fleet/endpoints/10.0.3.1:8000@0",
    "traffic",
    "traffic?tenant=default&model=llama-3.1-70b",
    "traffic/req-3",
    "strategies",
    "strategies/adaptive",
    "strategies/prefix_match",
    "tenants",
    "tenants/default",
    "audit",
)


async def busy(nodes=6, **changes):
    scheduler = await rigged(desired_state("adaptive", **changes))
    fill(scheduler.fleet, nodes, scheduler.clock())
    scheduler.refusals.update(SATURATED=3, TENANT_TOKENS=1)
    return scheduler


def now_log(count=20):
    now = datetime.now(UTC).timestamp()
    return Log([decision(number, now - number) for number in range(count)])


@pytest.mark.parametrize("path", PATHS)
async def test_every_page_is_there_when_busy_and_obeys_its_own_policy(path):
    async with console_of(await busy(), now_log()) as (console, browser):
        await console.history.sample()
        answer = await browser.get(f"/console/{path}")
        assert answer.status == 200
        assert not re.findall(r"<[^>]+ (?:style|on\w+)=", answer.page)
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", answer.page))
        assert not re.findall(r"(?:src|href|action)=\"(?:https?:)?//", answer.page)
        assert answer.page.count("<h1") == 1
        assert ">nan" not in answer.page
        assert "None" not in re.sub(r"<p class=\"empty\">None\.</p>", "", answer.page)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("fleet", "No node has reported yet"),
        ("traffic", "No decision is recorded yet"),
        ("strategies", "All strategies"),
        ("tenants/default", "Nothing in the last hour"),
        ("audit", "Nothing was changed yet"),
    ],
)
async def test_an_empty_page_says_what_to_do(path, words):
    async with console_of(await rigged(desired_state())) as (_, browser):
        answer = await browser.get(f"/console/{path}")
        assert answer.status == 200
        assert words in answer.page


@pytest.mark.parametrize(
    "path",
    ["fleet/nodes/none", "fleet/endpoints/none", "traffic/none", "strategies/none", "tenants/none", "none/at/all"],
)
async def test_what_is_not_there_is_said_so(path):
    async with console_of(await busy()) as (_, browser):
        answer = await browser.get(f"/console/{path}")
        assert answer.status == 404
        assert "Fleet</a>" in answer.page, "the way back"


async def test_no_name_becomes_markup():
    tenant = Tenant("default", display_name=HOSTILE, isolation_domain=HOSTILE, models=(HOSTILE,))
    scheduler = await rigged(
        desired_state(
            "adaptive",
            tenants=(tenant,),
            groups=(GpuGroup("g", display_name=HOSTILE, selector={HOSTILE: HOSTILE}),),
            bindings=(Binding("default", "g"),),
            models={HOSTILE: Model(HOSTILE)},
            strategies={"adaptive": StrategyConfig("adaptive", "adaptive", display_name=HOSTILE)},
        )
    )
    spec = EndpointSpec(
        "10.0.0.1:1", models=(HOSTILE,), engine=HOSTILE, engine_version=HOSTILE, device_uuids=(HOSTILE,)
    )
    device = gpu(HOSTILE, product=HOSTILE, parent_uuid=HOSTILE)
    hello = Hello("n", "i", "b", agent_version=HOSTILE, labels={HOSTILE: HOSTILE}, devices=(device,), endpoints=(spec,))
    node = scheduler.fleet.connect(hello, 0.0)
    scheduler.fleet.apply_device_event(node, DeviceEvent(HOSTILE, DeviceEventKind.LOST, detail=HOSTILE))
    scheduler.refusals[HOSTILE] = 1
    scheduler.registry.installed["adaptive"].last_error = HOSTILE
    scheduler.store.used = [Usage("default", HOSTILE, datetime.now(UTC).replace(second=0, microsecond=0), 1, 1, 1, 1)]
    scheduler.store.entries = [
        AuditEntry(1, datetime.now(UTC), HOSTILE, HOSTILE, HOSTILE, {"a": HOSTILE}, {"a": [HOSTILE]}, "")
    ]
    row = decision(
        1,
        1.0,
        tenant=HOSTILE,
        model=HOSTILE,
        strategy=HOSTILE,
        outcome=HOSTILE,
        facts={HOSTILE: HOSTILE},
        shadows={HOSTILE: HOSTILE},
        endpoint=HOSTILE,
    )
    async with console_of(scheduler, Log([row])) as (_, browser):
        paths = ["fleet", "fleet?q=" + HOSTILE.replace("&", "%26").replace("#", ""), "fleet/nodes/n"]
        paths += ["fleet/endpoints/10.0.0.1:1@0", "traffic", "traffic/req-1", "strategies", "strategies/adaptive"]
        for path in [*paths, "tenants", "tenants/default", "audit", f"traffic/{'<script>alert(1)<%2Fscript>'}"]:
            page = (await browser.get(f"/console/{path}")).page
            assert "<script>alert" not in page, path
            assert "49}}" not in page, path
            assert "alert(1)" in page or path.startswith("traffic/%3C"), path


async def test_a_part_is_that_part_alone():
    async with console_of(await busy()) as (_, browser):
        browser.headers = {"X-Headway-Part": "endpoints"}
        page = (await browser.get("/console/fleet")).page
        assert "10.0.3.1:8000@0" in page
        assert "<html" not in page
        assert 'id="map"' not in page
        for other in ("nothing", "main", "title"):
            browser.headers = {"X-Headway-Part": other}
            assert (await browser.get("/console/fleet")).page.startswith("<!doctype html>")


async def test_every_part_that_a_page_loads_anew_is_one_of_it():
    async with console_of(await busy(), now_log()) as (_, browser):
        seen = set()
        for path in PATHS:
            browser.headers = {}
            named = re.findall(r'data-live="(\w+)"', (await browser.get(f"/console/{path}")).page)
            for part in named:
                browser.headers = {"X-Headway-Part": part}
                answer = await browser.get(f"/console/{path}")
                assert (answer.status, "<html" in answer.page) == (200, False), (path, part)
            seen.update(named)
        assert seen == PARTS


async def test_troubles_come_first_and_name_the_place():
    scheduler = await busy()
    fleet = scheduler.fleet
    async with console_of(scheduler) as (console, browser):
        fleet.nodes["gpu-005"].samples.clear()
        assert "All is well" in (await browser.get("/console/fleet")).page
        console.live._interval_s = 0.0
        fleet.apply_device_event(fleet.nodes["gpu-002"], DeviceEvent("GPU-2-4", DeviceEventKind.LOST))
        page = (await browser.get("/console/fleet")).page
        assert "1 thing needs attention" in page
        assert '<a href="/console/fleet/nodes/gpu-002">1 device lost, on gpu-002</a>' in page
        assert 'data-s="lost"' in page
        scheduler.store.available = False
        page = (await browser.get("/console/fleet")).page
        assert "Postgres cannot be reached" in page
        assert "2 things need attention" in page


async def test_endpoints_are_found_ordered_and_paged():
    scheduler = await busy(nodes=10)
    async with console_of(scheduler) as (_, browser):

        def shown(page):
            return re.findall(r'<th scope="row"><a href="/console/fleet/endpoints/([^"]+)"', page)

        first, second = [shown((await browser.get(f"/console/fleet?page={n}")).page) for n in (1, 2)]
        assert (len(first), len(second)) == (50, 30)
        assert not set(first) & set(second)
        assert shown((await browser.get("/console/fleet?page=99")).page) == second
        assert len(shown((await browser.get("/console/fleet?q=gpu-003")).page)) == 8
        assert shown((await browser.get("/console/fleet?model=other")).page) == []
        node = scheduler.fleet.nodes["gpu-001"]
        node.state = SchedulingState.CORDONED
        scheduler.fleet.refresh_guards(node.endpoints.values())
        assert len(shown((await browser.get("/console/fleet?state=closed")).page)) == 8
        by_kv = shown((await browser.get("/console/fleet?sort=kv")).page)
        slots = [scheduler.fleet.endpoints[unquote(each)].slot for each in by_kv]
        use = scheduler.fleet.columns.kv_use[slots].tolist()
        assert use == sorted(use, reverse=True)


async def test_decisions_are_found_by_a_part_of_their_id():
    async with console_of(await busy(), now_log()) as (_, browser):
        page = (await browser.get("/console/traffic?q=req-1")).page
        found = re.findall(r'<a href="/console/traffic/([^"]+)"', page)
        assert sorted(found) == sorted(["req-1", *[f"req-{number}" for number in range(10, 20)]])
        assert "No decision of these" in (await browser.get("/console/traffic?q=nothing-like-it")).page


async def test_a_decision_shows_the_chosen_first_with_costs_and_guards():
    async with console_of(await busy(), now_log()) as (_, browser):
        page = (await browser.get("/console/traffic/req-3")).page
        rows = re.findall(r"<tr[^>]*>.*?</tr>", page.partition("Candidates</h2>")[2], re.DOTALL)
        assert "10.0.0.0:8000@0" in rows[1]
        assert "chosen" in rows[1]
        assert "kv room" in rows[4]
        assert "3\u202f072" in rows[1]


async def test_the_database_may_be_away():
    async def away(**_):
        from headway_scheduler.errors import StoreDown

        raise StoreDown("gone")

    scheduler = await busy()
    scheduler.store.usage = away
    async with console_of(scheduler) as (_, browser):
        for path in ("tenants", "tenants/default"):
            answer = await browser.get(f"/console/{path}")
            assert answer.status == 200
            assert "usage is not shown" in answer.page
