"""Binding modes, their order, splits of a model, and what a tenant may ask for."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from fakes.rig import MODEL, Rig, desired_state, spec
from headway.routing.v1 import routing_pb2 as pb
from headway_client.failopen import FailOpenRouter
from headway_scheduler.admission.intake import Intake
from headway_scheduler.domain.desired import Binding, BindingMode, GpuGroup, Model, Principal, Role, Split, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.report import ReportStatus
from headway_scheduler.domain.request import Subset
from headway_scheduler.errors import AdapterNotAllowed, AllUnhealthy, ModelNotAllowed, NoEndpoints, Saturated
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.values import Owner
from headway_scheduler.rpc.fail_open import fail_open_view, writing_view

DEDICATED, SHARED, BURST = BindingMode.DEDICATED, BindingMode.SHARED, BindingMode.BURST


def group(name, *numbers, **changes):
    return GpuGroup(name, endpoints=tuple(spec(number).id for number in numbers), **changes)


def rig_of(strategy="gpu_aware", *, tenants="ab", groups=(), bindings=(), count=4, **changes):
    state = desired_state(
        strategy, tenants=[Tenant(each) for each in tenants], groups=groups, bindings=bindings, **changes
    )
    rig = Rig(state)
    rig.endpoints(count)
    return rig


class TestOrder:
    GROUPS = (group("one", 1), group("two", 2), group("spare", 3))
    BINDINGS = (Binding("a", "one", order=1), Binding("a", "two", order=2), Binding("a", "spare", BURST, order=0))

    def test_lower_first_and_burst_last_whatever_its_order(self):
        rig = rig_of(groups=self.GROUPS, bindings=self.BINDINGS)
        assert {rig.where(rig.route(tenant="a")) for _ in range(3)} == {"1"}
        rig.full(1)
        assert {rig.where(rig.route(tenant="a")) for _ in range(3)} == {"2"}
        rig.full(1, 2)
        assert {rig.where(rig.route(tenant="a")) for _ in range(3)} == {"3"}

    def test_groups_of_one_order_are_one(self):
        bindings = [replace(binding, order=0, mode=SHARED) for binding in self.BINDINGS]
        rig = rig_of("least_request", groups=self.GROUPS, bindings=bindings)
        assert Counter(rig.where(rig.route(tenant="a")) for _ in range(6)) == {"1": 2, "2": 2, "3": 2}

    def test_a_group_with_no_endpoint_is_passed_over(self):
        rig = rig_of(groups=self.GROUPS, bindings=self.BINDINGS)
        rig.desire(endpoint_states={spec(1).id: SchedulingState.CORDONED})
        assert rig.where(rig.route(tenant="a")) == "2"


class TestBurst:
    """`a` owns 1, `b` owns 2, and `a` may overflow into `b`'s."""

    GROUPS = (group("ga", 1), group("gb", 2))
    BINDINGS = (Binding("a", "ga"), Binding("b", "gb"), Binding("a", "gb", BURST))

    def rig(self, strategy="gpu_aware"):
        return rig_of(strategy, groups=self.GROUPS, bindings=self.BINDINGS, count=2)

    def test_it_yields_to_those_who_own_the_group(self):
        rig = self.rig()
        rig.full(1, 2)
        _, borrowed = rig.hold(tenant="a")
        _, owned = rig.hold(tenant="b")
        order = []
        for name, answers in (("a", borrowed), ("b", owned)):
            answers_append = answers.append
            hold = next(h for h in rig.dispatcher.holds if h.work.request.tenant == name)
            hold.waiters[0].answer = lambda outcome, name=name, keep=answers_append: (order.append(name), keep(outcome))
        rig.full(1)
        rig.dispatcher.run_pass(rig.clock.now)
        assert order == ["b", "a"]
        assert (rig.where(borrowed[0]), rig.where(owned[0])) == ("2", "2")

    def test_bound_late_it_takes_only_what_no_owner_waits_for(self):
        rig = self.rig("adaptive")
        for number in (1, 2):
            rig.submit(rig.request(tenant="ab"[number - 1], prompt_tokens=50_000))
        _, borrowed = rig.hold(tenant="a", prompt_tokens=40_000)
        _, owned = rig.hold(tenant="b", prompt_tokens=40_000)
        second = next(r for r in rig.ledger.reservations.values() if r.tenant == "b")
        rig.ledger.first_token(second, rig.clock.now)
        rig.dispatcher.run_pass(rig.clock.now)
        assert rig.where(owned[0]) == "2"
        assert borrowed == []

    def test_one_that_may_not_wait_yields_too(self):
        rig = self.rig()
        rig.full(1, 2)
        _, owned = rig.hold(tenant="b")
        rig.full(1)  # nobody has made a pass yet
        with pytest.raises(Saturated):
            rig.submit(rig.request(tenant="a", max_wait_s=0.0))
        rig.dispatcher.run_pass(rig.clock.now)
        assert rig.where(owned[0]) == "2"

    def test_its_own_are_taken_first_when_both_are_free(self):
        rig = self.rig()
        rig.full(1, 2)
        _, answers = rig.hold(tenant="a")
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        assert rig.where(answers[0]) == "1"

    def test_a_tenant_that_owns_nothing_waits_for_what_it_borrows(self):
        rig = rig_of(groups=[group("gb", 2)], bindings=[Binding("b", "gb"), Binding("a", "gb", BURST)])
        rig.full(2)
        _, answers = rig.hold(tenant="a")
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        assert rig.where(answers[0]) == "2"


