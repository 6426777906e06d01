"""The console in a real browser: Debian's Chromium, driven by Playwright, at a running scheduler.

`HEADWAY_PICTURES` names a folder for the pictures that docs/console.md shows.
"""

import contextlib
import itertools
import os
import re
import time
from pathlib import Path

from axe_playwright_python.base import AXE_FILE_PATH
from fakes.console import Log, decision, fill, operated, sample
from fakes.waiting import eventually
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.device import DeviceEvent, DeviceEventKind
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.tokens import token_sha256
from headway_scheduler.store.base import Write
from playwright.async_api import async_playwright, expect

CHROMIUM = "/usr/bin/chromium"
AXE = Path(AXE_FILE_PATH).read_text()
PAGES = (
    "fleet",
    "fleet/nodes/gpu-003",
    "fleet/endpoints/10.0.3.1:8000@0",
    "traffic",
    "traffic/req-3",
    "strategies",
    "strategies/adaptive",
    "tenants",
    "tenants/default",
    "audit",
    "nothing",
)


@contextlib.asynccontextmanager
async def chromium():
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def looking(database_url, *, nodes=6, expected=("404",), **settings):
    """A busy scheduler, and a page at it that allows itself no fault but those expected."""
    now = time.time()
    log = Log([decision(number, now - 2 * number) for number in range(250)])
    async with operated(database_url, log, **settings) as (served, http), chromium() as browser:
        fill(served.scheduler.fleet, nodes, served.scheduler.clock())
        await served.scheduler.refresh()
        context = await browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page = await context.new_page()
        faults = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        foreign = []
        page.on("request", lambda sent: foreign.append(sent.url) if not sent.url.startswith(http.url) else None)
        page.set_default_timeout(20_000)
        yield served, page, http.url
        assert foreign == [], "nothing is loaded from elsewhere"
        assert [fault for fault in faults if not any(each in fault for each in expected)] == []


async def violations(page):
    """What axe-core finds. It is put in through the debugger, past the page's own policy."""
    session = await page.context.new_cdp_session(page)
    await session.send("Runtime.evaluate", {"expression": AXE})
    await session.detach()
    found = await page.evaluate("axe.run(document).then(found => found.violations)")
    return [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found]


async def levels(page):
    return await page.locator("#map .c").evaluate_all("cells => cells.map(cell => cell.dataset.l).join()")


async def differs(page, before):
    return await levels(page) != before


async def first_paint(page):
    """Milliseconds after the page was asked for; None: not yet."""
    return await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")


async def test_axe_finds_nothing_and_no_page_is_wider_than_its_window(database_url):
    async with looking(database_url) as (served, page, url):
        served.scheduler.refusals.update(SATURATED=4)
        node = served.scheduler.fleet.nodes["gpu-004"]
        served.scheduler.fleet.apply_device_event(node, DeviceEvent("GPU-4-1", DeviceEventKind.LOST))
        for path in PAGES:
            await page.goto(f"{url}/console/{path}")
            for scheme, width in itertools.product(("light", "dark"), (1280, 390)):
                await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
                await page.set_viewport_size({"width": width, "height": 900})
                assert await violations(page) == [], (path, scheme, width)
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (path, width)


async def test_the_page_for_signing_in_has_no_violation_and_lets_a_viewer_in(database_url):
    async with looking(database_url, expected=("401",), require_credentials=True) as (served, page, url):
        token = "hw_made-for-this-test-only"
        await served.store.create(Credential("vera", Role.VIEWER, token_sha256(token)), Write("test", "Bootstrap"))
        await served.scheduler.refresh()
        await page.goto(f"{url}/console")
        assert await violations(page) == []
        await page.get_by_label("Token").fill("hw_wrong-wrong-wrong")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_contain_text("not known")
        await page.get_by_label("Token").fill(token)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
        assert token not in page.url
        assert token not in await page.content()
        assert "headway_session" not in await page.evaluate("document.cookie")
        await page.get_by_role("link", name="Strategies").click()
        assert await page.get_by_role("button", name="Disable").count() == 0
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("Token")).to_be_visible()


async def test_the_map_follows_the_fleet_and_is_walked_by_keys(database_url):
    async with looking(database_url) as (served, page, url):
        fleet, now = served.scheduler.fleet, served.scheduler.clock()
        await page.goto(f"{url}/console/fleet")
        await expect(page.get_by_role("heading", name="1 thing needs attention")).to_be_visible()
        cell = page.locator(".c[aria-label^='GPU 1']").nth(4)
        await expect(cell).to_have_attribute("data-s", "ok")
        fleet.apply_device_event(fleet.nodes["gpu-004"], DeviceEvent("GPU-4-1", DeviceEventKind.LOST))
        await expect(cell).to_have_attribute("data-s", "lost")
        await expect(page.get_by_role("heading", name="2 things need attention")).to_be_visible()
        before = await levels(page)
        for number, node in enumerate(fleet.nodes.values()):
            sample(fleet, node, number, now, sequence=9)
        await eventually(lambda: differs(page, before))
        await page.locator("#map .c").first.focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            await page.keyboard.press(key)
        assert await page.evaluate("[...document.querySelectorAll('#map .c')].indexOf(document.activeElement)") == 6
        assert await page.locator("#map .c[tabindex='0']").count() == 1
        await expect(page.locator("#tip")).to_contain_text("gpu-000: GPU 6")
        await page.get_by_role("link", name="Temperature").click()
        assert "by=heat" in page.url
        await expect(page.locator("#map .c").first).to_have_attribute("aria-label", re.compile("°C"))
        await page.keyboard.press("Tab")
        fleet.forget_node("gpu-005")
        await expect(page.locator("#map .node")).to_have_count(5)


