"""Holds: kept in order, answered in time, gone without a trace; and the guards that make them wait."""

import pytest
from fakes.faults import breaking
from fakes.rig import Rig, desired_state, device_sample, engine_sample, gpu, spec
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, Tenant
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.request import Subset
from headway_scheduler.errors import HoldExpired, QueueFull, RequestIdInUse
from headway_scheduler.fleet.values import Owner


@pytest.fixture
def rig():
    """Two endpoints, both too full to dispatch to."""
    rig = Rig(desired_state("gpu_aware"))
    rig.endpoints(2)
    rig.full(1, 2)
    return rig


def test_held_and_dispatched_when_there_is_room(rig):
    _, answers = rig.hold("r")
    rig.clock.now += 2
    rig.dispatcher.run_pass(rig.clock.now)
    assert answers == []
    rig.full(1)
    rig.dispatcher.run_pass(rig.clock.now)
    assert [rig.where(answer) for answer in answers] == ["2"]
    assert answers[0].why.held_ms == 2000
    assert not len(rig.dispatcher.holds)
    rig.finish(answers[0])
    assert rig.is_empty()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tenants": {"default": Tenant("default")}, "bindings": (Binding("default", "all"),)}, "UNKNOWN_TENANT"),
        ({"tenants": {"default": Tenant("default"), "a": Tenant("a", models=("other",))}}, "MODEL_NOT_ALLOWED"),
        ({"tenants": {"default": Tenant("default"), "a": Tenant("a", adapters=("sql",))}}, "ADAPTER_NOT_ALLOWED"),
    ],
)
def test_what_may_not_be_asked_any_more_is_refused_at_once(change, reason):
    rig = Rig(desired_state("gpu_aware", tenants=[Tenant("a")], bindings=[Binding("a", "all")]))
    rig.connect("n", spec(1, adapters=("sql", "poetry")))
    rig.full(1)
    _, answers = rig.hold("r", tenant="a", adapter="poetry")
    _, others = rig.hold("r", adapter="poetry")
    rig.desire()
    assert answers == []
    rig.desire(**change)
    assert [answer.reason for answer in answers] == [reason]
    assert others == []
    assert rig.dispatcher.holds.tenants == {"default": 1}
    assert rig.dispatcher.quotas.inflight("a") == 0


def test_room_wakes_the_pass(rig):
    rig.full(2)
    decision = rig.route()
    rig.full(1, 2)
    calls = []
    rig.dispatcher.wake = lambda: calls.append(1)
    rig.finish(decision)
    assert not calls, "nobody waits"
    rig.full(2)
    decision = rig.route()
    rig.full(1, 2)
    rig.hold()
    rig.finish(decision)
    assert calls


def test_expires_with_a_time_to_come_back(rig):
    waiter, answers = rig.hold("r", max_wait_s=3.0)
    assert waiter.until == rig.clock.now + 3
    rig.pass_time(2.9)
    assert answers == []
    rig.pass_time(0.2)
    assert isinstance(answers[0], HoldExpired)
    assert answers[0].reason == "HOLD_EXPIRED"
    assert answers[0].retry_after_s > 0
    assert rig.is_empty()


def test_waits_30_s_unless_told_otherwise(rig):
    waiter, _ = rig.hold()
    assert waiter.until == rig.clock.now + 30


def test_the_calls_own_deadline_cuts_it(rig):
    waiter, _ = rig.hold(deadline=rig.clock.now + 5)
    assert rig.clock.now + 4.8 < waiter.until < rig.clock.now + 5


def test_cancelled_it_leaves_no_trace(rig):
    waiter, answers = rig.hold("r")
    rig.dispatcher.give_up(waiter)
    rig.dispatcher.give_up(waiter)
    assert rig.is_empty()
    rig.full()
    rig.dispatcher.run_pass(rig.clock.now)
    assert answers == []
    assert not rig.ledger.reservations


def test_so_many_and_no_more():
    rig = Rig(desired_state("gpu_aware"), max_holds=2)
    rig.endpoints(1)
    rig.full(1)
    rig.hold()
    rig.hold()
    with pytest.raises(QueueFull) as caught:
        rig.submit(rig.request())
    assert caught.value.retry_after_s > 0


class TestRetries:
    def test_keep_the_place_and_join(self, rig):
        _, first = rig.hold("r", text="x")
        rig.hold("other")
        _, retry = rig.hold("r", text="x")
        assert len(rig.dispatcher.holds) == 2
        rig.full()
        order = []
        for hold in rig.dispatcher.holds:
            order.append(hold.work.request.request_id)
        assert order == ["r", "other"]
        rig.dispatcher.run_pass(rig.clock.now)
        assert first == retry
        assert isinstance(first[0], Decision)
        assert len(rig.ledger.reservations) == 2

    def test_another_prompt_is_refused(self, rig):
        rig.hold("r", text="x")
        with pytest.raises(RequestIdInUse):
            rig.submit(rig.request("r", text="y"))

    def test_each_waits_as_long_as_it_may(self, rig):
        _, short = rig.hold("r", max_wait_s=1.0)
        _, long = rig.hold("r", max_wait_s=9.0)
        rig.pass_time(2)
        assert isinstance(short[0], HoldExpired)
        assert long == []
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        assert isinstance(long[0], Decision)
        assert len(short) == 1

    def test_the_first_call_goes_and_the_retry_stays(self, rig):
        waiter, first = rig.hold("r")
        _, retry = rig.hold("r")
        rig.dispatcher.give_up(waiter)
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        assert first == []
        assert isinstance(retry[0], Decision)

    def test_the_reservation_belongs_to_a_stream_that_is_still_there(self, rig):
        lost, fresh = Owner("p", stream=True), Owner("p", stream=True)
        waiter, _ = rig.hold("r", owner=lost)
        _, retry = rig.hold("r", owner=fresh)
        rig.dispatcher.give_up(waiter)
        rig.ledger.lose_owner(lost, rig.clock.now)
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        reservation = rig.ledger.find(retry[0].reservation_id)
        assert reservation.owner is fresh
        rig.ledger.lose_owner(fresh, rig.clock.now)
        rig.pass_time(11)
        assert rig.is_empty(), "nobody's reservation must not live for ever"

    def test_the_latest_stream_goes_and_the_first_stays(self, rig):
        first, second = Owner("p", stream=True), Owner("p", stream=True)
        _, answers = rig.hold("r", owner=first)
        waiter, _ = rig.hold("r", owner=second)
        rig.dispatcher.give_up(waiter)
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        assert rig.ledger.find(answers[0].reservation_id).owner is first

    def test_two_calls_of_one_owner_share_what_they_got(self, rig):
        _, first = rig.hold("r")
        rig.hold("r")
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        for left in (1, 0):
            rig.dispatcher.give_back(first[0].reservation_id, rig.owner, rig.clock.now)
            assert len(rig.ledger.reservations) == left


