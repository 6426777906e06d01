"""Whatever endpoints do in whatever order: never too many are out, nobody is left without one, and all comes back."""

import contextlib

from fakes.rig import Rig, desired_state, engine_sample, spec
from headway_scheduler.admission.holds import Waiter
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, ServedBy
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.health import Phase
from headway_scheduler.fleet.ledger import EndCause
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

NUMBERS = st.integers(1, 5)
ON_TRIAL = {"ejected", "probing"}


class Health(RuleBasedStateMachine):
    """Five endpoints, each of which fails or serves as told; retries, failovers, and engines that come and go."""

    @initialize(
        strategy=st.sampled_from(["least_request", "adaptive", "round_robin"]),
        share=st.sampled_from([20, 50, 100]),
        probes=st.integers(1, 3),
        after=st.sampled_from(["ejection", "ejection,new,restart", ""]),
    )
    def start(self, strategy, share, probes, after):
        self.rig = Rig(
            desired_state(strategy),
            eject_failures=2,
            eject_min_requests=5,
            eject_max_percent=share,
            eject_probes=probes,
            slow_start_after=after,
            retry_percent=20,
            retry_min=2,
        )
        self.share, self.live, self.waiters, self.ready = share, [], [], dict.fromkeys(range(1, 6), True)
        self.connect()

    def connect(self):
        self.rig.connect("n", *[spec(n, ready=ready) for n, ready in self.ready.items()])

    @rule(excluded=st.sets(NUMBERS, max_size=4), max_wait=st.sampled_from([0.0, 5.0]), times=st.integers(1, 6))
    def route(self, excluded, max_wait, times):
        for _ in range(times):
            request = self.rig.request(excluded=frozenset(f"10.0.0.{n}" for n in excluded), max_wait_s=max_wait)
            with contextlib.suppress(HeadwayError):
                outcome = self.rig.submit(request)
                if isinstance(outcome, Waiter):
                    outcome.answer = self.settled(outcome)
                    self.waiters.append(outcome)
                else:
                    self.live.append(outcome)

    def settled(self, waiter):
        def answer(outcome):
            self.waiters.remove(waiter)
            if not isinstance(outcome, HeadwayError):
                self.live.append(outcome)

        return answer

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 100), outcome=st.sampled_from(Outcome), times=st.integers(1, 6))
    def finish(self, n, outcome, times):
        before = dict(self.rig.fleet.ejections.counts)
        for _ in range(min(times, len(self.live))):
            self.rig.report(self.live.pop(n % len(self.live)), Finished(outcome))
        if not outcome.is_endpoints_fault:
            assert self.rig.fleet.ejections.counts == before

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 100), number=NUMBERS)
    def report(self, n, number):
        decision = self.live[n % len(self.live)]
        self.rig.report(decision, FirstToken(10.0) if n % 2 else ServedBy(f"10.0.0.{number}:8000"))

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 100))
    def try_again(self, n):
        decision = self.live[n % len(self.live)]
        where = self.rig.ledger.find(decision.reservation_id)
        address = self.rig.fleet.by_slot[where.slot].spec.address if where else decision.endpoint.spec.address
        request = self.rig.request(decision.request_id, excluded=frozenset({address}))
        with contextlib.suppress(HeadwayError):
            outcome = self.rig.submit(request)
            if isinstance(outcome, Waiter):
                outcome.answer = self.settled(outcome)
                self.waiters.append(outcome)

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 100))
    def cancel(self, n):
        decision = self.live.pop(n % len(self.live))
        self.rig.dispatcher.give_back(decision.reservation_id, self.rig.owner, self.rig.clock.now)

    @rule(number=NUMBERS, ready=st.booleans())
    def say(self, number, ready):
        if number in self.ready:
            self.ready[number] = ready
            self.rig.sample(self.rig.fleet.nodes["n"], engine_sample(spec(number), ready=ready))

    @rule(number=NUMBERS)
    def come_or_go(self, number):
        if number in self.ready:
            del self.ready[number]
        else:
            self.ready[number] = True
        self.connect()

    @rule(number=NUMBERS)
    def lift(self, number):
        if number in self.ready:
            self.rig.fleet.lift_ejection(self.rig.fleet.endpoints[spec(number).id], self.rig.clock.now)

    @rule(seconds=st.sampled_from([0.25, 1.0, 5.0, 40.0]))
    def wait(self, seconds):
        rig = self.rig
        rig.clock.now += seconds
        rig.sample(rig.fleet.nodes["n"])  # its agent speaks
        rig.dispatcher.advance(rig.clock.now)
        rig.fleet.sweep(rig.clock.now)
        rig.dispatcher.run_pass(rig.clock.now)
        endpoints = list(rig.fleet.endpoints.values())
        out = [e for e in endpoints if e.id in rig.fleet.ejections.out]
        assert len(out) * 100 <= self.share * len(endpoints)
        rig.fleet.sweep(rig.clock.now)  # a pass may have begun a probe
        usable = [e for e in endpoints if ON_TRIAL.issuperset(rig.fleet.hard_guards(e))]
        assert not usable or any(rig.columns.open[e.slot] for e in usable)

    @invariant()
    def the_column_says_what_the_guards_say(self):
        fleet = self.rig.fleet
        for endpoint in fleet.endpoints.values():
            assert self.rig.columns.open[endpoint.slot] == (not fleet.hard_guards(endpoint))

    @invariant()
    def retries_are_those_that_are_under_way(self):
        works = [r.attachment for r in self.rig.ledger.reservations.values()]
        works += [hold.work for hold in self.rig.dispatcher.holds]
        counted = sum(work.retry for work in works)
        assert self.rig.dispatcher.retries.now == ({"m": counted} if counted else {})

    @invariant()
    def probes_are_there_and_few(self):
        ejections, ledger = self.rig.fleet.ejections, self.rig.ledger
        for reservation_id, endpoint_id in ejections._probes.items():
            assert ejections.out[endpoint_id] is Phase.PROBING
            assert ledger.reservations[reservation_id].slot == self.rig.fleet.endpoints[endpoint_id].slot

    @invariant()
    def handicaps_are_known(self):
        columns = self.rig.columns
        assert set(columns.handicap.nonzero()[0].tolist()) == columns.handicapped
        assert (columns.handicap >= 0.0).all()

    def teardown(self):
        """Everything serves again: nothing stays behind."""
        rig = self.rig
        self.ready = dict.fromkeys(range(1, 6), True)
        self.connect()
        for waiter in list(self.waiters):
            rig.dispatcher.give_up(waiter)
        for reservation in list(rig.ledger.reservations.values()):  # also those that two calls share
            rig.ledger.end(reservation, EndCause.CANCELLED, rig.clock.now)
        self.live = []
        assert rig.dispatcher.retries.now == {}
        for _ in range(60):
            for decision in self.live:
                rig.report(decision, Finished(Outcome.SUCCESS))
            self.live = []
            rig.clock.now += 5.0
            rig.sample(rig.fleet.nodes["n"])
            rig.dispatcher.advance(rig.clock.now)
            rig.fleet.sweep(rig.clock.now)
            rig.dispatcher.run_pass(rig.clock.now)
            for name in list(rig.fleet.ejections.out):
                others = frozenset(rig.fleet.endpoints) - {name}
                with contextlib.suppress(HeadwayError):
                    self.live.append(rig.route(excluded=others, max_wait_s=0.0))
        assert rig.fleet.ejections.out == {}
        assert not rig.columns.handicapped
        assert rig.dispatcher.retries.now == {}


TestHealth = Health.TestCase
TestHealth.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
