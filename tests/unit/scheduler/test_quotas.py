"""Quotas of a tenant, and of a tenant for one model: what is taken is settled or in flight, and nothing leaks."""

from dataclasses import replace

import pytest
from fakes.faults import breaking
from fakes.rig import MODEL, Rig, desired_state, engine_sample, spec
from headway_scheduler.admission.holds import Waiter
from headway_scheduler.admission.quotas import QuotaBook
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, Model, Quotas, Tenant
from headway_scheduler.domain.report import Finished, Outcome, Usage
from headway_scheduler.errors import HeadwayError, TenantInflight, TenantRequests, TenantTokens
from headway_scheduler.fleet.values import Owner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

MODELS = (MODEL, "n")
PLENTY = 10.0**9


def rig_of(quotas=None, strategy="gpu_aware", **model_quotas):
    tenant = Tenant("a", quotas=quotas or Quotas(), model_quotas=model_quotas)
    models = {name: Model(name) for name in MODELS}
    rig = Rig(desired_state(strategy, tenants=[tenant], bindings=[Binding("a", "all")], models=models))
    rig.connect("n", *(spec(number, models=MODELS) for number in (1, 2)))
    return rig


def in_line(rig):
    """Everything breaks from when there is more in the line than now."""
    before, longer = len(rig.dispatcher.holds), []

    def when(_):
        if len(rig.dispatcher.holds) > before:
            longer.append(True)
        return bool(longer)

    return breaking(when)


class TestByModel:
    def test_requests_of_one_model_leave_the_other_alone(self):
        rig = rig_of(m=Quotas(requests_per_minute=2))
        for _ in range(2):
            rig.route(tenant="a")
        with pytest.raises(TenantRequests) as refused:
            rig.route(tenant="a")
        assert (refused.value.facts, refused.value.retry_after_s) == ({"tenant": "a", "model": MODEL}, 30.0)
        rig.route(tenant="a", model="n")

    def test_tokens_of_one_model(self):
        rig = rig_of(m=Quotas(tokens_per_minute=1000))
        decision = rig.route(tenant="a", prompt_tokens=700, max_tokens=300)
        with pytest.raises(TenantTokens):
            rig.route(tenant="a", max_tokens=1)
        rig.route(tenant="a", model="n", prompt_tokens=5000)
        rig.finish(decision, usage=Usage(700, 0))
        rig.route(tenant="a", prompt_tokens=200, max_tokens=10)

    def test_in_flight_of_one_model(self):
        rig = rig_of(m=Quotas(max_inflight=1))
        decision = rig.route(tenant="a")
        with pytest.raises(TenantInflight):
            rig.route(tenant="a")
        rig.route(tenant="a", model="n")
        rig.finish(decision)
        rig.route(tenant="a")

    def test_the_tenants_own_hold_as_well(self):
        rig = rig_of(Quotas(requests_per_minute=3), m=Quotas(requests_per_minute=2))
        rig.route(tenant="a")
        rig.route(tenant="a", model="n")
        rig.route(tenant="a", model="n")
        with pytest.raises(TenantRequests) as refused:
            rig.route(tenant="a")
        assert refused.value.facts["tenant"] == "a"
        assert "model" not in refused.value.facts

    def test_what_one_refuses_is_taken_from_neither(self):
        rig = rig_of(Quotas(requests_per_minute=2), m=Quotas(max_inflight=1))
        rig.route(tenant="a")
        for _ in range(5):
            with pytest.raises(TenantInflight):
                rig.route(tenant="a")
        rig.route(tenant="a", model="n")

    def test_a_limit_that_comes_later_counts_what_is_in_flight(self):
        rig = rig_of()
        rig.route(tenant="a")
        tenant = Tenant("a", model_quotas={MODEL: Quotas(max_inflight=1)})
        rig.desire(tenants={**rig.store.desired.tenants, "a": tenant})
        with pytest.raises(TenantInflight):
            rig.route(tenant="a")

    def test_an_alias_names_the_model_as_well_and_all_limits_of_its_names_hold(self):
        rig = rig_of(
            m=Quotas(requests_per_minute=9, max_inflight=2),
            small=Quotas(requests_per_minute=3, tokens_per_minute=10**6),
        )
        rig.route(tenant="a", model="n")
        rig.route(tenant="a")
        assert rig.dispatcher.quotas.standing("a", rig.clock.now) is None, "not of the tenant in all"
        rig.desire(models={"n": Model("n"), MODEL: Model(MODEL, aliases=("small",))})
        rig.route(tenant="a")
        with pytest.raises(TenantInflight):
            rig.route(tenant="a")
        held = rig.scheduler.intake.desired.tenants["a"].model_quotas
        assert held == {MODEL: Quotas(3, 10**6, 2)}
        rig.desire(models={MODEL: Model(MODEL), "n": Model("n", aliases=("small",))})
        for _ in range(3):
            rig.route(tenant="a", model="n")
        with pytest.raises(TenantRequests):
            rig.route(tenant="a", model="n")

    def test_they_go_over_to_another_scheduler(self):
        tenant = Tenant("a", model_quotas={"x/y.z": Quotas(requests_per_minute=1)})
        before, after = QuotaBook(), QuotaBook()
        before.admit(tenant, "x/y.z", 1.0, 5.0)
        between = QuotaBook()
        between.restore(before.dump(5.0, 100.0), 0.0, 100.0)
        after.restore(between.dump(20.0, 120.0), 0.0, 120.0)  # which it was given, and nobody used
        with pytest.raises(TenantRequests) as refused:
            after.admit(tenant, "x/y.z", 1.0, 0.0)
        assert refused.value.retry_after_s == pytest.approx(40.0)


