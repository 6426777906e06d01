"""One decision: candidates, idempotency, refusals, bursts, explanations."""

import pytest
from fakes.rig import Rig, desired_state, engine_sample, spec
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, BindingMode, GpuGroup, Quotas, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.report import Usage
from headway_scheduler.domain.request import Subset
from headway_scheduler.errors import (
    AllDraining,
    AllUnhealthy,
    NoEndpoints,
    RequestIdInUse,
    Saturated,
    TenantInflight,
    TenantRequests,
    TenantTokens,
)
from headway_scheduler.fleet.values import Owner
from hypothesis import given
from hypothesis import strategies as st


class TestAnswer:
    def test_what_it_holds(self):
        rig = Rig(desired_state("adaptive"))
        rig.connect("n", spec(1, device_uuids=("g",), engine="vllm"), spec(2), spec(3), spec(4), spec(5))
        decision = rig.route("r", text="hello " * 100)
        assert decision.request_id == "r"
        assert decision.reservation_id.startswith("s1.e1.")
        assert decision.endpoint.node == "n"
        assert len(decision.fallbacks) == 3
        assert decision.endpoint not in decision.fallbacks
        assert len(decision.cache_salt) == 32
        assert decision.why.candidates == 5
        assert decision.why.prompt_tokens == 150
        assert decision.why.predicted_ttft_ms > 0
        assert decision.why.held_ms == 0

    def test_salts_keep_domains_apart_and_survive(self):
        def salt(rig, **changes):
            return rig.route(**changes).cache_salt

        one, other = Rig(), Rig()
        for rig in (one, other):
            rig.connect("n", spec(1, engine="vllm"))
            rig.scheduler.salts.set_secret(b"secret")
        assert salt(one, domain="tenant/a") == salt(other, domain="tenant/a")
        assert salt(one, domain="tenant/a") != salt(one, domain="tenant/b")
        one.fleet.remove_endpoint("10.0.0.1:8000@0")
        one.connect("n", spec(2, engine="tgi"))
        assert salt(one) == "", "an engine that would not understand it gets none"

    def test_the_prompt_is_not_kept(self):
        rig = Rig()
        rig.endpoints(1)
        decision = rig.route(text="x" * 100_000)
        assert rig.ledger.find(decision.reservation_id).attachment.request.prompt is None


class TestCandidates:
    def test_excluded_and_subset(self):
        rig = Rig()
        rig.connect("n", spec(1, labels={"zone": "a"}), spec(2, labels={"zone": "b"}), spec(3, labels={"zone": "a"}))
        names = ["10.0.0.1:8000@0", "10.0.0.2:8000", "10.0.0.3"]
        assert {rig.where(rig.route(excluded=frozenset(names[:2]))) for _ in range(3)} == {"3"}
        assert {rig.where(rig.route(subset=Subset(frozenset([name])))) for name in names} == {"1", "2", "3"}
        zone = Subset(labels={"zone": "a"})
        assert {rig.where(rig.route(subset=zone)) for _ in range(9)} == {"1", "3"}
        both = Subset(frozenset(names[1:]), {"zone": "a"})
        assert {rig.where(rig.route(subset=both)) for _ in range(3)} == {"3"}

    def test_never_outside_the_tenants_groups(self):
        group = GpuGroup("g", endpoints=("10.0.0.2:8000@0",))
        rig = Rig(desired_state(tenants=[Tenant("a")], groups=[group], bindings=[Binding("a", "g")]))
        rig.endpoints(3)
        decisions = [rig.route(tenant="a") for _ in range(9)]
        assert {rig.where(d) for d in decisions} == {"2"}
        assert all(not d.fallbacks for d in decisions)
        with pytest.raises(NoEndpoints):
            rig.route(tenant="a", subset=Subset(frozenset(["10.0.0.1"])))

    def test_burst_only_when_its_own_cannot_take_it(self):
        groups = [GpuGroup("own", endpoints=("10.0.0.1:8000@0",)), GpuGroup("spare", all=True)]
        bindings = [Binding("a", "own"), Binding("a", "spare", BindingMode.BURST)]
        rig = Rig(desired_state("gpu_aware", tenants=[Tenant("a")], groups=groups, bindings=bindings))
        rig.endpoints(2)
        assert {rig.where(rig.route(tenant="a")) for _ in range(3)} == {"1"}
        rig.full(1)
        assert rig.where(rig.route(tenant="a")) == "2"
        rig.full()
        assert rig.where(rig.route(tenant="a")) == "1"
        rig.desire(endpoint_states={"10.0.0.1:8000@0": SchedulingState.CORDONED})
        assert rig.where(rig.route(tenant="a")) == "2"