class TestDedicated:
    def test_labels_are_followed_live(self):
        rig = rig_of(groups=[GpuGroup("gold", selector={"tier": "gold"})], bindings=[Binding("a", "gold", DEDICATED)])
        with pytest.raises(NoEndpoints):
            rig.route(tenant="a")
        rig.connect("n", spec(1, labels={"tier": "gold"}), spec(2))
        assert rig.where(rig.route(tenant="a")) == "1"
        assert {rig.where(rig.route()) for _ in range(4)} == {"2"}
        rig.connect("n", spec(1), spec(2, labels={"tier": "gold"}))
        assert rig.where(rig.route(tenant="a")) == "2"
        assert {rig.where(rig.route()) for _ in range(4)} == {"1"}

    def test_a_nodes_labels_count_and_its_endpoints_own_go_before(self):
        rig = rig_of(groups=[GpuGroup("gold", selector={"tier": "gold"})], bindings=[Binding("a", "gold")])
        rig.connect("n", spec(1), spec(2, labels={"tier": "tin"}), labels={"tier": "gold"})
        assert {rig.where(rig.route(tenant="a")) for _ in range(4)} == {"1"}

    def test_an_endpoint_in_two_tenants_dedicated_groups_serves_neither_until_one_lets_go(self):
        groups = [GpuGroup("gold", selector={"tier": "gold"}), GpuGroup("fast", selector={"gpu": "h200"})]
        bindings = (Binding("a", "gold", DEDICATED), Binding("b", "fast", DEDICATED))
        rig = rig_of(groups=groups, bindings=bindings)
        both = spec(1, labels={"tier": "gold", "gpu": "h200"})
        rig.connect("n", both, spec(2, labels={"tier": "gold"}), spec(3, labels={"gpu": "h200"}))
        assert rig.fleet.hard_guards(rig.fleet.endpoints[both.id]) == ["contested"]
        assert {rig.where(rig.route(tenant="a")) for _ in range(4)} == {"2"}
        assert {rig.where(rig.route(tenant="b")) for _ in range(4)} == {"3"}
        with pytest.raises(NoEndpoints):
            rig.route(subset=Subset(frozenset({"10.0.0.1"})))
        rig.desire(bindings=(Binding("default", "all"), bindings[0]))
        assert rig.fleet.hard_guards(rig.fleet.endpoints[both.id]) == []
        assert rig.where(rig.route(tenant="a")) == "1"

    def test_one_tenants_two_dedicated_groups_may_overlap(self):
        groups = [group("g1", 1, 2), group("g2", 2, 3)]
        rig = rig_of(groups=groups, bindings=[Binding("a", "g1", DEDICATED), Binding("a", "g2", DEDICATED)])
        assert {rig.where(rig.route(tenant="a")) for _ in range(6)} == {"1", "2", "3"}


