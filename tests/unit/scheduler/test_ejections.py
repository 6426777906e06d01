"""Failing endpoints: ejected, probed, brought back; never too many; and no fast 5xx looks like an idle endpoint."""

import pytest
from fakes.rig import Rig, desired_state, engine_sample, spec
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, GpuGroup, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.report import Outcome
from headway_scheduler.errors import AllDraining, AllEjected, AllUnhealthy, HeadwayError, RetryBudgetSpent, Saturated
from headway_scheduler.fleet.health import Phase, Reason

FAULT, SUCCESS = Outcome.SERVER_ERROR, Outcome.SUCCESS


def rig_of(count=4, strategy="least_request", **config):
    rig = Rig(desired_state(strategy), **({"slow_start_s": 0} | config))
    rig.endpoints(count)
    return rig


def only(number, count=4):
    return frozenset(f"10.0.0.{n}" for n in range(1, count + 1) if n != number)


def serve(rig, number, outcome, times=1, count=4):
    for _ in range(times):
        rig.finish(rig.route(excluded=only(number, count)), outcome)


def guards(rig, number=1):
    return rig.fleet.hard_guards(rig.fleet.endpoints[f"10.0.0.{number}:8000@0"])


def wait(rig, seconds):
    rig.clock.now += seconds
    rig.fleet.sweep(rig.clock.now)


class TestByShare:
    def test_half_of_enough_requests_eject(self):
        rig = rig_of()
        for _ in range(10):
            serve(rig, 1, SUCCESS)
            serve(rig, 1, FAULT)
        assert guards(rig) == ["ejected"]
        assert rig.fleet.ejections.counts[Reason.RATE] == 1

    def test_fewer_do_not(self):
        rig = rig_of()
        for _ in range(9):
            serve(rig, 1, SUCCESS)
            serve(rig, 1, FAULT)
        assert guards(rig) == []

    def test_a_small_share_does_not(self):
        rig = rig_of()
        for _ in range(30):
            serve(rig, 1, SUCCESS, 2)
            serve(rig, 1, FAULT)
        assert guards(rig) == []

    def test_what_is_long_ago_counts_no_more(self):
        rig = rig_of()
        serve(rig, 1, SUCCESS, 9)
        for _ in range(8):
            serve(rig, 1, FAULT)
            serve(rig, 1, SUCCESS)
        wait(rig, 300)
        for _ in range(4):
            serve(rig, 1, FAULT)
            serve(rig, 1, SUCCESS)
        assert guards(rig) == []

    @pytest.mark.parametrize("config", [{"eject_failures": 0, "eject_failure_percent": 0}, {"guards_off": "ejected"}])
    def test_both_can_be_off(self, config):
        rig = rig_of(**config)
        serve(rig, 1, FAULT, 60)
        assert guards(rig) == []

    @pytest.mark.parametrize("outcome", [Outcome.CLIENT_ERROR, Outcome.CANCELLED])
    def test_a_requests_own_fault_counts_neither_way(self, outcome):
        rig = rig_of()
        for _ in range(5):
            serve(rig, 1, outcome, 20)
            serve(rig, 1, FAULT)
        assert guards(rig) == ["ejected"], "five failures in a row, for all that clients did in between"