class TestEnds:
    def level(self, rig):
        return rig.dispatcher.quotas._accounts["a", ""].tokens.level

    def rig(self):
        rig = rig_of(Quotas(tokens_per_minute=1_000_000))
        decision = rig.route(tenant="a", prompt_tokens=900, max_tokens=100)
        assert self.level(rig) == 999_000
        return rig, decision

    def test_what_an_endpoint_failed_is_given_back(self):
        rig, decision = self.rig()
        rig.finish(decision, Outcome.SERVER_ERROR, Usage(900, 50))
        assert self.level(rig) == 1_000_000

    def test_what_was_given_up_costs_what_it_used(self):
        rig, decision = self.rig()
        rig.finish(decision, Outcome.CANCELLED, Usage(900, 50))
        assert self.level(rig) == 1_000_000 - 950

    def test_what_lost_its_endpoint_is_given_back(self):
        rig, _ = self.rig()
        for number in (1, 2):
            rig.fleet.remove_endpoint(spec(number).id)
        assert self.level(rig) == 1_000_000

    def test_what_nobody_reports_costs_its_estimate(self):
        rig, _ = self.rig()
        rig.pass_time(7 * 3600, step=600)
        assert not rig.ledger.reservations
        assert rig.dispatcher.quotas.inflight("a") == 0
        assert self.level(rig) == 999_000  # nothing was asked meanwhile, so nothing was filled up

    def test_one_that_fails_as_it_joins_the_line_is_given_back_once(self):
        rig = rig_of(Quotas(max_inflight=9, requests_per_minute=100))
        rig.full(1, 2)
        rig.hold(tenant="a", model="n")

        with in_line(rig), pytest.raises(HeadwayError):
            rig.route(tenant="a")
        assert (rig.dispatcher.quotas.inflight("a"), rig.dispatcher.quotas.inflight("a", MODEL)) == (0, 0)