class TestRebinding:
    def test_what_is_in_flight_ends_well_and_what_is_new_goes_elsewhere(self):
        groups = (group("old", 1), group("new", 2))
        rig = rig_of(groups=groups, bindings=[Binding("a", "old")])
        before = rig.route("r1", tenant="a")
        rig.desire(bindings=(Binding("default", "all"), Binding("a", "new")))
        assert rig.ledger.find(before.reservation_id) is not None
        assert rig.where(rig.route(tenant="a")) == "2"
        assert rig.route("r1", tenant="a") == before  # a retry of what runs there is still what runs there
        assert rig.first_token(before)[0] is ReportStatus.APPLIED
        assert rig.progress(before)[0] is ReportStatus.APPLIED
        assert rig.finish(before)[0] is ReportStatus.APPLIED
        assert rig.counts(rig.slot(1))["inflight"] == 0

    def test_a_hold_waits_for_the_new_group(self):
        rig = rig_of(groups=[group("old", 1), group("new", 2)], bindings=[Binding("a", "old")])
        rig.full(1)
        _, answers = rig.hold(tenant="a")
        rig.desire(bindings=(Binding("default", "all"), Binding("a", "new")))
        rig.dispatcher.run_pass(rig.clock.now)
        assert rig.where(answers[0]) == "2"


class TestSplits:
    """Endpoints 1 and 2 run the stable engine, 3 the canary."""

    STABLE = Split("stable", 90.0, engine_version="1")
    CANARY = Split("canary", 10.0, selector={"track": "canary"})

    def rig(self, *splits, strategy="least_request"):
        model = Model(MODEL, aliases=("alias",), splits=splits or (self.CANARY, self.STABLE))
        rig = Rig(desired_state(strategy, models={MODEL: model}))
        rig.connect(
            "n",
            spec(1, engine_version="1"),
            spec(2, engine_version="1"),
            spec(3, engine_version="2", labels={"track": "canary"}),
        )
        return rig

    def shares(self, rig, count=600, **changes):
        found = Counter()
        for number in range(count):
            decision = rig.route(session_id=f"s{number}", **changes)
            found[rig.where(decision)] += 1
            rig.finish(decision)
        return found

    def test_each_gets_its_weight(self):
        shares = self.shares(self.rig())
        assert 30 <= shares["3"] <= 95
        assert abs(shares["1"] - shares["2"]) <= 1

    def test_a_session_stays_and_so_does_a_retry(self):
        rig = self.rig(replace(self.CANARY, weight=50.0), replace(self.STABLE, weight=50.0))
        for key in range(40):
            canary = {rig.where(rig.route(session_id=f"s{key}")) == "3" for _ in range(4)}
            assert len(canary) == 1
            rig.finish(rig.route("same"))
            again = {rig.where(d) == "3" for d in (rig.route("same"), rig.route("same"))}
            assert len(again) == 1

    def test_fallbacks_stay_within_the_split(self):
        rig = self.rig()
        for number in range(60):
            decision = rig.route(session_id=f"s{number}")
            others = {each.spec.address.split(":")[0][-1] for each in decision.fallbacks}
            assert others == (set() if rig.where(decision) == "3" else {"1", "2"} - {rig.where(decision)})

    def test_a_split_without_an_endpoint_leaves_its_share_to_the_others(self):
        rig = self.rig()
        rig.desire(endpoint_states={spec(3).id: SchedulingState.CORDONED})
        assert set(self.shares(rig, 60)) == {"1", "2"}
        rig.desire(endpoint_states={spec(1).id: SchedulingState.CORDONED, spec(2).id: SchedulingState.CORDONED})
        assert set(self.shares(rig, 60)) == {"3"}

    def test_a_retry_that_excludes_the_canary_goes_on_without_it(self):
        rig = self.rig(replace(self.CANARY, weight=1.0), replace(self.STABLE, weight=1e-9))
        assert rig.where(rig.route("r")) == "3"
        assert rig.where(rig.route("r2", excluded=frozenset({"10.0.0.3"}))) in {"1", "2"}

    def test_weight_zero_gets_nothing_even_if_nothing_else_is_there(self):
        rig = self.rig(replace(self.CANARY, weight=0.0), self.STABLE)
        assert set(self.shares(rig, 60)) == {"1", "2"}
        rig.desire(endpoint_states={spec(n).id: SchedulingState.CORDONED for n in (1, 2)})
        with pytest.raises(NoEndpoints):
            rig.route()

    def test_what_matches_no_split_is_the_last_resort(self):
        rig = self.rig(self.CANARY)
        assert set(self.shares(rig, 20)) == {"3"}
        rig.desire(endpoint_states={spec(3).id: SchedulingState.CORDONED})
        assert set(self.shares(rig, 20)) == {"1", "2"}

    def test_a_saturated_split_is_waited_for(self):
        rig = self.rig(replace(self.CANARY, weight=1.0), replace(self.STABLE, weight=1e-9), strategy="gpu_aware")
        rig.full(3)
        _, answers = rig.hold("r1")
        rig.desire(models={MODEL: Model(MODEL, splits=(replace(self.CANARY, weight=1e-9), self.STABLE))})
        rig.dispatcher.run_pass(rig.clock.now)  # weights move, and with them those who wait
        assert rig.where(answers[0]) in {"1", "2"}

    def test_a_full_canary_keeps_nobody_else_waiting(self):
        rig = self.rig(replace(self.CANARY, weight=50.0), replace(self.STABLE, weight=50.0), strategy="gpu_aware")
        rig.full(1, 2, 3)
        answers = [rig.hold(f"r{number}")[1] for number in range(40)]
        rig.full(3)
        rig.dispatcher.run_pass(rig.clock.now)
        settled = [each for each in answers if each]
        assert 10 < len(settled) < 30
        assert {rig.where(each[0]) for each in settled} == {"1", "2"}

    def test_a_group_makes_a_split(self):
        model = Model(MODEL, splits=(Split("new", 1.0, group="canary"), Split("old", 0.0, selector={"x": "y"})))
        rig = Rig(desired_state("least_request", groups=[group("canary", 2)], models={MODEL: model}))
        rig.endpoints(3)
        assert {rig.where(rig.route()) for _ in range(5)} == {"2"}

    def test_explain_says_that_an_endpoint_is_of_another_split(self):
        rig = self.rig(replace(self.CANARY, weight=1.0), replace(self.STABLE, weight=1e-9))
        rows = rig.dispatcher.explain(rig.request(), "", Owner("p", stream=False), rig.clock.now, True).rows
        assert [row.hard_guards for row in rows] == [("other_split",), ("other_split",), ()]