class TestProbing:
    def ejected(self, **config):
        rig = rig_of(**config)
        serve(rig, 1, FAULT, 5)
        assert guards(rig) == ["ejected"]
        wait(rig, 5)
        return rig

    def test_one_request_at_a_time_is_let_through(self):
        rig = self.ejected()
        probe = rig.route(excluded=only(1))
        assert guards(rig) == ["probing"]
        with pytest.raises(AllEjected):
            rig.route(excluded=only(1))
        rig.finish(probe, SUCCESS)
        assert guards(rig) == []
        assert rig.fleet.ejections.out == {}

    def test_so_many_as_are_wanted(self):
        rig = self.ejected(eject_probes=2)
        first, second = rig.route(excluded=only(1)), rig.route(excluded=only(1))
        assert guards(rig) == ["probing"]
        rig.first_token(first)
        rig.finish(first, SUCCESS)
        assert rig.fleet.ejections.out, "its first token and its end are one success"
        rig.finish(second, SUCCESS)
        assert rig.fleet.ejections.out == {}

    def test_a_first_token_is_enough(self):
        rig = self.ejected()
        probe = rig.route(excluded=only(1))
        rig.first_token(probe)
        assert guards(rig) == []
        rig.finish(probe, SUCCESS)

    @pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.CLIENT_ERROR])
    def test_one_that_tells_nothing_makes_way_for_another(self, outcome):
        rig = self.ejected()
        for _ in range(3):
            probe = rig.route(excluded=only(1))
            assert guards(rig) == ["probing"]
            rig.finish(probe, outcome)
            assert guards(rig) == []
        assert rig.fleet.ejections.out == {"10.0.0.1:8000@0": Phase.PROBING}

    def test_a_failure_ejects_again_and_for_longer_up_to_the_limit(self):
        rig = self.ejected(eject_max_s=12)
        for expected_s in (10, 12, 12):
            serve(rig, 1, FAULT)
            assert rig.fleet.ejections.remaining_s("10.0.0.1:8000@0", rig.clock.now) == expected_s
            wait(rig, expected_s)
        assert rig.fleet.ejections.counts[Reason.PROBE] == 3

    def test_time_without_failures_forgives(self):
        rig = self.ejected()
        serve(rig, 1, FAULT)
        wait(rig, 10)
        serve(rig, 1, SUCCESS)
        rig.clock.now += 90
        serve(rig, 1, FAULT, 5)
        assert rig.fleet.ejections.remaining_s("10.0.0.1:8000@0", rig.clock.now) == 5

    def test_what_was_sent_before_tells_nothing(self):
        rig = rig_of()
        late = [rig.route(excluded=only(1)) for _ in range(8)]
        serve(rig, 1, FAULT, 5)
        wait(rig, 5)
        rig.finish(late[0], SUCCESS)
        rig.finish(late[1], FAULT)
        assert rig.fleet.ejections.out == {"10.0.0.1:8000@0": Phase.PROBING}
        serve(rig, 1, SUCCESS)
        for each in late[2:]:
            rig.finish(each, FAULT)
        assert guards(rig) == []

    def test_one_served_elsewhere_has_failed(self):
        rig = self.ejected()
        probe = rig.route(excluded=only(1))
        rig.served_by(probe, "10.0.0.2:8000")
        assert guards(rig) == ["ejected"]
        rig.finish(probe, SUCCESS)
        assert guards(rig) == ["ejected"]

    def test_an_engine_started_anew_is_probed_at_once(self):
        rig = Rig(slow_start_s=0)
        rig.connect("n", *[spec(n, engine_boot_id="a") for n in range(1, 5)])
        serve(rig, 1, FAULT, 5)
        rig.connect("n", spec(1, engine_boot_id="b"), *[spec(n, engine_boot_id="a") for n in range(2, 5)])
        wait(rig, 0.25)
        assert rig.fleet.ejections.out == {"10.0.0.1:8000@0": Phase.PROBING}

    def test_an_admin_can_lift_it(self):
        rig = rig_of()
        serve(rig, 1, FAULT, 5)
        assert rig.fleet.lift_ejection(rig.fleet.endpoints["10.0.0.1:8000@0"], rig.clock.now)
        assert guards(rig) == []
        serve(rig, 1, FAULT, 4)
        assert guards(rig) == [], "its past is forgotten"
        assert not rig.fleet.lift_ejection(rig.fleet.endpoints["10.0.0.1:8000@0"], rig.clock.now)


class TestPanic:
    def test_the_share_is_a_setting(self):
        rig = rig_of(eject_max_percent=75)
        for number in range(1, 5):
            serve(rig, number, FAULT, 5)
        assert sum("ejected" in guards(rig, n) for n in range(1, 5)) == 3
        assert rig.fleet.in_panic() == {"m": True}
        assert rig.fleet.ejections.spared

    def test_the_last_one_of_a_tenants_part_stays(self):
        groups = [GpuGroup("one", endpoints=("10.0.0.1:8000@0",))]
        rig = Rig(desired_state(tenants=[Tenant("t")], groups=groups, bindings=[Binding("t", "one")]))
        rig.endpoints(4)
        for _ in range(9):
            rig.finish(rig.route(tenant="t"), FAULT)
        assert guards(rig) == []

    def test_one_that_is_needed_is_let_back_in(self):
        rig = rig_of(2)
        serve(rig, 1, FAULT, 5, count=2)
        assert guards(rig) == ["ejected"]
        rig.fleet.remove_endpoint("10.0.0.2:8000@0")
        rig.fleet.sweep(rig.clock.now)
        assert guards(rig) == []
        assert rig.where(rig.route()) == "1"


