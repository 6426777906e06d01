"""Whatever is asked, whoever asks: nobody is placed outside their groups, and nobody sees another's prefixes."""

from dataclasses import replace

from fakes.rig import Rig, desired_state, engine_sample, spec
from headway_scheduler.admission.holds import Waiter
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, BindingMode, GpuGroup, Model, Split, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.report import Finished, Outcome, ReportStatus, ServedBy
from headway_scheduler.domain.request import Subset
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.values import Owner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

NUMBERS = st.integers(1, 5)
TENANTS = ("a", "b", "c")
TIERS = ("gold", "tin", "lead")
NAMES = st.builds(
    lambda n, form: form.format(n), NUMBERS, st.sampled_from(["10.0.0.{}:8000@0", "10.0.0.{}:8000", "10.0.0.{}"])
)


def number_of(placement):
    return int(placement.spec.address.split(":")[0].rpartition(".")[2])


class Placement(RuleBasedStateMachine):
    """Tenants, groups by label and by name, every mode; what changes among them; and all that can be named."""

    @initialize(strategy=st.sampled_from(["gpu_aware", "adaptive", "round_robin"]))
    def start(self, strategy):
        groups = [GpuGroup(tier, selector={"tier": tier}) for tier in TIERS] + [
            GpuGroup("named", endpoints=(spec(1).id,))
        ]
        splits = (Split("x", 1.0, selector={"tier": "gold"}), Split("y", 2.0, selector={"tier": "tin"}))
        self.rig = Rig(
            desired_state(
                strategy,
                tenants=[Tenant(t) for t in TENANTS],
                groups=groups,
                models={"m": Model("m"), "s": Model("s", splits=splits)},
            )
        )
        self.bindings, self.count = {}, 0
        self.labels = dict.fromkeys(range(1, 6), "gold")
        for number in self.labels:
            self.announce(number)
        self.owner = Owner("p", stream=True)
        self.decisions, self.waiters = [], []

    def announce(self, number):
        changes = {"labels": {"tier": self.labels[number]}, "models": ("m", "s")}
        if "n" not in self.rig.fleet.nodes:
            self.rig.connect("n")
        self.rig.fleet.put_endpoint(self.rig.fleet.nodes["n"], spec(number, **changes))

    def allowed(self, tenant):
        """What the words of docs/tenants.md say, in the slowest way."""
        found = set()
        for number in self.labels:
            if spec(number).id not in self.rig.fleet.endpoints:
                continue
            groups = {self.labels[number]} | ({"named"} if number == 1 else set())
            owners = {t for (t, g), mode in self.bindings.items() if mode is BindingMode.DEDICATED and g in groups}
            mine = any((tenant, g) in self.bindings for g in groups)
            if mine and owners <= {tenant}:
                found.add(number)
        return found

    def check(self, decision, tenant):
        placed = {number_of(decision.endpoint), *(number_of(each) for each in decision.fallbacks)}
        if decision.pull_from is not None:
            placed.add(number_of(decision.pull_from.placement))
        assert placed <= self.allowed(tenant), (tenant, placed, self.bindings, self.labels)

    @rule(
        tenant=st.sampled_from(TENANTS),
        group=st.sampled_from([*TIERS, "named"]),
        mode=st.sampled_from([None, *BindingMode]),
    )
    def bind(self, tenant, group, mode):
        self.bindings.pop((tenant, group), None)
        if mode is not None:
            self.bindings[tenant, group] = mode
        bindings = tuple(Binding(t, g, m, order=len(g) % 2) for (t, g), m in self.bindings.items())
        self.rig.desire(bindings=bindings)

    @rule(number=NUMBERS, tier=st.sampled_from(TIERS))
    def relabel(self, number, tier):
        self.labels[number] = tier
        self.announce(number)

    @rule(number=NUMBERS)
    def endpoint_leaves(self, number):
        self.rig.fleet.remove_endpoint(spec(number).id)

    @rule(number=NUMBERS, state=st.sampled_from(SchedulingState))
    def cordon(self, number, state):
        states = {**self.rig.store.desired.endpoint_states, spec(number).id: state}
        self.rig.desire(endpoint_states=states)

    @rule(
        tenant=st.sampled_from(TENANTS),
        model=st.sampled_from("ms"),
        again=st.booleans(),
        excluded=st.frozensets(NAMES, max_size=2),
        named=st.frozensets(NAMES, max_size=3),
        session=st.sampled_from(["", "s1", "s2"]),
        max_wait=st.sampled_from([0.0, 30.0]),
        unsalted=st.booleans(),
    )
    def route(self, tenant, model, again, excluded, named, session, max_wait, unsalted):
        self.count += not again
        request = self.rig.request(
            f"r{self.count}",
            tenant=tenant,
            model=model,
            text="x" * 600,
            excluded=excluded,
            subset=Subset(named) if named else None,
            session_id=session,
            max_wait_s=max_wait,
            cannot_inject_salt=unsalted,
        )
        live = self.rig.ledger.by_request.get(("p", tenant, request.request_id))
        where_it_runs = None if live is None else live.slot
        try:
            outcome = self.rig.submit(request, self.owner)
        except HeadwayError:
            return
        if isinstance(outcome, Waiter):
            outcome.answer = lambda answer: self.settled(outcome, answer, tenant)
            self.waiters.append(outcome)
            return
        stays = live is not None and self.rig.fleet.endpoints[outcome.endpoint.spec.id].slot == where_it_runs
        if not stays:  # a retry of what runs elsewhere by now is still what runs there
            self.check(outcome, tenant)
            if named:
                assert any(name.split(":")[0].endswith(f".{number_of(outcome.endpoint)}") for name in named)
        self.decisions.append((outcome, tenant))

    def settled(self, waiter, answer, tenant):
        if waiter in self.waiters:
            self.waiters.remove(waiter)
        if isinstance(answer, Decision):
            self.check(answer, tenant)
            self.decisions.append((answer, tenant))

    @precondition(lambda self: self.decisions)
    @rule(n=st.integers(0, 999), name=NAMES)
    def fail_over(self, n, name):
        """A data plane says that another endpoint served it: only one of the tenant's own is believed."""
        decision, tenant = self.decisions[n % len(self.decisions)]
        reservation = self.rig.ledger.find(decision.reservation_id)
        before = None if reservation is None else reservation.slot
        status, _ = self.rig.report(decision, ServedBy(name), self.owner)
        if status is ReportStatus.APPLIED:
            assert number_of(self.rig.fleet.by_slot[reservation.slot].placement) in self.allowed(tenant)
        elif reservation is not None:
            assert reservation.slot == before

    @precondition(lambda self: self.decisions)
    @rule(n=st.integers(0, 999), outcome=st.sampled_from(Outcome))
    def finish(self, n, outcome):
        decision, _ = self.decisions.pop(n % len(self.decisions))
        self.rig.report(decision, Finished(outcome), self.owner)

    @rule(use=st.sampled_from([0.1, 0.95]))
    def sample(self, use):
        node = self.rig.fleet.nodes["n"]
        for endpoint in node.endpoints.values():
            self.rig.sample(node, engine_sample(endpoint.spec, kv_use=use))
        self.rig.dispatcher.run_pass(self.rig.clock.now)

    @rule(tenant=st.sampled_from(TENANTS), model=st.sampled_from("ms"), named=st.frozensets(NAMES, max_size=2))
    def explain(self, tenant, model, named):
        """It shows a tenant no endpoint but its own, and never says that another's would be chosen."""
        request = self.rig.request(tenant=tenant, model=model, subset=Subset(named) if named else None)
        for whole in (False, True):
            for row in self.rig.dispatcher.explain(request, "", self.owner, self.rig.clock.now, whole).rows:
                number = number_of(row.endpoint.placement)
                if number not in self.allowed(tenant):
                    assert whole
                    assert row.hard_guards[0] == "not_in_group"
                    assert not row.chosen

    @invariant()
    def views_agree(self):
        """What the fail-open view and discovery say of who may use what is the same."""
        if not hasattr(self, "rig"):
            return
        for tenant in TENANTS:
            allowed = self.allowed(tenant)
            fleet = self.rig.fleet
            assert {
                number_of(e.placement) for e in fleet.endpoints.values() if tenant in fleet.tenants_of(e)
            } == allowed
            assert {number_of(e.placement) for e in fleet.open_to(tenant)} <= allowed


