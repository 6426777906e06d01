"""What an operator changes in the console reaches the store, the audit trail, and the next request."""

import re

from fakes.console import operated, words_of
from headway.admin.v1 import admin_pb2 as pb
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.tokens import token_sha256
from headway_scheduler.store.base import Write


async def test_a_node_is_drained_and_comes_back(database_url):
    async with operated(database_url) as (served, browser):
        await served.agent("gpu-1")
        await browser.get("/console/fleet/nodes/gpu-1")
        form = {"name": "nodes/gpu-1", "back": "/console/fleet/nodes/gpu-1"}
        answer = await browser.post("/console/fleet/state", state="draining", **form)
        assert (answer.status, answer.url.path) == (200, "/console/fleet/nodes/gpu-1")
        assert "gpu-1 drains." in answer.page
        assert served.scheduler.fleet.nodes["gpu-1"].state is SchedulingState.DRAINING
        assert "gpu-1 drains." not in (await browser.get("/console/fleet/nodes/gpu-1")).page, "said once"
        answer = await browser.post("/console/fleet/state", state="active", **form)
        assert served.scheduler.fleet.nodes["gpu-1"].state is SchedulingState.ACTIVE


async def test_a_disruption_budget_is_asked_about(database_url):
    async with operated(database_url) as (served, browser):
        await served.agent("gpu-1")
        model = pb.Model(name="models/m", disruption_budget=pb.DisruptionBudget(min_available=2))
        await served.admin.UpdateModel(
            pb.UpdateModelRequest(model=model, update_mask={"paths": ["disruption_budget"]}, allow_missing=True)
        )
        await browser.get("/console/fleet/endpoints/10.0.0.1:8000@0")
        answer = await browser.post("/console/fleet/state", name="endpoints/10.0.0.1:8000@0", state="draining")
        assert answer.status == 409
        assert "Too few would be left" in answer.page
        assert served.scheduler.desired.endpoint_states == {}
        form = {"name": "endpoints/10.0.0.1:8000@0", "state": "draining", "force": "true"}
        assert (await browser.post("/console/fleet/state", **form)).status == 200
        assert served.scheduler.desired.endpoint_states == {"10.0.0.1:8000@0": SchedulingState.DRAINING}


async def test_a_strategy_is_tuned_and_reverted(database_url):
    async with operated(database_url) as (served, browser):
        page = (await browser.get("/console/strategies/adaptive")).page
        etag = re.search(r'name="etag" value="([^"]+)"', page)[1]
        form = {"etag": etag, "p.window_ms": "120", "p.externality": "0.2", "fallback_algorithm": "random"}
        answer = await browser.post("/console/strategies/adaptive/tune", **form)
        assert "Saved as revision 2" in answer.page
        config = served.scheduler.registry.installed["adaptive"].config
        assert dict(config.parameters) == {"window_ms": 120.0, "externality": 0.2}
        assert config.fallback_algorithm == "random"
        assert "Tuned: externality, window_ms" in answer.page
        stale = await browser.post("/console/strategies/adaptive/tune", **form)
        assert stale.status == 409
        assert "Load the page again" in stale.page
        answer = await browser.post("/console/strategies/adaptive/roll-back", revision="1")
        assert "Revision 1 is back, as revision 3." in answer.page
        assert dict(served.scheduler.registry.installed["adaptive"].config.parameters) == {}


async def test_what_a_strategy_does_not_take_is_told(database_url):
    async with operated(database_url) as (_, browser):
        await browser.get("/console/strategies/adaptive")
        for value in ("-5", "much", "nan"):
            answer = await browser.post("/console/strategies/adaptive/tune", **{"p.window_ms": value})
            assert answer.status == 400, value
            assert "window_ms" in answer.page
        assert (await browser.post("/console/strategies/adaptive/roll-back", revision="99")).status == 404
        assert (await browser.post("/console/strategies/adaptive/roll-back", revision="x")).status == 400


async def test_a_strategy_is_switched_and_the_next_request_knows(database_url):
    async with operated(database_url) as (served, browser):
        await served.agent("gpu-1")
        await served.bind("adaptive")
        await browser.get("/console/strategies")
        await browser.post("/console/strategies/adaptive/switch", enabled="false")
        answer = await served.route()
        assert answer.decision.fell_back_from == "strategies/adaptive"
        await browser.post("/console/strategies/adaptive/switch", enabled="true")
        answer = await served.route()
        assert answer.decision.strategy == "strategies/adaptive"


async def test_a_shadow_is_bound_watched_and_removed(database_url):
    async with operated(database_url) as (served, browser):
        await served.agent("gpu-1")
        await browser.get("/console/strategies")
        await served.bind("round_robin")
        form = {"id": "try-it", "strategy": "adaptive", "model": "", "shadow": "true"}
        answer = await browser.post("/console/strategies/bind", **form)
        assert "adaptive watches in shadow" in answer.page
        for _ in range(2):
            await served.finish(await served.route(text="the same words again and again " * 200))
        words = words_of((await browser.get("/console/strategies/adaptive")).page)
        assert "As shadow 2 agreed in 50" in words
        assert "instead of" in words
        assert "Shadows beside what was done" in (await browser.get("/console/strategies")).page
        answer = await browser.post("/console/strategies/unbind", id="try-it")
        assert "try-it is removed" in answer.page
        assert [each.id for each in served.scheduler.desired.strategy_bindings] == ["default"]


async def test_quotas_are_raised_and_hold(database_url):
    async with operated(database_url) as (served, browser):
        await browser.get("/console/tenants/default")
        limits = {"requests_per_minute": "60", "tokens_per_minute": "100000", "max_inflight": ""}
        answer = await browser.post("/console/tenants/default/quotas", weight="2", **limits)
        assert "hold from the next request on" in answer.page
        tenant = served.scheduler.desired.tenants["default"]
        assert (tenant.quotas.requests_per_minute, tenant.quotas.tokens_per_minute, tenant.weight) == (60, 100_000, 2.0)
        for wrong in ({"requests_per_minute": "-1"}, {"tokens_per_minute": "lots"}, {"weight": "heavy"}):
            answer = await browser.post("/console/tenants/default/quotas", **({"weight": "2"} | limits | wrong))
            assert answer.status == 400, wrong
        assert served.scheduler.desired.tenants["default"] == tenant


async def test_who_did_what_is_in_the_audit_trail(database_url):
    async with operated(database_url) as (_, browser):
        await browser.get("/console/tenants/default")
        await browser.post("/console/tenants/default/quotas", weight="3")
        words = words_of((await browser.get("/console/audit")).page)
        assert "local UpdateTenant tenants/default" in words
        assert "weight 1.0 → 3.0" in words or "weight 1 → 3" in words


async def test_a_token_made_by_the_admin_service_signs_in_until_it_is_revoked(database_url):
    async with operated(database_url, require_credentials=True) as (served, browser):
        answer = await browser.get("/console/fleet")
        assert answer.url.path == "/console/sign-in"
        token = "hw_made-for-this-test-only"
        boss = Credential("boss", Role.ADMIN, token_sha256(token))
        await served.store.create(boss, Write("test", "Bootstrap"))
        await served.scheduler.refresh()
        assert (await browser.sign_in(token)).url.path == "/console/fleet"
        metadata = (("authorization", f"Bearer {token}"),)
        await served.admin.RevokeCredential(pb.RevokeCredentialRequest(name="credentials/boss"), metadata=metadata)
        assert (await browser.get("/console/fleet")).url.path == "/console/sign-in"