class TestOrder:
    def test_higher_priority_first_then_first_come(self):
        rig = Rig(desired_state("gpu_aware", tenants=[Tenant("vip", priority=1)], bindings=[Binding("vip", "all")]))
        rig.endpoints(1)
        rig.full(1)
        order = []
        for name, changes in [("s1", {}), ("b", {"priority": -1}), ("c", {"tenant": "vip"}), ("s2", {})]:
            waiter, _ = rig.hold(name, **changes)
            waiter.answer = lambda outcome, name=name: order.append(name)
        rig.full()
        rig.dispatcher.run_pass(rig.clock.now)
        assert order == ["c", "s1", "s2", "b"]

    def test_one_that_may_go_nowhere_does_not_block_the_others(self, rig):
        _, stuck = rig.hold("stuck", subset=Subset(frozenset(["10.0.0.1"])))
        _, excluding = rig.hold("excluding", excluded=frozenset(["10.0.0.2"]))
        _, free = rig.hold("free")
        rig.full(1)
        rig.dispatcher.run_pass(rig.clock.now)
        assert (stuck, excluding) == ([], [])
        assert rig.where(free[0]) == "2"

    def test_one_whose_pool_is_gone_waits_for_it(self, rig):
        _, answers = rig.hold("r")
        rig.fleet.forget_node("n")
        rig.dispatcher.run_pass(rig.clock.now)
        assert answers == []
        rig.connect("n", spec(1))
        rig.dispatcher.run_pass(rig.clock.now)
        assert rig.where(answers[0]) == "1"

    def test_one_that_breaks_something_fails_alone(self, rig):
        _, poison = rig.hold("poison")
        _, fine = rig.hold("fine")
        rig.full()
        with breaking(lambda work: work.request.request_id == "poison"):
            rig.dispatcher.run_pass(rig.clock.now)
        assert poison[0].reason == "INTERNAL"
        assert isinstance(fine[0], Decision)

    def test_a_pass_is_bounded_but_reaches_all_pools(self, rig):
        for n in range(200):
            rig.hold(f"r{n}", subset=Subset(frozenset(["10.0.0.1"])))
        _, free = rig.hold("free", subset=Subset(frozenset(["10.0.0.2"])))
        rig.full(1)
        rig.dispatcher.run_pass(rig.clock.now)
        assert len(free) == 1


class TestHysteresis:
    def pressure(self, rig, value):
        rig.sample(rig.fleet.nodes["n"], engine_sample(spec(1), kv_use=value))
        return isinstance(rig.submit(rig.request()), Decision)

    def test_memory_pressure_closes_above_80_and_opens_at_75(self):
        rig = Rig(desired_state("gpu_aware"))
        rig.endpoints(1)
        levels = [0.5, 0.79, 0.80, 0.81, 0.79, 0.76, 0.75, 0.79, 0.9]
        assert [self.pressure(rig, level) for level in levels] == [
            True, True, True, False, False, False, True, True, False
        ]  # fmt: skip

    def test_unknown_pressure_is_open(self):
        rig = Rig(desired_state("gpu_aware"))
        rig.endpoints(1)
        assert not self.pressure(rig, 0.9)
        assert self.pressure(rig, Measurement())

    @pytest.mark.parametrize("strategy", ["adaptive", "gpu_aware", "global_least_request", "prefix_match"])
    def test_heat(self, strategy):
        rig = Rig(desired_state(strategy))
        limit = Measurement(100.0)
        rig.connect("n", spec(1, device_uuids=("g",)), devices=[gpu("g", temperature_slowdown_c=limit)])

        def goes(**values):
            rig.sample(rig.fleet.nodes["n"], devices=[device_sample("g", 10, **values)])
            return isinstance(rig.submit(rig.request()), Decision)

        assert [goes(temperature_c=t) for t in (90, 100, 101, 97, 95, 97)] == [True, True, False, False, True, True]
        assert not goes(temperature_c=50, throttle_reasons=["hw_thermal"])
        assert goes(temperature_c=50, throttle_reasons=["sw_power_cap"])

    @pytest.mark.parametrize("strategy", ["round_robin", "random", "least_request", "consistent_hash"])
    def test_the_classics_have_no_guards(self, strategy):
        rig = Rig(desired_state(strategy))
        rig.endpoints(2)
        rig.full(1, 2)
        rig.route()
