"""Fair share: who competes, what is charged, in which order holds are served, and how unfair it can get."""

import random

import pytest
from fakes.contest import OUTPUT, Contest, HoldLimits, HoldOrder
from fakes.rig import Rig, desired_state, spec
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, BindingMode, DesiredState, GpuGroup, Principal, Role, Tenant
from headway_scheduler.domain.report import Outcome, Usage
from headway_scheduler.errors import AllUnhealthy, HoldExpired, QueueFull, Saturated, Shed
from headway_scheduler.exposition import SchedulerCollector
from headway_scheduler.fleet.arenas import arenas_of
from headway_scheduler.rpc.authentication import LOCAL
from headway_scheduler.rpc.convert.fleet import status_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

WINDOW_S = 0.2
WINDOW_TOKENS = 0.2 / 0.0666e-3  # what an A100 prefills in a window


def competing(*bindings, weights=None, **members):
    """The arenas of these bindings; `members`: the groups of each slot, by its number after `s`."""
    names = {binding.tenant for binding in bindings}
    desired = DesiredState(
        tenants={name: Tenant(name, weight=(weights or {}).get(name, 1.0)) for name in names},
        groups={binding.group: GpuGroup(binding.group) for binding in bindings},
        bindings=bindings,
    )
    return arenas_of(desired, {int(slot[1:]): groups for slot, groups in members.items()})


class TestArenas:
    def test_a_tenant_alone_competes_with_nobody(self):
        found = competing(Binding("a", "g"), s1=["g"])
        assert (found.by_tenant, found.contested) == ({}, frozenset())

    def test_those_that_share_a_group_compete(self):
        found = competing(Binding("a", "g"), Binding("b", "g"), weights={"b": 3.0}, s1=["g"], s2=["other"])
        assert found.contested == {1}
        assert found.by_tenant["a"] is found.by_tenant["b"]
        assert (found.by_tenant["a"].id, found.by_tenant["a"].weights) == ("g", {"a": 1.0, "b": 3.0})

    def test_those_of_groups_that_overlap_compete_there(self):
        found = competing(Binding("a", "g"), Binding("b", "h"), s1=["g"], s2=["g", "h"], s3=["h"])
        assert found.contested == {2}
        assert found.by_tenant["a"] is found.by_tenant["b"]

    def test_a_dedicated_group_is_nobody_elses(self):
        found = competing(
            Binding("a", "gold", BindingMode.DEDICATED),
            Binding("b", "all"),
            Binding("c", "all"),
            s1=["gold", "all"],
            s2=["all"],
        )
        assert found.contested == {2}
        assert set(found.by_tenant) == {"b", "c"}

    def test_those_that_only_burst_into_it_yield(self):
        found = competing(
            Binding("a", "own", BindingMode.DEDICATED),
            Binding("a", "g", BindingMode.BURST),
            Binding("b", "g"),
            s1=["own"],
            s2=["g"],
        )
        assert found.contested == {2}
        assert found.by_tenant["b"].yielding == {"a"}

    def test_others_in_between_make_one_arena(self):
        found = competing(
            Binding("a", "g"), Binding("b", "g"), Binding("b", "h"), Binding("c", "h"), s1=["g"], s2=["h"]
        )
        assert found.by_tenant["a"] is found.by_tenant["c"]

    def test_groups_apart_are_two(self):
        bindings = [Binding(tenant, group) for tenant, group in ("ag", "bg", "ch", "dh")]
        found = competing(*bindings, s1=["g"], s2=["h"])
        assert {tenant: arena.id for tenant, arena in found.by_tenant.items()} == {
            "a": "g",
            "b": "g",
            "c": "h",
            "d": "h",
        }

    def test_a_bindings_own_weight_counts_there(self):
        found = competing(Binding("a", "g", weight=5.0), Binding("b", "g"), weights={"a": 2.0, "b": 3.0}, s1=["g"])
        assert found.by_tenant["a"].weights == {"a": 5.0, "b": 3.0}

    def test_they_follow_labels_and_bindings_live(self):
        rig = Rig(desired_state(tenants=[Tenant("a"), Tenant("b")], groups=[GpuGroup("g", selector={"x": "y"})],
                                bindings=[Binding("a", "g"), Binding("b", "g")]))  # fmt: skip
        rig.connect("n", spec(1))
        assert rig.fleet.arenas().by_tenant == {}
        rig.connect("m", spec(2), labels={"x": "y"})
        assert set(rig.fleet.arenas().by_tenant) == {"a", "b", "default"}
        rig.desire(bindings=(Binding("a", "g"),))
        assert rig.fleet.arenas().by_tenant == {}


