"""Whatever happens in whatever order, the columns are what the reservations add up to, and each ends once."""

from collections import Counter

import numpy as np
from fakes.rig import Rig, desired_state, engine_sample, spec
from headway_scheduler.admission.holds import Waiter
from headway_scheduler.domain.desired import Binding, GpuGroup, Tenant
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, Progress, ReportStatus, ServedBy
from headway_scheduler.domain.request import TaskClass
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.columns import BOOKED
from headway_scheduler.fleet.ledger import EndCause
from headway_scheduler.fleet.values import Owner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

NUMBERS = st.integers(1, 4)
GROUPS = {"a": {1, 2}, "b": {2, 3, 4}}


def number_of(endpoint):
    return int(endpoint.spec.address.split(":")[0].rpartition(".")[2])


class Reservations(RuleBasedStateMachine):
    """Two tenants, four endpoints, streams and a unary caller, and a strategy that holds when memory is full."""

    @initialize(strategy=st.sampled_from(["gpu_aware", "gpu_aware", "adaptive", "round_robin"]))
    def start(self, strategy):
        groups = [GpuGroup(t, endpoints=tuple(spec(n).id for n in sorted(ns))) for t, ns in GROUPS.items()]
        bindings = [Binding(t, t) for t in GROUPS]
        self.rig = Rig(desired_state(strategy, tenants=[Tenant(t) for t in GROUPS], groups=groups, bindings=bindings))
        self.rig.endpoints(4)
        self.ends, self.begun, self.count = Counter(), set(), 0
        self.rig.ledger.on_end.append(lambda r, cause, now: self.ends.update([r.id]))
        self.streams = [Owner("p", stream=True), Owner("p", stream=True)]
        self.unary = Owner("p", stream=False)
        self.decisions, self.waiters, self.lost = [], [], []
        self.owner_of = {}

    def owners(self):
        return [self.unary, *self.streams]

    def answered(self, outcome, owner):
        if not isinstance(outcome, HeadwayError):
            self.begun.add(outcome.reservation_id)
            self.decisions.append(outcome)
            self.owner_of[outcome.reservation_id] = owner

    @rule(
        tenant=st.sampled_from("ab"),
        who=st.integers(0, 2),
        again=st.integers(-4, 5),
        tokens=st.integers(0, 5000),
        task=st.sampled_from(TaskClass),
        excluded=st.sets(NUMBERS, max_size=2),
        max_wait=st.sampled_from([0.0, 2.0, 30.0]),
    )
    def route(self, tenant, who, again, tokens, task, excluded, max_wait):
        if again >= 0:
            self.count += 1
        owner = self.owners()[who]
        request = self.rig.request(
            f"r{max(0, self.count + min(again, 0))}",
            tenant=tenant,
            prompt_tokens=tokens,
            text=None,
            task_class=task,
            excluded=frozenset(f"10.0.0.{n}" for n in excluded),
            max_wait_s=max_wait,
        )
        try:
            outcome = self.rig.submit(request, owner)
        except HeadwayError:
            return
        if isinstance(outcome, Waiter):
            outcome.answer = lambda answer: self.settled(outcome, answer)
            self.waiters.append(outcome)
        else:
            assert number_of(outcome.endpoint) in GROUPS[tenant]
            assert number_of(outcome.endpoint) not in excluded
            self.answered(outcome, owner)

    def settled(self, waiter, answer):
        self.waiters.remove(waiter)
        self.answered(answer, waiter.owner)

    def pick(self, n):
        return self.decisions[n % len(self.decisions)]

    @precondition(lambda self: self.decisions)
    @rule(
        n=st.integers(0, 1000),
        event=st.one_of(
            st.just(FirstToken()),
            st.builds(FirstToken, st.floats(0, 1e5)),
            st.just(Progress()),
            st.builds(Finished, st.sampled_from(Outcome)),
            st.builds(lambda number: ServedBy(f"10.0.0.{number}:8000"), NUMBERS),
        ),
        who=st.integers(0, 2),
        times=st.integers(1, 2),
    )
    def report(self, n, event, who, times):
        decision = self.pick(n)
        live = self.rig.ledger.find(decision.reservation_id) is not None
        statuses = [self.rig.report(decision, event, self.owners()[who])[0] for _ in range(times)]
        if not live:
            assert set(statuses) <= {ReportStatus.DUPLICATE, ReportStatus.UNKNOWN}

    @precondition(lambda self: self.decisions)
    @rule(n=st.integers(0, 1000))
    def cancel(self, n):
        decision = self.pick(n)
        self.rig.dispatcher.give_back(
            decision.reservation_id, self.owner_of[decision.reservation_id], self.rig.clock.now
        )

    @precondition(lambda self: self.waiters)
    @rule(n=st.integers(0, 1000))
    def give_up(self, n):
        waiter = self.waiters.pop(n % len(self.waiters))
        self.rig.dispatcher.give_up(waiter)

    @rule(which=st.integers(0, 1))
    def lose_stream(self, which):
        owner, self.streams[which] = self.streams[which], Owner("p", stream=True)
        for waiter in [w for w in self.waiters if w.owner is owner]:
            self.waiters.remove(waiter)
            self.rig.dispatcher.give_up(waiter)
        self.rig.ledger.lose_owner(owner, self.rig.clock.now)

    @precondition(lambda self: self.decisions)
    @rule(n=st.integers(0, 1000), who=st.integers(0, 2))
    def resume(self, n, who):
        reservation = self.rig.ledger.find(self.pick(n).reservation_id)
        if reservation is not None:
            self.rig.ledger.adopt(reservation, self.owners()[who], self.rig.clock.now)

    @precondition(lambda self: self.decisions)
    @rule(n=st.integers(0, 1000), who=st.integers(0, 2))
    def recreate(self, n, who):
        """What a holder announces after this scheduler gave it up for lost."""
        rig, decision = self.rig, self.pick(n)
        endpoint = rig.fleet.find(decision.endpoint.spec.id)
        if endpoint is None or rig.ledger.ended(decision.reservation_id, "p") in (None, EndCause.REPORTED):
            return
        if rig.ledger.find(decision.reservation_id) is not None:
            return
        tenant = "a" if number_of(decision.endpoint) == 1 else "b"
        owner = self.owners()[who]
        request = rig.request(f"resumed-{len(self.begun)}", tenant=tenant)
        reservation = rig.dispatcher.restore(request, Tenant(tenant), owner, endpoint, 10, rig.clock.now)
        rig.ledger.succeed(decision.reservation_id, reservation)
        self.begun.add(reservation.id)
        self.owner_of[reservation.id] = owner

    @rule(seconds=st.sampled_from([0.01, 0.2, 3.0, 12.0, 400.0]))
    def time_passes(self, seconds):
        self.rig.pass_time(seconds, step=max(0.25, seconds / 4))

    @rule(number=NUMBERS)
    def endpoint_leaves(self, number):
        self.rig.fleet.remove_endpoint(spec(number).id)

    @rule(number=NUMBERS, boot=st.sampled_from(["", "x", "y"]))
    def endpoint_comes_or_restarts(self, number, boot):
        self.rig.fleet.put_endpoint(self.rig.fleet.nodes["n"], spec(number, engine_boot_id=boot))

    @rule(use=st.sampled_from([0.1, 0.95, 0.95]), running=st.integers(0, 9), ready=st.booleans())
    def sample(self, use, running, ready):
        node = self.rig.fleet.nodes["n"]
        for endpoint in node.endpoints.values():
            self.rig.sample(node, engine_sample(endpoint.spec, running, 0, use, ready))

    @rule()
    def run_pass(self):
        self.rig.dispatcher.run_pass(self.rig.clock.now)

    @invariant()
    def columns_are_what_reservations_add_up_to(self):
        if not hasattr(self, "rig"):
            return
        for name, total in self.rig.ledger.recompute().items():
            column = getattr(self.rig.columns, name)
            assert np.array_equal(column, total), name
            assert (column >= 0).all(), name
        for reservation in self.rig.ledger.reservations.values():
            assert reservation.slot in self.rig.fleet.by_slot

    @invariant()
    def each_ends_at_most_once_and_is_live_until_then(self):
        if not hasattr(self, "rig"):
            return
        assert set(self.ends.values()) <= {1}
        assert self.begun - set(self.ends) == set(self.rig.ledger.reservations)

    @invariant()
    def somebody_answers_for_each(self):
        """Its owner knows it, or time ends it: nothing leaks."""
        if not hasattr(self, "rig"):
            return
        for reservation in self.rig.ledger.reservations.values():
            if reservation.owner is None or not reservation.owner.stream:
                assert reservation.expires_at is not None
            if reservation.owner is not None:
                assert reservation.owner in self.owners()
                assert reservation.id in reservation.owner.reservations
        for owner in self.owners():
            assert owner.reservations <= set(self.rig.ledger.reservations)
        inflight = Counter(r.tenant for r in self.rig.ledger.reservations.values())
        assert inflight == self.rig.ledger.tenant_inflight
        assert len(self.rig.dispatcher.holds) == len({waiter.hold for waiter in self.waiters})

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        for waiter in self.waiters:
            self.rig.dispatcher.give_up(waiter)
        for owner in self.owners():
            self.rig.ledger.lose_owner(owner, self.rig.clock.now)
        for node in self.rig.fleet.nodes.values():
            for endpoint in node.endpoints.values():
                self.rig.sample(node, engine_sample(endpoint.spec, 0))
        self.rig.pass_time(11, step=1)
        assert self.rig.is_empty()
        assert set(self.ends) == self.begun
        for name in BOOKED:
            assert not getattr(self.rig.columns, name).any(), name


TestReservations = Reservations.TestCase
TestReservations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