class TestWhatATenantMayAskFor:
    ROUTER = Principal("r", Role.ROUTER)

    def intake(self, **changes):
        rig = Rig(desired_state(tenants=[Tenant("a", **changes)]))
        return rig.scheduler.intake, rig.scheduler.desired.tenants["a"]

    def test_an_alias_in_its_list_means_the_model(self):
        intake, tenant = self.intake(models=("alias",))
        assert intake.model(tenant, MODEL) == MODEL
        assert intake.model(tenant, "alias") == MODEL

    def test_a_model_that_is_not_in_its_list_is_refused_by_any_name(self):
        intake, tenant = self.intake(models=("other",))
        for name in (MODEL, "alias"):
            with pytest.raises(ModelNotAllowed):
                intake.model(tenant, name)

    def test_adapters(self):
        intake, tenant = self.intake(adapters=("sql",))
        intake.check_adapter(tenant, "")
        intake.check_adapter(tenant, "sql")
        with pytest.raises(AdapterNotAllowed) as refused:
            intake.check_adapter(tenant, "poetry")
        assert refused.value.facts["field"] == "adapter"
        everything, free = self.intake()
        everything.check_adapter(free, "poetry")


def test_without_a_scheduler_a_tenant_has_only_its_models():
    tenants = [Tenant("a", models=("alias",)), Tenant("b", models=("n",)), Tenant("c", models=("none",))]
    bindings = [Binding(each.id, "all") for each in tenants]
    models = {MODEL: Model(MODEL, aliases=("alias",)), "n": Model("n")}
    rig = Rig(desired_state(tenants=tenants, bindings=bindings, models=models))
    rig.connect("n", spec(1, models=(MODEL, "n")))
    view = fail_open_view(rig.scheduler, Principal("p", Role.ROUTER))
    assert {tuple(entry.models): list(entry.tenants) for entry in view.endpoints} == {
        (MODEL, "alias"): ["a"],
        ("n",): ["b"],
        (MODEL, "n", "alias"): ["default"],
    }