class TestResume:
    def resumed(self, rig, fail_open):
        tenant = rig.scheduler.desired.tenants["a"]
        endpoint = rig.fleet.endpoints[spec(1).id]
        request = rig.request(tenant="a", prompt_tokens=900, max_tokens=100)
        return rig.dispatcher.restore(request, tenant, rig.owner, endpoint, 0, rig.clock.now, fail_open=fail_open)

    def test_what_a_scheduler_had_admitted_is_no_second_request(self):
        rig = rig_of(Quotas(requests_per_minute=2, tokens_per_minute=5000))
        for _ in range(2):
            self.resumed(rig, fail_open=False)
        assert rig.dispatcher.quotas.inflight("a") == 2
        rig.route(tenant="a", prompt_tokens=2900, max_tokens=100)
        with pytest.raises(TenantTokens):
            rig.route(tenant="a", prompt_tokens=10, max_tokens=1)

    def test_what_none_had_is_charged_and_owes_a_minute_at_most(self):
        rig = rig_of(Quotas(requests_per_minute=2))
        for _ in range(50):
            self.resumed(rig, fail_open=True)
        with pytest.raises(TenantRequests) as refused:
            rig.route(tenant="a")
        assert refused.value.retry_after_s == pytest.approx(90.0)  # from -2 to 1, at 2 a minute

    def test_a_restart_charges_what_is_in_flight_once(self):
        before = rig_of(Quotas(tokens_per_minute=5000))
        before.route(tenant="a", prompt_tokens=900, max_tokens=100)
        after = rig_of(Quotas(tokens_per_minute=5000))
        saved = before.dispatcher.quotas.dump(before.clock.now, 0.0)
        after.dispatcher.quotas.restore(saved, after.clock.now, 0.0)
        self.resumed(after, fail_open=False)
        after.route(tenant="a", prompt_tokens=3900, max_tokens=100)
        with pytest.raises(TenantTokens):
            after.route(tenant="a", prompt_tokens=10, max_tokens=1)