def backlogged(contest, sizes, depth=6, seed=0, outputs=(OUTPUT,)):
    """Keep every tenant backlogged with requests of these sizes; what was dispatched, in order."""
    dice, log = random.Random(seed), []

    def more(tenant):
        contest.send(tenant, dice.choice(sizes), dice.choice(outputs))

    def dispatched(sent):
        log.append(sent)
        contest.at(contest.now, lambda: more(sent.tenant))

    contest.on_dispatch = dispatched
    for tenant in contest.tenants:
        for _ in range(depth):
            more(tenant)
    return log


def widest_gap(log, weights, first, second):
    """The most that the two tenants' service over weight differs in any interval of the log."""
    gap = least = most = 0.0
    for sent in log:
        if sent.tenant in (first, second):
            gap += sent.service / weights[sent.tenant] * (1 if sent.tenant == first else -1)
            least, most = min(least, gap), max(most, gap)
    return most - least


class TestBound:
    @settings(max_examples=25, deadline=None)
    @given(
        sizes=st.lists(st.integers(50, 8000), min_size=1, max_size=4),
        weights=st.sampled_from([(1.0, 3.0), (1.0, 1.0), (0.5, 4.0)]),
        endpoints=st.integers(1, 3),
        seed=st.integers(0, 9),
    )
    def test_in_every_interval_service_is_as_the_weights_within_a_window_and_a_request(
        self, sizes, weights, endpoints, seed
    ):
        by_tenant = dict(zip("ab", weights, strict=True))
        contest = Contest(by_tenant, endpoints)
        log = backlogged(contest, sizes, seed=seed)
        contest.run(4.0)
        assert contest.waiting("a")
        assert contest.waiting("b")
        most = max(sent.service for sent in log)
        window = endpoints * contest.fair.weights.service(WINDOW_TOKENS, 0, OUTPUT)
        allowed = most * sum(1 / weight for weight in weights) + window / min(weights)
        backlog = [sent for sent in log if sent.dispatched_at > 0]
        assert widest_gap(backlog, by_tenant, "a", "b") <= allowed + 1e-6

    def test_one_to_three(self):
        contest = Contest({"a": 1.0, "b": 3.0}, 2)
        log = backlogged(contest, [100, 500, 2000])
        contest.run(30.0)
        got = {name: sum(sent.service for sent in log if sent.tenant == name) for name in "ab"}
        assert got["b"] / got["a"] == pytest.approx(3.0, rel=0.1)

    def test_without_fair_share_it_is_not_so(self):
        """The test above can fail."""
        contest = Contest({"a": 1.0, "b": 3.0}, 2, hold_order=HoldOrder.SHORTEST)
        log = backlogged(contest, [100, 500, 2000])
        contest.run(30.0)
        got = {name: sum(sent.service for sent in log if sent.tenant == name) for name in "ab"}
        assert got["b"] / got["a"] < 1.5

    def test_what_was_expected_wrongly_is_settled(self):
        """One tenant's answers are four times as long as expected, and it gets no more service for that."""
        contest = Contest({"a": 1.0, "b": 1.0}, 1)
        dice, log = random.Random(1), []

        def dispatched(sent):
            log.append(sent)
            contest.at(contest.now, lambda: more(sent.tenant))

        def more(tenant):
            contest.send(tenant, dice.choice([200, 1000]), OUTPUT * 4 if tenant == "a" else OUTPUT)

        contest.on_dispatch = dispatched
        for tenant in "ab" * 6:
            more(tenant)
        contest.run(60.0)
        got = {name: sum(sent.service for sent in log if sent.tenant == name) for name in "ab"}
        assert got["a"] / got["b"] == pytest.approx(1.0, rel=0.1)

    @settings(max_examples=15, deadline=None)
    @given(size=st.integers(50, 6000), flood=st.integers(50, 6000), at=st.floats(0.1, 0.2), endpoints=st.integers(1, 3))
    def test_a_flood_adds_a_window_and_a_request_to_anothers_wait(self, size, flood, at, endpoints):
        alone = Contest({"quiet": 1.0, "flood": 1.0}, endpoints)
        alone.run(at)
        undisturbed = alone.send("quiet", size)
        contest = Contest({"quiet": 1.0, "flood": 1.0}, endpoints)
        for _ in range(60):
            contest.send("flood", flood)
        contest.run(at)
        sent = contest.send("quiet", size)
        contest.run(at + 5.0)
        largest_s = max(size, flood) * 0.1e-3 + 0.02
        assert sent.first_token_at - sent.at <= undisturbed.first_token_at - undisturbed.at + WINDOW_S + 2 * largest_s