@pytest.mark.parametrize(("ready", "served"), [(True, False), (False, True)])
def test_without_a_scheduler_nobody_goes_where_admins_drain_but_where_all_are_ill(ready, served):
    rig = Rig()
    rig.connect("n", spec(1), spec(2))
    principal, alone = Principal("p", Role.ROUTER), FailOpenRouter(random.Random(1))
    alone.update(fail_open_view(rig.scheduler, principal))
    rig.connect("n", spec(1), spec(2, ready=ready))
    states = {spec(1).id: SchedulingState.DRAINING}
    rig.desire(endpoint_states=states if not ready else states | {spec(2).id: SchedulingState.CORDONED})
    alone.update(fail_open_view(rig.scheduler, principal))
    assert (alone.choose(pb.RouteRequest(tenant="default", model=MODEL), "1") is not None) is served


def test_while_it_is_written_down_endpoints_and_tenants_may_go():
    tenants = [Tenant("a"), Tenant("b")]
    rig = Rig(desired_state(tenants=tenants, bindings=[Binding(each.id, "all") for each in tenants]))
    rig.endpoints(250)
    view = pb.FailOpenView()
    writing = writing_view(view, rig.scheduler, Principal("p", Role.ROUTER))
    for _ in range(4):  # who may use what, and the first endpoints
        next(writing)
    rig.desire(tenants={"default": Tenant("default")}, bindings=(Binding("default", "all"),))
    rig.connect("n", *[spec(number) for number in range(1, 201)])
    turns = sum(1 for _ in writing)
    assert turns >= 1
    assert len(view.endpoints) == 200
    assert {entry.endpoint.address for entry in view.endpoints} == {spec(number).address for number in range(1, 201)}
    assert len(fail_open_view(rig.scheduler, Principal("p", Role.ROUTER)).endpoints) == 200


def test_what_data_planes_are_told_costs_by_tenants_and_endpoints_not_by_their_product(monkeypatch):
    tenants = [Tenant(f"t{number}") for number in range(20)]
    rig = Rig(desired_state(tenants=tenants, bindings=[Binding(each.id, "all") for each in tenants]))
    rig.endpoints(20)
    asked, rights, allows = Counter(), rig.fleet.rights, rig.scheduler.intake.allows
    monkeypatch.setattr(Fleet, "rights", lambda _, tenant: (asked.update(["rights"]), rights(tenant))[1])
    monkeypatch.setattr(Intake, "allows", lambda _, *who: (asked.update(["allows"]), allows(*who))[1])
    view = fail_open_view(rig.scheduler, Principal("p", Role.ROUTER))
    assert [len(entry.tenants) for entry in view.endpoints] == [21] * 20
    assert asked == {"rights": 21, "allows": 21}


@pytest.mark.parametrize(
    "change",
    [
        {"tenants": {"default": Tenant("default"), "a": Tenant("a", models=("other",))}},
        {"models": {MODEL: Model(MODEL, aliases=("alias", "another"))}},
    ],
)
def test_data_planes_are_told_anew_when_a_tenants_models_change(change):
    rig = Rig(desired_state(tenants=[Tenant("a")], bindings=[Binding("a", "all")]))
    rig.endpoints(1)
    before = rig.fleet.version
    rig.desire()
    assert rig.fleet.version == before
    rig.desire(**change)
    assert rig.fleet.version > before


def test_without_a_scheduler_a_tenant_that_has_lost_its_last_endpoint_goes_nowhere():
    rig = Rig(desired_state(tenants=[Tenant("a")], bindings=[Binding("a", "all")]))
    rig.endpoints(1)
    principal, alone = Principal("p", Role.ROUTER, tenants=("a",)), FailOpenRouter(random.Random(1))
    asked = pb.RouteRequest(tenant="a", model=MODEL)
    alone.update(fail_open_view(rig.scheduler, principal))
    assert alone.choose(asked, "1") is not None
    rig.desire(bindings=())
    alone.update(fail_open_view(rig.scheduler, principal))
    assert alone.choose(asked, "2") is None
    rig.scheduler.dispatcher.settled_at = rig.clock.now + 1
    rig.desire(bindings=(Binding("a", "all"),))
    alone.update(fail_open_view(rig.scheduler, principal))
    rig.desire(bindings=())
    alone.update(fail_open_view(rig.scheduler, principal))
    assert alone.choose(asked, "3") is not None, "one that just started knows not all that there is"


def test_the_lane_of_an_unhealthy_pool_says_so():
    rig = rig_of(groups=[group("g", 1)], bindings=[Binding("a", "g")])
    rig.connect("n", spec(1, ready=False))
    with pytest.raises(AllUnhealthy):
        rig.route(tenant="a")