class TestFaultsAreLoad:
    @pytest.mark.parametrize("strategy", ["least_request", "global_least_request", "prefix_match"])
    def test_an_endpoint_that_fails_at_once_does_not_get_what_the_others_get(self, strategy):
        """Without ejections, of 400 requests that the others keep for a while."""
        rig = rig_of(strategy=strategy, eject_failures=0, eject_failure_percent=0)
        busy, failed = [], 0
        for number in range(400):
            decision = rig.route()
            if rig.where(decision) == "1":
                failed += 1
                rig.finish(decision, FAULT)
            else:
                busy.append(decision)
            if len(busy) > 60:
                rig.finish(busy.pop(0))
            if number % 10 == 0:
                wait(rig, 0.25)
        assert failed <= 100, "no more than its part"

    def test_one_failure_makes_it_as_busy_as_the_busiest(self):
        rig = rig_of()
        for number in (2, 3, 4):
            for _ in range(10 * number):
                rig.route(excluded=only(number))
        assert rig.where(rig.route(excluded=frozenset({"10.0.0.4"}))) == "1"
        rig = rig_of()
        for number in (2, 3, 4):
            for _ in range(10 * number):
                rig.route(excluded=only(number))
        serve(rig, 1, FAULT)
        assert [rig.where(rig.route()) for _ in range(30)].count("1") == 0

    def test_it_fades(self):
        rig = rig_of()
        slot = rig.slot(1)
        serve(rig, 1, FAULT)
        assert rig.columns.handicap[slot] == 1.0
        wait(rig, 1)
        assert 0.6 < rig.columns.handicap[slot] < 0.61
        wait(rig, 0.5)
        assert rig.columns.handicap[slot] == 0.0
        assert not rig.columns.handicapped

    def test_it_can_be_off(self):
        rig = rig_of(fault_load_s=0)
        serve(rig, 1, FAULT, 3)
        assert not rig.columns.handicap.any()


class TestSlowStart:
    def loads(self, rig, seconds):
        found = []
        for _ in range(seconds):
            wait(rig, 1)
            found.append(float(rig.columns.handicap[rig.slot(1)]))
        return found

    def test_after_an_ejection_its_share_grows(self):
        rig = rig_of(slow_start_s=10)
        for number in (2, 3, 4):
            for _ in range(20):
                rig.route(excluded=only(number))
        serve(rig, 1, FAULT, 5)
        wait(rig, 5)
        serve(rig, 1, SUCCESS)
        assert rig.columns.handicap[rig.slot(1)] == 20.0
        assert rig.where(rig.route()) != "1"
        assert self.loads(rig, 10) == pytest.approx([21 * (1 - n / 10) for n in range(1, 11)], abs=1e-6)
        assert rig.where(rig.route()) == "1"

    @pytest.mark.parametrize(("after", "slow"), [("new", True), ("ejection,restart", False)])
    def test_a_new_one_if_wanted(self, after, slow):
        rig = rig_of(slow_start_s=10, slow_start_after=after)
        assert bool(rig.columns.handicap[rig.slot(1)]) is slow

    def test_a_restarted_one_if_wanted(self):
        rig = Rig(slow_start_s=10, slow_start_after="restart")
        rig.connect("n", spec(1, engine_boot_id="a"))
        assert not rig.columns.handicap.any()
        rig.connect("n", spec(1, engine_boot_id="b"))
        assert rig.columns.handicap[rig.slot(1)] == 1.0