class TestIdleness:
    def test_one_that_was_idle_has_no_arrears(self):
        contest = Contest({"a": 1.0, "b": 1.0})
        log = backlogged(contest, [500])
        contest.on_dispatch = lambda sent: (log.append(sent), contest.at(contest.now, lambda: contest.send("a", 500)))
        contest.run(20.0)  # b's few are served, and then a is alone
        assert not contest.waiting("b")
        for _ in range(100):
            contest.send("b", 500)
        before = len(log)
        contest.run(22.0)
        served = [sent.tenant for sent in log[before:]]
        assert abs(served.count("a") - served.count("b")) <= 2
        assert len(served) > 20

    def test_use_of_what_nobody_wanted_is_no_debt(self):
        contest = Contest({"a": 1.0, "b": 1.0})
        for number in range(20):
            contest.run(number * 2.0)
            assert isinstance(contest.send("a", 2000).outcome, Decision)
        contest.send("b", 100)
        shares = {share.tenant: share.ahead for share in contest.fair.shares()}
        assert shares["a"] <= contest.fair.weights.service(2000, 0, OUTPUT)

    def test_nothing_waits_while_there_is_room(self):
        contest = Contest({"a": 1.0, "b": 3.0}, 2)
        for _ in range(50):
            contest.send("a", 4000)
        contest.run(60.0)
        assert not contest.waiting("a")
        assert isinstance(contest.send("a", 4000).outcome, Decision)

    def test_a_charge_of_before_a_rebinding_is_not_settled_on_the_counters_after_it(self):
        both = (Binding("a", "all"), Binding("b", "all"))
        rig = Rig(desired_state("adaptive", tenants=[Tenant("a"), Tenant("b")], bindings=both))
        rig.endpoints(1)
        old = rig.route(tenant="a")
        rig.desire(bindings=both[:1])
        rig.pass_time(2)
        rig.desire(bindings=both)
        new = [rig.route(tenant=tenant) for tenant in "ab"]
        rig.finish(old, outcome=Outcome.SERVER_ERROR)
        assert {share.ahead for share in rig.dispatcher.fair.shares()} == {0.0}, "a was not charged for it here"
        rig.finish(new.pop())
        rig.pass_time(2)
        assert len(rig.dispatcher.fair) == 2, "one of a's is in flight"
        rig.finish(new.pop())
        rig.pass_time(2)
        assert len(rig.dispatcher.fair) == 0

    def test_counters_that_say_nothing_are_forgotten(self):
        names = {f"t{number}": 1.0 for number in range(200)}
        contest = Contest(names)
        for name in names:
            contest.send(name, 500)
        assert len(contest.fair) == 200
        contest.run(60.0)
        contest.run(62.0)
        assert not contest.core.ledger.reservations
        assert len(contest.fair) == 0