class TestRefusals:
    def refusal(self, rig, **changes):
        with pytest.raises(NoEndpoints) as caught:
            rig.route(**changes)
        assert rig.is_empty()
        return type(caught.value)

    def test_no_endpoint_serves_the_model(self):
        rig = Rig()
        assert self.refusal(rig) is NoEndpoints
        rig.endpoints(2, models=("other",))
        assert self.refusal(rig) is NoEndpoints

    def test_excluded_and_outside_the_subset_are_none(self):
        rig = Rig()
        rig.endpoints(1)
        assert self.refusal(rig, excluded=frozenset(["10.0.0.1"])) is NoEndpoints
        assert self.refusal(rig, subset=Subset(labels={"a": "b"})) is NoEndpoints

    def test_all_draining(self):
        rig = Rig()
        rig.endpoints(2)
        rig.desire(
            endpoint_states={"10.0.0.1:8000@0": SchedulingState.CORDONED, "10.0.0.2:8000@0": SchedulingState.DRAINING}
        )
        assert self.refusal(rig) is AllDraining

    def test_all_unhealthy_when_some_only_are_draining(self):
        rig = Rig()
        node = rig.connect("n", spec(1), spec(2))
        rig.desire(endpoint_states={"10.0.0.1:8000@0": SchedulingState.CORDONED})
        rig.sample(node, engine_sample(spec(2), ready=False))
        assert self.refusal(rig) is AllUnhealthy
        rig.desire(endpoint_states={})
        rig.sample(node, engine_sample(spec(1), ready=False), engine_sample(spec(2), ready=False))
        assert self.refusal(rig) is AllUnhealthy

    def test_saturated_where_it_may_not_be_held(self):
        rig = Rig(desired_state("gpu_aware"))
        rig.endpoints(2)
        rig.full(1, 2)
        with pytest.raises(Saturated) as caught:
            rig.route(max_wait_s=0.0)
        assert caught.value.reason == "SATURATED"
        assert caught.value.retry_after_s >= 0.5
        with pytest.raises(Saturated):
            rig.submit(rig.request(), deadline=rig.clock.now + 0.05)
        assert rig.is_empty()