class TestRetryBudget:
    def test_a_share_of_what_is_in_flight_and_a_few_always(self):
        rig = rig_of(retry_percent=20, retry_min=3)
        others = [rig.route() for _ in range(40)]
        retries = []
        with pytest.raises(RetryBudgetSpent) as refused:
            while True:
                retries.append(rig.route(excluded=frozenset({"10.0.0.1"})))
        assert len(retries) == 10, "a fifth of what is in flight then"
        assert refused.value.retry_after_s
        assert rig.scheduler.dispatcher.retries.refused == {"m": 1}
        rig.finish(retries.pop())
        rig.route(excluded=frozenset({"10.0.0.1"}))
        for each in others:
            rig.finish(each)
        with pytest.raises(RetryBudgetSpent):
            rig.route(excluded=frozenset({"10.0.0.1"}))

    def test_a_retry_under_the_same_id_counts_once(self):
        rig = rig_of(retry_percent=0, retry_min=1)
        first, second = rig.route("a"), rig.route("b")
        rig.route("a", excluded=frozenset({first.endpoint.spec.address}))
        with pytest.raises(RetryBudgetSpent):
            rig.route("b", excluded=frozenset({second.endpoint.spec.address}))
        moved = rig.route("a")
        rig.route("a", excluded=frozenset({moved.endpoint.spec.address}))
        rig.finish(moved)
        rig.route("b", excluded=frozenset({second.endpoint.spec.address}))

    def test_one_that_has_its_first_token_is_over(self):
        rig = rig_of(retry_percent=0, retry_min=1)
        retry = rig.route(excluded=frozenset({"10.0.0.1"}))
        rig.first_token(retry)
        assert rig.scheduler.dispatcher.retries.now == {}
        rig.finish(rig.route(excluded=frozenset({"10.0.0.1"})))
        rig.finish(retry)
        assert rig.scheduler.dispatcher.retries.now == {}

    def test_while_it_is_spent_answers_name_no_fallbacks(self):
        rig = rig_of(retry_percent=0, retry_min=1)
        first = rig.route()
        assert len(first.fallbacks) == 3
        rig.served_by(first, first.fallbacks[0].spec.address)
        assert rig.route().fallbacks == ()
        rig.finish(first)
        assert len(rig.route().fallbacks) == 3

    def test_one_that_is_held_or_refused_gives_its_place_back(self):
        rig = Rig(desired_state("gpu_aware"), retry_percent=0, retry_min=1)
        rig.endpoints(2)
        rig.full(1, 2)
        waiter, _ = rig.hold(excluded=frozenset({"10.0.0.1"}))
        with pytest.raises(RetryBudgetSpent):
            rig.route(excluded=frozenset({"10.0.0.1"}))
        rig.dispatcher.give_up(waiter)
        with pytest.raises(HeadwayError) as saturated:
            rig.submit(rig.request(excluded=frozenset({"10.0.0.1"}), max_wait_s=0.0))
        assert saturated.value.reason == "SATURATED"
        assert rig.scheduler.dispatcher.retries.now == {}

    def test_where_none_may_be_the_first_is_refused(self):
        rig = rig_of(retry_percent=0, retry_min=0)
        with pytest.raises(RetryBudgetSpent):
            rig.route(excluded=frozenset({"10.0.0.1"}))

    def test_a_retry_that_found_no_room_is_none_in_progress(self):
        rig = Rig(desired_state("gpu_aware"), retry_percent=0, retry_min=1)
        rig.endpoints(2)
        first = rig.route("a")
        rig.full(1, 2)
        with pytest.raises(Saturated):
            rig.route("a", excluded=frozenset({first.endpoint.spec.address}))
        assert rig.scheduler.dispatcher.retries.now == {}