class TestOrder:
    def test_priorities_stay_strict(self):
        contest = Contest({"a": 1.0, "b": 100.0})
        contest.send("a", 4000)
        order = []
        contest.on_dispatch = lambda sent: order.append(sent.tenant)
        for _ in range(3):
            contest.send("b", 3000)
        for _ in range(3):
            contest.send("a", 3000, priority=1)
        contest.run(10.0)
        assert order == ["a"] * 3 + ["b"] * 3

    def test_within_a_tenant_the_shortest_is_first(self):
        contest = Contest({"a": 1.0, "b": 1.0})
        contest.send("a", 4000)
        order = []
        contest.on_dispatch = lambda sent: order.append((sent.tenant, sent.tokens))
        for tokens in (3000, 5000, 1000):
            contest.send("a", tokens)
        contest.run(10.0)
        assert order == [("a", 1000), ("a", 3000), ("a", 5000)]

    def test_first_come_first_served_where_that_is_wanted(self):
        contest = Contest({"a": 1.0, "b": 1.0}, hold_order=HoldOrder.ARRIVAL)
        contest.send("a", 4000)
        order = []
        contest.on_dispatch = lambda sent: order.append((sent.tenant, sent.tokens))
        for tenant, tokens in (("a", 5000), ("a", 3000), ("b", 100)):
            contest.send(tenant, tokens)
        contest.run(10.0)
        assert order == [("a", 5000), ("a", 3000), ("b", 100)]

    def test_one_that_may_not_wait_goes_before_others_only_in_its_turn(self):
        contest = Contest({"a": 1.0, "b": 1.0})
        contest.send("a", 4000)
        contest.send("b", 4000)
        refused = contest.send("a", 100, max_wait_s=0.0)
        assert isinstance(refused.outcome, Saturated)
        assert isinstance(contest.send("b", 100, max_wait_s=0.0).outcome, Decision)


class TestSettling:
    @pytest.fixture
    def rig(self):
        rig = Rig(desired_state("adaptive", tenants=[Tenant("other")], bindings=[Binding("other", "all")]))
        rig.endpoints(1)
        return rig

    def service(self, rig):
        return {share.tenant: share.service for share in rig.dispatcher.fair.shares()}["default"]

    def test_what_was_used_counts_with_cached_input_cheaper(self, rig):
        rig.finish(rig.route(), usage=Usage(1000, 50, 600))
        assert self.service(rig) == 400 + 0.1 * 600 + 2 * 50

    @pytest.mark.parametrize("outcome", [Outcome.SERVER_ERROR, Outcome.CONNECT_ERROR, Outcome.CANCELLED])
    def test_what_failed_is_refunded(self, rig, outcome):
        rig.finish(rig.route(), outcome=outcome)
        assert self.service(rig) == 0

    def test_what_was_abandoned_is_refunded(self, rig):
        decision = rig.route()
        rig.dispatcher.give_back(decision.reservation_id, rig.owner, rig.clock.now)
        assert self.service(rig) == 0

    def test_nobody_says_what_became_of_it_so_it_counts_as_expected(self, rig):
        rig.route()
        rig.pass_time(400, step=10)
        assert not rig.ledger.reservations
        assert self.service(rig) == 100 + 2 * OUTPUT

    def test_endpoints_of_ones_own_cost_nothing(self):
        rig = Rig(desired_state("adaptive", tenants=[Tenant("other")]))
        rig.endpoints(1)
        rig.finish(rig.route())
        assert len(rig.dispatcher.fair) == 0