class TestIdempotency:
    def test_the_same_id_gets_the_same_answer(self):
        rig = Rig()
        rig.endpoints(3)
        first, again = rig.route("r", text="hello"), rig.route("r", text="hello")
        assert again == first
        assert len(rig.ledger.reservations) == 1

    def test_also_when_the_estimate_of_its_tokens_changed_meanwhile(self):
        rig = Rig()
        rig.endpoints(3)
        first = rig.route("r", text="hello" * 99)
        assert rig.route("r", text="hello" * 99, prompt_tokens=77) == first

    @pytest.mark.parametrize("change", [{"text": "hellp"}, {"text": "hello", "adapter": "x"}, {"prompt": None}])
    def test_another_request_under_its_id_is_refused(self, change):
        rig = Rig()
        rig.endpoints(3)
        rig.route("r", text="hello")
        with pytest.raises(RequestIdInUse):
            rig.route("r", **change)

    def test_ended_the_id_is_free(self):
        rig = Rig()
        rig.endpoints(3)
        first = rig.route("r", text="hello")
        rig.finish(first)
        assert rig.route("r", text="other").reservation_id != first.reservation_id

    def test_principals_and_tenants_are_apart(self):
        rig = Rig(desired_state(tenants=[Tenant("a")], bindings=[Binding("a", "all")]))
        rig.endpoints(3)
        ids = [rig.route("r"), rig.route("r", tenant="a"), rig.route("r", owner=Owner("q", stream=False))]
        assert len({d.reservation_id for d in ids}) == 3

    def test_excluding_its_endpoint_moves_it(self):
        rig = Rig()
        rig.endpoints(3)
        first = rig.route("r")
        moved = rig.route("r", excluded=frozenset([first.endpoint.spec.address]))
        assert moved.reservation_id == first.reservation_id
        assert moved.endpoint != first.endpoint
        assert moved.endpoint not in moved.fallbacks
        assert rig.counts(rig.slot(1))["inflight"] == 0
        assert rig.counts(rig.slot(2))["inflight"] == 1
        assert rig.route("r") == moved

    def test_that_speaks_against_the_endpoint(self):
        rig = Rig()
        rig.endpoints(3)
        only = frozenset(["10.0.0.2", "10.0.0.3"])
        for n in range(5):
            decision = rig.route(f"r{n}", excluded=only)
            rig.finish(rig.route(f"r{n}", excluded=frozenset([decision.endpoint.spec.address])))
        assert rig.fleet.hard_guards(rig.fleet.endpoints["10.0.0.1:8000@0"]) == ["ejected"]

    def test_with_nowhere_to_move_it_stays(self):
        rig = Rig()
        rig.endpoints(1)
        first = rig.route("r")
        with pytest.raises(NoEndpoints):
            rig.route("r", excluded=frozenset(["10.0.0.1"]))
        assert list(rig.ledger.reservations) == [first.reservation_id]

    def test_a_retry_through_another_stream_takes_it_over(self):
        rig = Rig()
        rig.endpoints(1)
        lost, fresh = Owner("p", stream=True), Owner("p", stream=True)
        rig.route("r", owner=lost)
        rig.ledger.lose_owner(lost, rig.clock.now)
        decision = rig.route("r", owner=fresh)
        rig.pass_time(60)
        assert rig.ledger.find(decision.reservation_id).owner is fresh


class TestGivingBack:
    def test_the_last_call_that_shares_it_ends_it(self):
        rig = Rig()
        rig.endpoints(1)
        decision = rig.route("r")
        rig.route("r")
        rig.dispatcher.give_back(decision.reservation_id, rig.owner, rig.clock.now)
        assert rig.ledger.reservations
        rig.dispatcher.give_back(decision.reservation_id, rig.owner, rig.clock.now)
        assert rig.is_empty()
        rig.dispatcher.give_back(decision.reservation_id, rig.owner, rig.clock.now)
        assert rig.is_empty()

    def test_what_a_retry_took_elsewhere_is_not_its_to_give(self):
        rig = Rig()
        rig.endpoints(1)
        decision = rig.route("r")
        stream = Owner("p", stream=True)
        rig.route("r", owner=stream)
        rig.dispatcher.give_back(decision.reservation_id, rig.owner, rig.clock.now)
        assert rig.ledger.reservations
        rig.dispatcher.give_back(decision.reservation_id, stream, rig.clock.now)
        assert rig.is_empty()