class Conservation(RuleBasedStateMachine):
    """Requests of two models that are routed, held, retried, given up, moved, failed, reported, lost and resumed."""

    @initialize(strategy=st.sampled_from(["gpu_aware", "gpu_aware", "adaptive"]))
    def start(self, strategy):
        whole = Quotas(int(PLENTY), int(PLENTY), 40)
        self.rig = rig_of(whole, strategy, m=Quotas(int(PLENTY), int(PLENTY), 20))
        self.streams = [Owner("p", stream=True), Owner("p", stream=True)]
        self.decisions, self.waiters, self.count = [], [], 0
        self.book = self.rig.dispatcher.quotas

    @rule(
        model=st.sampled_from(MODELS),
        again=st.booleans(),
        tokens=st.integers(1, 5000),
        stream=st.integers(0, 1),
        max_wait=st.sampled_from([0.0, 2.0, 30.0]),
    )
    def route(self, model, again, tokens, stream, max_wait):
        self.count += not again
        owner = self.streams[stream]
        parts = {"model": model, "prompt_tokens": tokens, "max_wait_s": max_wait}
        request = self.rig.request(f"r{self.count}", tenant="a", **parts)
        try:
            outcome = self.rig.submit(request, owner)
        except HeadwayError:
            return
        if isinstance(outcome, Waiter):
            outcome.answer = lambda answer: self.answered(outcome, answer)
            self.waiters.append(outcome)
        else:
            self.decisions.append((outcome, owner))

    def answered(self, waiter, answer):
        self.waiters.remove(waiter)
        if isinstance(answer, Decision):
            self.decisions.append((answer, waiter.owner))

    @precondition(lambda self: self.decisions)
    @rule(n=st.integers(0, 999), outcome=st.sampled_from(Outcome), used=st.integers(0, 5000), times=st.integers(1, 2))
    def report(self, n, outcome, used, times):
        decision, owner = self.decisions[n % len(self.decisions)]
        for _ in range(times):
            self.rig.report(decision, Finished(outcome, Usage(used, used)), owner)

    @precondition(lambda self: self.decisions)
    @rule(n=st.integers(0, 999))
    def cancel(self, n):
        decision, owner = self.decisions[n % len(self.decisions)]
        self.rig.dispatcher.give_back(decision.reservation_id, owner, self.rig.clock.now)

    @precondition(lambda self: self.waiters)
    @rule(n=st.integers(0, 999))
    def give_up(self, n):
        self.rig.dispatcher.give_up(self.waiters.pop(n % len(self.waiters)))

    @rule(which=st.integers(0, 1))
    def lose_stream(self, which):
        owner, self.streams[which] = self.streams[which], Owner("p", stream=True)
        for waiter in [w for w in self.waiters if w.owner is owner]:
            self.waiters.remove(waiter)
            self.rig.dispatcher.give_up(waiter)
        self.rig.ledger.lose_owner(owner, self.rig.clock.now)

    @rule(model=st.sampled_from(MODELS), fail_open=st.booleans())
    def resume(self, model, fail_open):
        if not self.rig.fleet.endpoints:
            return
        self.count += 1
        tenant, owner = self.rig.scheduler.desired.tenants["a"], self.streams[0]
        request = self.rig.request(f"resumed-{self.count}", tenant="a", model=model)
        endpoint = next(iter(self.rig.fleet.endpoints.values()))
        self.rig.dispatcher.restore(request, tenant, owner, endpoint, 0, self.rig.clock.now, fail_open=fail_open)

    @rule(number=st.integers(1, 2))
    def endpoint_goes_and_comes(self, number):
        self.rig.fleet.remove_endpoint(spec(number).id)
        self.rig.fleet.put_endpoint(self.rig.fleet.nodes["n"], spec(number, models=MODELS))

    @rule(use=st.sampled_from([0.1, 0.95, 0.95]))
    def sample(self, use):
        node = self.rig.fleet.nodes["n"]
        for endpoint in node.endpoints.values():
            self.rig.sample(node, engine_sample(endpoint.spec, kv_use=use))
        self.rig.dispatcher.run_pass(self.rig.clock.now)

    @rule(seconds=st.sampled_from([0.2, 3.0, 12.0, 400.0]))
    def time_passes(self, seconds):
        self.rig.pass_time(seconds, step=max(0.25, seconds / 4))

    @precondition(lambda self: self.waiters)
    @rule()
    def a_strategy_breaks_a_pass(self):
        """A fault in the middle of a pass lets one go, and what it had taken goes once."""
        # It joins the line, and the pass that this makes fails it.
        with in_line(self.rig):
            self.route(MODEL, False, 100, 0, 30.0)
            self.rig.dispatcher.run_pass(self.rig.clock.now)

    @invariant()
    def what_is_taken_is_in_flight_or_settled(self):
        if not hasattr(self, "rig"):
            return
        works = [hold.work for hold in self.rig.dispatcher.holds]
        works += [reservation.attachment for reservation in self.rig.ledger.reservations.values()]
        for key in ("", *MODELS):
            mine = [work for work in works if key in ("", work.request.model)]
            assert self.book.inflight("a", key) == len(mine)
            assert self.book.reserved("a", key) == pytest.approx(sum(work.estimated_tokens for work in mine), abs=1e-3)

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        for waiter in self.waiters:
            self.rig.dispatcher.give_up(waiter)
        for owner in self.streams:
            self.rig.ledger.lose_owner(owner, self.rig.clock.now)
        self.rig.pass_time(11, step=1)
        assert self.book.inflight("a") == self.book.reserved("a") == 0
        assert self.rig.is_empty()


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


class TestLevels:
    """Over a minute that is longer than the test, the level is what was given less what was settled."""

    @pytest.mark.parametrize("outcome", list(Outcome))
    @pytest.mark.parametrize("used", [0, 400, 4000])
    def test_in_the_end_only_what_was_used_is_gone(self, outcome, used):
        rig = rig_of(Quotas(tokens_per_minute=10_000_000), m=Quotas(tokens_per_minute=10_000_000))
        for _ in range(3):
            rig.finish(rig.route(tenant="a", prompt_tokens=1000), outcome, Usage(used, used))
        accounts = rig.dispatcher.quotas._accounts
        wanted = 0 if outcome.is_endpoints_fault else 3 * ((used or 1000) + used)
        for model in ("", MODEL):
            assert 10_000_000 - accounts["a", model].tokens.level == pytest.approx(wanted)


def test_replacing_a_tenants_limits_keeps_what_was_used():
    book, tenant = QuotaBook(), Tenant("a", quotas=Quotas(requests_per_minute=10))
    for _ in range(10):
        book.admit(tenant, MODEL, 1.0, 0.0)
    with pytest.raises(TenantRequests):
        book.admit(replace(tenant, quotas=Quotas(requests_per_minute=20)), MODEL, 1.0, 0.0)
