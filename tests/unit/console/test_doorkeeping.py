"""Who comes in, and what a page of another site cannot do."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from fakes.console import TOKENS, change, console_of, credentials, required, rigged
from fakes.rig import desired_state
from headway_console.pages import PREFIX
from headway_scheduler.domain.desired import Role


async def test_without_a_session_every_page_leads_to_signing_in():
    async with console_of(await required()) as (_, browser):
        for path in ("/", "/console", "/console/fleet", "/console/traffic/x", "/console/live", "/console/nothing"):
            answer = await browser.get(path)
            assert answer.url.path == f"{PREFIX}/sign-in", path
            assert "Paste the token" in answer.page


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
async def test_viewers_and_admins_sign_in_and_their_token_is_nowhere(role):
    async with console_of(await required()) as (_, browser):
        answer = await browser.sign_in(TOKENS[role])
        assert (answer.status, answer.url.path) == (200, "/console/fleet")
        seen = [answer] + [await browser.get(f"/console/{name}") for name in ("traffic", "strategies", "tenants")]
        for each in seen:
            assert TOKENS[role] not in each.page
            assert TOKENS[role] not in str(each.url)
            assert TOKENS[role] not in str(each.headers)
        assert role.value in answer.page


async def test_the_cookie_is_out_of_scripts_and_other_sites_reach():
    async with console_of(await required()) as (_, browser):
        answer = await browser.sign_in(TOKENS[Role.ADMIN])
        (said,) = answer.history[0].headers.getall("Set-Cookie")
        assert {"HttpOnly", "SameSite=Strict", "Path=/console"} <= {part.strip() for part in said.split(";")}
        assert TOKENS[Role.ADMIN] not in said


@pytest.mark.parametrize("role", [role for role in Role if role not in (Role.VIEWER, Role.ADMIN)])
async def test_other_roles_do_not(role):
    async with console_of(await required()) as (_, browser):
        answer = await browser.sign_in(TOKENS[role])
        assert answer.status == 403
        assert "for viewers and admins" in answer.page
        assert (await browser.get("/console/fleet")).url.path == "/console/sign-in"


@pytest.mark.parametrize("token", ["", "hw_wrong", "hw_\u00e4", "x" * 5000])
async def test_a_wrong_token_does_not_either(token):
    async with console_of(await required()) as (console, browser):
        answer = await browser.sign_in(token)
        assert answer.status == 401
        assert "not known" in answer.page
        assert len(console.doorkeeper.sessions) == 0


@pytest.mark.parametrize(
    "ended", [{"revoked": True}, {"expire_time": datetime.now(UTC) - timedelta(seconds=1)}, {"role": Role.ROUTER}]
)
async def test_a_session_ends_with_its_credential(ended):
    scheduler = await required()
    async with console_of(scheduler) as (console, browser):
        await browser.sign_in(TOKENS[Role.ADMIN])
        await change(scheduler, replace(credentials()["admin"], **ended))
        assert (await browser.get("/console/fleet")).url.path == "/console/sign-in"
        assert len(console.doorkeeper.sessions) == 0


async def test_signing_out_ends_it():
    async with console_of(await required()) as (console, browser):
        await browser.sign_in(TOKENS[Role.VIEWER])
        await browser.get("/console/fleet")
        assert (await browser.post("/console/sign-out")).url.path == "/console/sign-in"
        assert len(console.doorkeeper.sessions) == 0


async def test_tokens_do_not_travel_unprotected():
    async with console_of(await required()) as (console, browser):
        console.doorkeeper.private = False  # as beyond loopback, without TLS
        assert "ssh -L" in (await browser.get("/console/sign-in")).page
        assert (await browser.sign_in(TOKENS[Role.ADMIN])).status == 403
        assert len(console.doorkeeper.sessions) == 0


async def test_where_nobody_signs_in_the_port_must_be_private_too():
    async with console_of(await rigged(desired_state())) as (console, browser):
        console.doorkeeper.private = False
        answer = await browser.get("/console/fleet")
        assert answer.status == 403
        assert "http_tls" in answer.page
        assert len(console.doorkeeper.sessions) == 0


async def test_of_a_browser_without_the_certificate_nothing_is_heard():
    async with console_of(await required()) as (console, browser):
        console.doorkeeper._certificate_required = True
        assert (await browser.get("/console/fleet")).status == 401
        assert (await browser.sign_in(TOKENS[Role.ADMIN])).status == 401
        assert len(console.doorkeeper.sessions) == 0


async def test_guesses_are_slowed_down():
    async with console_of(await required(authentication_failures_per_minute=3)) as (_, browser):
        statuses = [(await browser.sign_in(f"hw_guess-{number}")).status for number in range(5)]
        assert statuses == [401, 401, 401, 429, 429]
        assert (await browser.sign_in(TOKENS[Role.ADMIN])).status == 200, "a right token is always heard"


async def test_on_loopback_without_required_credentials_nobody_signs_in():
    async with console_of(await rigged(desired_state())) as (_, browser):
        answer = await browser.get("/console/fleet")
        assert (answer.status, answer.url.path) == (200, "/console/fleet")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1:7071"])
async def test_a_foreign_name_for_this_host_is_not_answered(host):
    async with console_of(await rigged(desired_state())) as (_, browser):
        browser.headers = {"Host": host}
        answer = await browser.get("/console/fleet")
        assert answer.status == 403
        assert "localhost" in answer.page


WRITES = (
    "/console/fleet/state",
    "/console/strategies/bind",
    "/console/strategies/unbind",
    "/console/strategies/adaptive/switch",
    "/console/strategies/adaptive/tune",
    "/console/strategies/adaptive/roll-back",
    "/console/tenants/default/quotas",
    "/console/sign-out",
)


@pytest.mark.parametrize("path", WRITES)
async def test_no_write_without_the_sessions_own_token(path):
    async with console_of(await required()) as (_, browser):
        await browser.sign_in(TOKENS[Role.ADMIN])
        await browser.get("/console/fleet")
        for csrf in ("", "wrong", "\u00e4"):
            answer = await browser.post(path, csrf=csrf)
            assert answer.status == 403, csrf
            assert "FOREIGN_ORIGIN" in answer.page


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
)
async def test_no_write_from_another_site_even_with_the_token(path, headers):
    async with console_of(await required()) as (_, browser):
        await browser.sign_in(TOKENS[Role.ADMIN])
        await browser.get("/console/fleet")
        answer = await browser.post(path, headers=headers)
        assert answer.status == 403
        assert "FOREIGN_ORIGIN" in answer.page


async def test_no_form_but_a_forms_own_type_and_size():
    async with console_of(await rigged(desired_state())) as (_, browser):
        await browser.get("/console/fleet")
        path = browser.url + "/console/fleet/state"
        async with browser.session.post(path, json={"csrf": browser.csrf}) as answer:
            assert answer.status == 403
        assert (await browser.post("/console/fleet/state", name="n" * 100_000)).status == 403


async def test_a_viewer_sees_and_does_not_change():
    async with console_of(await required()) as (_, browser):
        await browser.sign_in(TOKENS[Role.VIEWER])
        for name in ("strategies", "strategies/adaptive", "tenants/default"):
            page = (await browser.get(f"/console/{name}")).page
            assert ">Save<" not in page
        for path, form in (
            ("/console/strategies/adaptive/switch", {"enabled": "false"}),
            ("/console/strategies/adaptive/tune", {}),
            ("/console/strategies/adaptive/roll-back", {"revision": "1"}),
            ("/console/strategies/bind", {"id": "x", "strategy": "adaptive"}),
            ("/console/strategies/unbind", {"id": "default"}),
            ("/console/tenants/default/quotas", {}),
            ("/console/fleet/state", {"name": "nodes/n", "state": "cordoned"}),
        ):
            answer = await browser.post(path, **form)
            assert (answer.status, "NOT_PERMITTED" in answer.page) == (403, True), path


@pytest.mark.parametrize(
    "path",
    [
        "/console/fleet",
        "/console/sign-in",
        "/console/nothing",
        "/console/fleet/nodes/none",
        "/console/static/console.css",
        "/console/static/console.js",
    ],
)
async def test_every_answer_forbids_what_is_not_ours(path):
    async with console_of(await rigged(desired_state())) as (_, browser):
        answer = await browser.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "same-origin"


@pytest.mark.parametrize("name", ["nothing.css", "..%2fapp.py", "%2e%2e/app.py", "base.html"])
async def test_no_file_but_our_own_is_served(name):
    async with console_of(await rigged(desired_state())) as (_, browser):
        assert (await browser.get(f"/console/static/{name}")).status == 404