class TestQuotas:
    def rig(self, **quotas):
        tenant = Tenant("a", quotas=Quotas(**quotas))
        rig = Rig(desired_state("gpu_aware", tenants=[tenant], bindings=[Binding("a", "all")]))
        rig.endpoints(2)
        return rig

    def refused(self, rig, kind, **changes):
        with pytest.raises(kind) as caught:
            rig.route(tenant="a", **changes)
        assert caught.value.retry_after_s > 0
        assert caught.value.facts["tenant"] == "a"
        return caught.value.retry_after_s

    def test_requests_a_minute(self):
        rig = self.rig(requests_per_minute=3)
        for _ in range(3):
            rig.finish(rig.route(tenant="a"))
        wait = self.refused(rig, TenantRequests)
        rig.route()
        rig.clock.now += wait
        rig.route(tenant="a")
        self.refused(rig, TenantRequests)

    def test_tokens_are_taken_on_an_estimate_and_settled(self):
        rig = self.rig(tokens_per_minute=1000)
        decision = rig.route(tenant="a", prompt_tokens=700, max_tokens=300)
        self.refused(rig, TenantTokens, prompt_tokens=100, max_tokens=10)
        rig.finish(decision, usage=Usage(prompt_tokens=700, completion_tokens=100))
        rig.route(tenant="a", prompt_tokens=100, max_tokens=10)

    def test_a_request_larger_than_the_bucket_waits_for_a_full_one(self):
        rig = self.rig(tokens_per_minute=100)
        decision = rig.route(tenant="a", prompt_tokens=500, max_tokens=1)
        rig.finish(decision)
        wait = self.refused(rig, TenantTokens, prompt_tokens=500, max_tokens=1)
        assert 230 < wait <= 361

    def test_in_flight(self):
        rig = self.rig(max_inflight=2)
        first = rig.route(tenant="a")
        rig.route(tenant="a")
        self.refused(rig, TenantInflight)
        rig.finish(first)
        rig.route(tenant="a")

    def test_held_calls_count_as_in_flight(self):
        rig = self.rig(max_inflight=2)
        rig.full(1, 2)
        rig.hold(tenant="a")
        waiter, _ = rig.hold(tenant="a")
        self.refused(rig, TenantInflight)
        rig.dispatcher.give_up(waiter)
        rig.hold(tenant="a")

    @pytest.mark.parametrize("leave", ["give_up", "expire", "refuse"])
    def test_what_was_not_served_is_given_back(self, leave):
        rig = self.rig(requests_per_minute=1, tokens_per_minute=1000)
        rig.full(1, 2)
        waiter, answers = rig.hold(tenant="a", prompt_tokens=900, max_tokens=10)
        if leave == "give_up":
            rig.dispatcher.give_up(waiter)
        elif leave == "expire":
            rig.dispatcher.advance(rig.clock.now + 31)
            assert answers[0].reason == "HOLD_EXPIRED"
        else:
            rig.dispatcher.refuse_holds(Saturated("gone"), rig.clock.now)
            assert answers[0].message == "gone"
        rig.hold(tenant="a", prompt_tokens=900, max_tokens=10)

    def test_a_refused_one_is_given_back_too(self):
        rig = self.rig(requests_per_minute=1)
        for _ in range(3):
            with pytest.raises(NoEndpoints):
                rig.route(tenant="a", subset=Subset(frozenset(["nowhere"])))
        rig.route(tenant="a")

    def test_limits_may_change_at_any_time(self):
        rig = self.rig(requests_per_minute=1)
        rig.route(tenant="a")
        self.refused(rig, TenantRequests)
        rig.desire(tenants={**rig.store.desired.tenants, "a": Tenant("a")})
        for _ in range(5):
            rig.route(tenant="a")