class TestOneFault:
    """A failed request is one fault of its endpoint, however often its data plane asks where else to go."""

    @pytest.mark.parametrize(
        ("budget", "refusal"), [({"retry_min": 0, "retry_percent": 0}, RetryBudgetSpent), ({}, Saturated)]
    )
    def test_whose_retry_is_refused(self, budget, refusal):
        rig = Rig(desired_state("gpu_aware"), slow_start_s=0, **budget)
        rig.endpoints(4)
        first = rig.route("a")
        failing = int(rig.where(first))
        rig.full(*({1, 2, 3, 4} - {failing}))
        for _ in range(10):
            with pytest.raises(refusal):
                rig.route("a", excluded=frozenset({first.endpoint.spec.address}))
        rig.finish(first, FAULT)
        assert guards(rig, failing) == []
        endpoint = rig.fleet.by_slot[rig.slot(failing)]
        for _ in range(3):
            rig.fleet.record_outcome(endpoint, True, rig.clock.now)
        assert guards(rig, failing) == []
        rig.fleet.record_outcome(endpoint, True, rig.clock.now)
        assert guards(rig, failing) == ["ejected"]

    def test_and_one_where_it_went(self):
        rig = rig_of(eject_failures=2)
        first = rig.route("a")
        second = rig.route("a", excluded=frozenset({first.endpoint.spec.address}))
        rig.finish(second, FAULT)
        serve(rig, int(rig.where(second)), FAULT)
        assert guards(rig, int(rig.where(second))) == ["ejected"]
        assert guards(rig, int(rig.where(first))) == []

    def test_a_call_that_was_refused_has_no_part_in_the_place(self):
        rig = Rig(desired_state("gpu_aware"))
        rig.endpoints(2)
        first = rig.route("a")
        rig.full(1, 2)
        with pytest.raises(Saturated):
            rig.route("a", excluded=frozenset({first.endpoint.spec.address}))
        rig.dispatcher.give_back(first.reservation_id, rig.owner, rig.clock.now)
        assert rig.is_empty()


class TestLoadedOrIll:
    """429 means there is capacity but it is busy; 503 that there is none. Each combination has its reason."""

    def refusal(self, rig):
        try:
            outcome = rig.submit(rig.request(max_wait_s=0.0))
        except HeadwayError as error:
            return error.status, error.reason
        assert isinstance(outcome, Decision)
        return None

    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [
            ("loaded", "loaded", ("RESOURCE_EXHAUSTED", "SATURATED")),
            ("loaded", "well", None),
            ("loaded", "stale", ("RESOURCE_EXHAUSTED", "SATURATED")),
            ("loaded", "not_ready", ("RESOURCE_EXHAUSTED", "SATURATED")),
            ("loaded", "cordoned", ("RESOURCE_EXHAUSTED", "SATURATED")),
            ("loaded", "ejected", ("RESOURCE_EXHAUSTED", "SATURATED")),
            ("not_ready", "not_ready", ("UNAVAILABLE", "ALL_UNHEALTHY")),
            ("not_ready", "cordoned", ("UNAVAILABLE", "ALL_UNHEALTHY")),
            ("cordoned", "cordoned", ("UNAVAILABLE", "ALL_DRAINING")),
            ("ejected", "not_ready", None),
            ("ejected", "well", None),
        ],
    )
    def test_each_combination(self, first, second, expected):
        rig = Rig(desired_state("gpu_aware"), slow_start_s=0)
        for node, number in (("n1", 1), ("n2", 2)):
            rig.connect(node, spec(number))
        rig.connect("n3", spec(3, models=("other",)))
        states = {1: first, 2: second}
        if "ejected" in states.values():
            number = next(n for n, state in states.items() if state == "ejected")
            serve(rig, number, FAULT, 5, count=2)
            assert guards(rig, number) == ["ejected"]
        rig.desire(
            endpoint_states={spec(n).id: SchedulingState.CORDONED for n, state in states.items() if state == "cordoned"}
        )
        for number, state in states.items():
            node = rig.fleet.nodes[f"n{number}"]
            rig.sample(
                node, engine_sample(spec(number), kv_use=0.9 if state == "loaded" else 0.1, ready=state != "not_ready")
            )
            if state == "stale":
                node.stale = True
                rig.fleet.refresh_guards(node.endpoints.values())
        rig.fleet.sweep(rig.clock.now)
        assert self.refusal(rig) == expected

    def test_all_that_a_request_may_use_are_ejected(self):
        rig = rig_of()
        serve(rig, 1, FAULT, 5)
        with pytest.raises(AllEjected) as refused:
            rig.route(excluded=only(1))
        assert (refused.value.status, refused.value.retry_after_s) == ("UNAVAILABLE", 5)
        assert isinstance(refused.value, AllUnhealthy)
        assert not isinstance(refused.value, AllDraining)


def test_details_of_hard_guards():
    rig = rig_of()
    serve(rig, 1, FAULT, 5)
    explanation = rig.dispatcher.explain(rig.request(), "", rig.owner, rig.clock.now, whole=False)
    details = {row.endpoint.id: row.details for row in explanation.rows}
    assert details["10.0.0.1:8000@0"] == {"ejected": "consecutive_faults"}