TestPlacement = Placement.TestCase
TestPlacement.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


PROMPTS = [
    base + tail
    for base in ("system " * 150, "other " * 150)
    for tail in ("", "a" * 600, "b" * 600, "a" * 600 + "c" * 600)
]


class NoPollution(RuleBasedStateMachine):
    """Two schedulers get the same requests of tenant a; one of them also any traffic of b, with the very same prompts.

    The requests of a are sent to a named endpoint, so that what b does to the load moves none of them. Nothing is
    learned: how fast an endpoint is, is everybody's to know.
    """

    @initialize(
        strategy=st.sampled_from(["adaptive", "prefix_match", "gpu_aware"]), engine=st.sampled_from(["vllm", "other"])
    )
    def start(self, strategy, engine):
        state = desired_state(
            strategy, tenants=[Tenant("a"), Tenant("b")], bindings=[Binding("a", "all"), Binding("b", "all")]
        )
        self.alone, self.shared = (Rig(state, learn_costs=False, learn_history=False) for _ in range(2))
        for rig in (self.alone, self.shared):
            rig.endpoints(3, engine=engine)
        self.mine, self.theirs, self.count = [], [], 0

    @rule(prompt=st.sampled_from(PROMPTS), number=st.integers(1, 3))
    def a_asks(self, prompt, number):
        self.count += 1
        wanted = {"tenant": "a", "text": prompt, "subset": Subset(frozenset({f"10.0.0.{number}"})), "max_wait_s": 0.0}
        first, second = (rig.route(f"a{self.count}", **wanted) for rig in (self.alone, self.shared))
        assert number_of(first.endpoint) == number_of(second.endpoint) == number
        assert first.why.matched_tokens == second.why.matched_tokens
        assert first.cache_salt == second.cache_salt
        assert first.pull_from == second.pull_from
        if not self.theirs:
            assert first.why.predicted_ttft_ms == second.why.predicted_ttft_ms
        self.mine.append((first, second))

    @precondition(lambda self: self.mine)
    @rule(n=st.integers(0, 999), outcome=st.sampled_from(Outcome))
    def a_ends(self, n, outcome):
        for rig, decision in zip((self.alone, self.shared), self.mine.pop(n % len(self.mine)), strict=True):
            rig.finish(decision, outcome if not outcome.is_endpoints_fault else Outcome.SUCCESS)

    @rule(prompt=st.sampled_from(PROMPTS), number=st.integers(1, 3))
    def b_asks(self, prompt, number):
        subset = Subset(frozenset({f"10.0.0.{number}"}))
        self.theirs.append(self.shared.route(tenant="b", text=prompt, subset=subset, max_wait_s=0.0))

    @precondition(lambda self: self.theirs)
    @rule()
    def all_of_b_ends(self):
        for decision in self.theirs:
            self.shared.finish(decision)
        self.theirs.clear()

    @rule(prompt=st.sampled_from(PROMPTS))
    def a_looks(self, prompt):
        """Explain shows the same hits; and with nothing of b's in flight, the same of everything."""
        first, second = (self.seen(rig, prompt) for rig in (self.alone, self.shared))
        assert [row.matched_tokens for row in first.rows] == [row.matched_tokens for row in second.rows]
        assert first.why.prompt_tokens == second.why.prompt_tokens
        if self.theirs:
            return
        for one, other in zip(first.rows, second.rows, strict=True):
            assert (one.cost, one.predicted_ttft_ms) == (other.cost, other.predicted_ttft_ms)
            assert (one.hard_guards, one.soft_guards) == (other.hard_guards, other.soft_guards)

    def seen(self, rig, prompt):
        return rig.dispatcher.explain(rig.request("look", tenant="a", text=prompt), "", rig.owner, rig.clock.now, False)

    @rule(prompt=st.sampled_from(PROMPTS))
    def demand_is_ones_own(self, prompt):
        """What others in flight share, and what a copy would be worth, never counts b's."""
        found = []
        for rig in (self.alone, self.shared):
            work = rig.dispatcher._work(rig.request("look", tenant="a", text=prompt), rig.owner, rig.clock.now)
            demand = rig.dispatcher.prefixes.demand
            depths, counts = demand.asked(work.chain)
            found.append((demand.shared_tokens(work.chain), list(depths), list(counts)))
        assert found[0] == found[1]


TestNoPollution = NoPollution.TestCase
TestNoPollution.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_shared_domain_shares_on_purpose():
    """The other side: tenants of one domain do see what each other's requests left."""
    tenants = [Tenant("a", isolation_domain="team"), Tenant("b", isolation_domain="team"), Tenant("c")]
    rig = Rig(desired_state("prefix_match", tenants=tenants, bindings=[Binding(t.id, "all") for t in tenants]))
    rig.endpoints(2, engine="vllm")
    first = rig.route(tenant="a", text=PROMPTS[1])
    again = rig.route(tenant="b", text=PROMPTS[1])
    assert number_of(again.endpoint) == number_of(first.endpoint)
    assert again.why.matched_tokens > 0
    assert again.cache_salt == first.cache_salt
    other = rig.route(tenant="c", text=PROMPTS[1])
    assert other.why.matched_tokens == 0
    assert other.cache_salt not in ("", first.cache_salt)
    rig.desire(tenants={**rig.store.desired.tenants, "b": replace(tenants[1], isolation_domain="")})
    assert rig.route(tenant="b", text=PROMPTS[1]).why.matched_tokens == 0