class TestExplain:
    def explain(self, rig, whole=True, strategy="", **changes):
        return rig.dispatcher.explain(rig.request("explain", **changes), strategy, rig.owner, rig.clock.now, whole)

    def test_shows_all_and_reserves_nothing(self):
        group = GpuGroup("g", endpoints=("10.0.0.1:8000@0", "10.0.0.2:8000@0", "10.0.0.3:8000@0"))
        rig = Rig(desired_state("gpu_aware", tenants=[Tenant("a")], groups=[group], bindings=[Binding("a", "g")]))
        rig.endpoints(4)
        rig.full(3)
        rig.desire(endpoint_states={"10.0.0.2:8000@0": SchedulingState.CORDONED})
        explanation = self.explain(rig, tenant="a")
        rows = {int(rig.where_of(row.endpoint)): row for row in explanation.rows}
        assert {n: row.hard_guards for n, row in rows.items()} == {1: (), 2: ("cordoned",), 3: (), 4: ("not_in_group",)}
        assert {n: row.soft_guards for n, row in rows.items()} == {1: (), 2: (), 3: ("memory_pressure",), 4: ()}
        assert [n for n, row in rows.items() if row.chosen] == [1]
        assert [n for n, row in rows.items() if row.cost is not None] == [1, 3]
        assert rig.is_empty()
        assert rig.where(rig.route(tenant="a")) == "1"

    def test_others_endpoints_are_not_shown_to_everybody(self):
        group = GpuGroup("g", endpoints=("10.0.0.1:8000@0",))
        rig = Rig(desired_state(tenants=[Tenant("a")], groups=[group], bindings=[Binding("a", "g")]))
        rig.endpoints(4)
        assert len(self.explain(rig, whole=False, tenant="a").rows) == 1

    def test_the_refusal_that_route_would_answer(self):
        rig = Rig(desired_state("gpu_aware"))
        assert isinstance(self.explain(rig).refusal, NoEndpoints)
        rig.endpoints(1)
        rig.full(1)
        assert self.explain(rig).would_hold
        assert self.explain(rig, max_wait_s=0.0).refusal.reason == "SATURATED"
        assert not self.explain(rig, max_wait_s=0.0).would_hold

    def test_with_another_strategy(self):
        rig = Rig(desired_state("random"))
        rig.endpoints(1)
        assert self.explain(rig, strategy="adaptive").why.strategy == "adaptive"


ACTIONS = st.lists(st.tuples(st.sampled_from(["route", "finish", "time"]), st.integers(0, 9)), max_size=40)


@given(ACTIONS, st.sampled_from(sorted(desired_state().strategies)), st.integers(0, 3))
def test_the_same_inputs_and_seed_give_the_same_choice(actions, strategy, seed):
    def choices():
        rig = Rig(desired_state(strategy), seed=seed)
        rig.endpoints(4)
        decisions, found = [], []
        for action, n in actions:
            if action == "route":
                decisions.append(rig.route(text=f"{n} " * 200))
                found.append(decisions[-1])
            elif action == "finish" and decisions:
                rig.finish(decisions.pop(n % len(decisions)))
            else:
                rig.pass_time(n / 10)
        return found

    assert choices() == choices()


@given(st.sampled_from(sorted(desired_state().strategies)), st.lists(st.sampled_from("abc"), max_size=30), st.data())
def test_a_decision_never_leaves_the_tenants_groups(strategy, tenants, data):
    numbers = [data.draw(st.sets(st.integers(1, 5))) for _ in "abc"]
    groups = [
        GpuGroup(f"g{t}", endpoints=tuple(spec(n).id for n in sorted(ns))) for t, ns in zip("abc", numbers, strict=True)
    ]
    bindings = [Binding(t, f"g{t}", data.draw(st.sampled_from(list(BindingMode)))) for t in "abc"]
    rig = Rig(desired_state(strategy, tenants=[Tenant(t) for t in "abc"], groups=groups, bindings=bindings))
    rig.endpoints(5)
    members = dict(zip("abc", numbers, strict=True))
    for tenant in tenants:
        try:
            decision = rig.route(tenant=tenant, text="a prompt of everybody " * 30, max_wait_s=0.0)
        except NoEndpoints:
            continue
        assert isinstance(decision, Decision)
        for placement in (decision.endpoint, *decision.fallbacks):
            assert int(rig.where_of(rig.fleet.endpoints[placement.spec.id])) in members[tenant]