async def test_a_node_is_drained_after_a_question_and_uncordoned(database_url):
    async with looking(database_url) as (served, page, url):
        await page.goto(f"{url}/console/fleet/nodes/gpu-001")
        fleet = served.scheduler.fleet
        page.once("dialog", lambda dialog: dialog.dismiss())
        await page.get_by_role("button", name="Drain gpu-001").click()
        assert fleet.nodes["gpu-001"].state is SchedulingState.ACTIVE
        page.once("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name="Drain gpu-001").click()
        await expect(page.get_by_role("status").first).to_contain_text("gpu-001 drains")
        assert fleet.nodes["gpu-001"].state is SchedulingState.DRAINING
        await page.get_by_role("button", name="Uncordon gpu-001").click()
        await expect(page.get_by_role("status").first).to_contain_text("back in service")


async def test_a_strategy_is_tuned_its_effect_seen_and_reverted(database_url):
    async with looking(database_url) as (served, page, url):
        await page.goto(f"{url}/console/strategies")
        await page.get_by_role("row", name="adaptive").get_by_role("link", name="adaptive").first.click()
        await page.get_by_label("window_ms").fill("120")
        await page.get_by_role("button", name="Save").click()
        await expect(page.get_by_role("status").first).to_contain_text("Saved as revision 2")
        effect = page.locator("article.effect").first
        await expect(effect).to_contain_text("Tuned: window_ms")
        await expect(effect.get_by_role("row", name="Before")).to_contain_text("250")
        page.once("dialog", lambda dialog: dialog.accept())
        await effect.get_by_role("button", name="Revert").click()
        await expect(page.get_by_role("status").first).to_contain_text("Revision 1 is back")
        assert dict(served.scheduler.registry.installed["adaptive"].config.parameters) == {}


async def test_a_quota_is_raised(database_url):
    async with looking(database_url) as (served, page, url):
        await page.goto(f"{url}/console/tenants")
        await page.get_by_role("link", name="default").first.click()
        await page.get_by_label("Requests a minute").fill("600")
        await page.get_by_role("button", name="Save").click()
        await expect(page.get_by_role("status").first).to_contain_text("hold from the next request on")
        assert served.scheduler.desired.tenants["default"].quotas.requests_per_minute == 600
        await page.get_by_role("link", name="Audit").click()
        await expect(page.get_by_role("row", name="UpdateTenant")).to_be_visible()


async def test_a_decision_is_opened_from_the_traffic(database_url):
    async with looking(database_url) as (_, page, url):
        await page.goto(f"{url}/console/traffic")
        await page.get_by_role("link", name="req-7", exact=True).click()
        await expect(page.get_by_role("row", name="chosen")).to_contain_text("10.0.0.0:8000@0")
        await expect(page.get_by_role("row", name="kv room")).to_be_visible()


async def test_the_theme_is_kept(database_url):
    async with looking(database_url) as (_, page, url):
        await page.goto(f"{url}/console/fleet")
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.get_by_role("button", name="Switch between light and dark").click()
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark != light
        await page.reload()
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


async def test_a_lost_connection_is_said_and_comes_back(database_url):
    async with looking(database_url, expected=("ERR_FAILED",)) as (_, page, url):
        await page.route("**/console/live", lambda route: route.abort())
        await page.goto(f"{url}/console/fleet")
        await expect(page.locator("#connection")).to_be_visible()
        await page.unroute("**/console/live")
        await expect(page.locator("#connection")).to_be_hidden(timeout=20_000)


async def test_a_thousand_devices_stay_readable(database_url, capsys):
    """First paint and a scroll through it are printed; nothing is asserted of time."""
    async with looking(database_url, nodes=125) as (served, page, url):
        await page.goto(f"{url}/console/fleet")  # templates and styles are loaded once
        await page.reload()
        paint = await eventually(lambda: first_paint(page))
        assert await page.locator("#map .c").count() == 1001
        assert await page.locator("tbody tr").count() == 50
        await eventually(lambda: len(served.console.live) == 1)
        started = time.process_time()
        readings = served.console.live.readings
        await eventually(lambda: served.console.live.readings >= readings + 3, timeout_s=30)
        busy = time.process_time() - started
        with capsys.disabled():
            print(f"\n1,001 devices: first paint after {paint:.0f} ms; three ticks took {busy * 1e3:.0f} ms of CPU")


PICTURES = (
    ("console-fleet", "fleet", "light", 1280),
    ("console-fleet-dark", "fleet", "dark", 1280),
    ("console-fleet-390", "fleet", "light", 390),
    ("console-traffic", "traffic", "light", 1280),
    ("console-decision", "traffic/req-3", "light", 1280),
    ("console-strategy", "strategies/adaptive", "light", 1280),
)


async def test_pictures(database_url, tmp_path):
    folder = Path(os.environ.get("HEADWAY_PICTURES", tmp_path))
    async with looking(database_url, nodes=40) as (served, page, url):
        fleet = served.scheduler.fleet
        fleet.apply_device_event(fleet.nodes["gpu-010"], DeviceEvent("GPU-10-4", DeviceEventKind.LOST))
        for number in range(12):
            for each, node in enumerate(fleet.nodes.values()):
                sample(fleet, node, each, served.scheduler.clock(), sequence=number + 2)
            await served.console.history.sample()
        for name, path, scheme, width in PICTURES:
            await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            await page.set_viewport_size({"width": width, "height": 900})
            await page.goto(f"{url}/console/{path}")
            await page.screenshot(path=folder / f"{name}.png")
            assert (folder / f"{name}.png").stat().st_size > 10_000