class TestBoundedQueue:
    LIMITS = HoldLimits(count=6, size_bytes=10_000, tenant_count=4, tenant_bytes=5_000)

    @pytest.fixture
    def contest(self):
        """One endpoint that is busy for long."""
        contest = Contest({"a": 1.0, "b": 1.0, "c": 1.0}, hold_limits=self.LIMITS)
        contest.send("a", 100_000)
        return contest

    def test_each_tenant_holds_so_many(self, contest):
        for _ in range(4):
            contest.send("a", 100)
        refused = contest.send("a", 100).outcome
        assert isinstance(refused, QueueFull)
        assert refused.retry_after_s > 0
        assert contest.send("b", 100).outcome is None

    def test_and_so_many_bytes(self, contest):
        contest.send("a", 1000, text="x" * 4000)
        assert isinstance(contest.send("a", 1000, text="y" * 4000).outcome, QueueFull)
        assert contest.send("a", 100, text="z" * 400).outcome is None
        assert contest.send("b", 1000, text="y" * 4000).outcome is None

    def test_all_together_too(self, contest):
        for tenant in "aaabbb":
            contest.send(tenant, 100)
        assert isinstance(contest.send("c", 100).outcome, QueueFull)

    def test_best_effort_gives_its_place_the_newest_first(self, contest):
        held = [contest.send(tenant, 100, priority=-1) for tenant in "aabb"]
        standard = [contest.send("c", 100) for _ in range(3)]
        assert [sent.outcome is None for sent in held] == [True, True, True, False]
        refusal = held[3].outcome
        assert isinstance(refusal, Shed)
        assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "SHED")
        assert refusal.retry_after_s > 0
        assert [sent.outcome for sent in standard] == [None] * 3

    def test_never_for_another_of_best_effort(self, contest):
        for tenant in "aaabbb":
            contest.send(tenant, 100, priority=-1)
        assert isinstance(contest.send("c", 100, priority=-1).outcome, QueueFull)

    def test_a_tenants_own_limit_sheds_its_own(self, contest):
        other = contest.send("b", 100, priority=-1)
        own = [contest.send("a", 100, priority=-1) for _ in range(4)]
        assert contest.send("a", 100).outcome is None
        assert [isinstance(sent.outcome, Shed) for sent in own] == [False, False, False, True]
        assert other.outcome is None

    def test_as_many_as_its_bytes_take(self, contest):
        small = [contest.send("b", 100, text=f"{number}" * 1500, priority=-1) for number in range(3)]
        assert contest.send("b", 1000, text="y" * 3000).outcome is None
        assert [isinstance(sent.outcome, Shed) for sent in small] == [False, True, True]

    def test_nobody_goes_for_one_that_would_not_fit_anyway(self, contest):
        held = [contest.send("a", 100, priority=-1) for _ in range(4)]
        assert isinstance(contest.send("a", 2000, text="y" * 6000).outcome, QueueFull)
        assert [sent.outcome for sent in held] == [None] * 4


class TestRetryAfter:
    def refusal(self, contest, tenant="a"):
        sent = contest.send(tenant, 200_000, max_wait_s=0.001)
        contest.run(contest.now + 0.1)
        assert isinstance(sent.outcome, HoldExpired)
        return sent.outcome.retry_after_s

    def test_follows_the_measured_rate_and_the_line(self):
        waits = []
        for tokens, count in ((1000, 60), (8000, 30)):
            contest = Contest({"a": 1.0})
            for _ in range(count):
                contest.send("a", tokens)
            contest.run(2.0)
            left = contest.waiting("a")
            waits.append(self.refusal(contest) / left)
        assert waits[1] > 3 * waits[0], "each of those ahead takes eight times as long"

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 40), st.floats(0.0, 100.0))
    def test_never_zero_and_bounded(self, held, silent_s):
        contest = Contest({"a": 1.0})
        for _ in range(held + 4):
            contest.send("a", 3000)
        contest.run(silent_s)
        contest.send("a", 50_000)
        assert 0.5 <= self.refusal(contest) <= 45.0

    def test_jittered(self):
        contest = Contest({"a": 1.0})
        for _ in range(20):
            contest.send("a", 50_000)
        assert len({self.refusal(contest) for _ in range(5)}) == 5

    def test_one_pools_pace_is_not_anothers(self):
        own, alone = GpuGroup("own", endpoints=("10.0.0.2:8000@0",)), Binding("b", "own", BindingMode.DEDICATED)
        rig = Rig(desired_state("gpu_aware", tenants=[Tenant("b")], groups=[own], bindings=[alone]))
        rig.endpoints(2)
        for _ in range(50):
            rig.finish(rig.route(tenant="b"))
            rig.clock.now += 0.01
        for _ in range(12):
            rig.finish(rig.route())
            rig.clock.now += 20
        rig.full(1, 2)
        refused = {}
        for tenant in ("default", "b"):
            with pytest.raises(Saturated) as caught:
                rig.submit(rig.request(tenant=tenant, max_wait_s=0.0))
            refused[tenant] = caught.value.retry_after_s
        assert refused["default"] > 5


class TestBusyOrGone:
    def test_all_loaded_is_429_and_none_healthy_503(self):
        rig = Rig(desired_state("gpu_aware"))
        rig.endpoints(2)
        rig.full(1, 2)
        with pytest.raises(Saturated) as busy:
            rig.submit(rig.request(max_wait_s=0.0))
        assert (busy.value.status, busy.value.retry_after_s > 0) == ("RESOURCE_EXHAUSTED", True)
        for endpoint in rig.fleet.endpoints.values():
            endpoint.ready = False
        rig.fleet.refresh_guards(rig.fleet.endpoints.values())
        rig.scheduler.dispatcher.settled_at = 0.0
        with pytest.raises(AllUnhealthy) as gone:
            rig.submit(rig.request(max_wait_s=0.0))
        assert gone.value.status == "UNAVAILABLE"


class TestVisible:
    @pytest.fixture
    def rig(self):
        rig = Rig(desired_state("adaptive", tenants=[Tenant("other", weight=2.0)], bindings=[Binding("other", "all")]))
        rig.endpoints(1)
        rig.finish(rig.route(), usage=Usage(100, 50, 0))
        rig.route(prompt_tokens=20_000)
        rig.hold()
        return rig

    def test_fleet_shows_every_share(self, rig):
        shares = {each.tenant: each for each in status_to_proto(rig.scheduler, "1", LOCAL).shares}
        assert set(shares) == {"tenants/default", "tenants/other"}
        mine = shares["tenants/default"]
        assert (mine.arena, mine.weight, mine.service) == ("gpuGroups/all", 1.0, 200.0)
        assert (mine.holds, mine.reservations) == (1, 1)
        assert shares["tenants/other"].weight == 2.0

    def test_who_may_name_one_tenant_sees_no_others_share(self, rig):
        router = Principal("r", Role.ROUTER, tenants=("other",))
        (share,) = status_to_proto(rig.scheduler, "1", router).shares
        assert share.tenant == "tenants/other"

    def test_metrics_have_so_many_tenants_and_the_others_together(self, rig):
        rig.desire(
            tenants={f"t{number}": Tenant(f"t{number}") for number in range(300)} | rig.store.desired.tenants,
            bindings=(*rig.store.desired.bindings, *(Binding(f"t{number}", "all") for number in range(300))),
        )
        found = {family.name: family for family in SchedulerCollector(rig.scheduler).collect()}
        service = {sample.labels["tenant"]: sample.value for sample in found["headway_tenant_service"].samples}
        assert len(service) == 101
        assert (service["default"], service["_other"]) == (200.0, 0.0)
        held = {sample.labels["tenant"]: sample.value for sample in found["headway_tenant_holds"].samples}
        assert held["default"] == 1


class FairShareMachine(RuleBasedStateMachine):
    """Whatever happens: holds and counters add up, no counter is negative, and the end leaves nothing."""

    def __init__(self):
        super().__init__()
        limits = HoldLimits(count=40, size_bytes=1 << 20, tenant_count=20, tenant_bytes=1 << 19)
        self.contest = Contest({"a": 1.0, "b": 3.0, "c": 0.5}, 2, hold_limits=limits)
        self.sent = []

    @rule(
        tenant=st.sampled_from("abc"),
        tokens=st.integers(1, 8000),
        output=st.integers(0, 2000),
        priority=st.sampled_from([-1, 0, 0, 1]),
        wait=st.sampled_from([0.0, 0.5, 20.0, None]),
    )
    def send(self, tenant, tokens, output, priority, wait):
        self.sent.append(self.contest.send(tenant, tokens, output, priority=priority, max_wait_s=wait))

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds):
        self.contest.run(self.contest.now + seconds)

    @invariant()
    def holds_add_up(self):
        holds = self.contest.core.dispatcher.holds
        waiting = [sent for sent in self.sent if sent.outcome is None]
        assert len(holds) == len(waiting) == sum(holds.tenants.values()) == len(list(holds))
        assert {t: sum(s.tenant == t for s in waiting) for t in {s.tenant for s in waiting}} == holds.tenants
        assert len(holds) <= 40
        assert all(share.ahead >= 0 and share.service >= 0 for share in self.contest.fair.shares())

    @invariant()
    def counters_are_of_tenants(self):
        assert len(self.contest.fair) <= 3

    def teardown(self):
        contest = self.contest
        contest.run(contest.now + 200.0)
        contest.run(contest.now + 2.0)
        assert all(sent.outcome is not None for sent in self.sent), "each is answered"
        assert not contest.core.ledger.reservations
        assert len(contest.fair) == 0


TestFairShareMachine = FairShareMachine.TestCase
TestFairShareMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
