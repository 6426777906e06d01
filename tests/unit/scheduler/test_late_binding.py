"""Late binding: what waits, for which endpoint, in which order, for how long; and what it leaves behind."""

import heapq
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from fakes.rig import MODEL, Rig, desired_state, engine_sample, spec
from headway_scheduler.admission.holds import Waiter
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, Model, Tenant
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.request import Subset
from headway_scheduler.errors import HoldExpired
from headway_scheduler.fleet.columns import BOOKED
from headway_scheduler.fleet.values import Owner
from headway_scheduler.strategies.adaptive import Adaptive
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

WINDOW_MS = 200.0
MORE_THAN_THE_WINDOW = 3000  # tokens: 228 ms on an A100
PREFIX = "word " * 6400  # 8,000 tokens, 660 ms


def rigged(count, desired=None, *, capacity=None, **config):
    """Endpoints, and a data plane that reports first tokens: nothing is believed done before it says so."""
    rig = Rig(desired or desired_state("adaptive"), **config)
    rig.owner = Owner("p", stream=True, sends_first_token=True)
    room = {} if capacity is None else {"kv_capacity_tokens": Measurement(float(capacity))}
    rig.endpoints(count, **room)
    return rig


def only(number):
    return {"subset": Subset(frozenset([f"10.0.0.{number}"]))}


def pass_now(rig, after=0.0):
    rig.clock.now += after
    rig.dispatcher.advance(rig.clock.now)
    rig.dispatcher.run_pass(rig.clock.now)


def served_in_order(rig, last):
    """Let what is queued finish its prefill, one request after the other, until nobody waits; who came when."""
    order = []
    for hold in list(rig.dispatcher.holds):
        waiter = hold.waiters[0]
        name = hold.work.request.request_id
        waiter.answer = lambda outcome, name=name: order.append((name, outcome))
    while len(rig.dispatcher.holds):
        before = len(order)
        rig.first_token(last)
        pass_now(rig)
        assert len(order) > before, "the line moves on"
        last = order[-1][1]
    return [name for name, _ in order]


def state(rig):
    """All that later decisions depend on."""
    columns = {name: getattr(rig.columns, name).tolist() for name in (*BOOKED, "last_chosen")}
    holds = [(hold.work.key, hold.work.submitted_at, len(hold.waiters)) for hold in rig.dispatcher.holds]
    dispatcher = rig.dispatcher
    return columns, holds, dispatcher.holds.tenants, dispatcher.routes, dispatcher._chooser._random.bit_generator.state


class TestWindow:
    def test_dispatched_only_while_less_than_the_window_is_queued(self):
        rig = rigged(1)
        (slot,) = range(1)
        dispatched = 0
        while isinstance(rig.submit(rig.request(prompt_tokens=500)), Decision):
            dispatched += 1
        queued_ms = rig.columns.prefill_us[slot] / 1e3
        each_ms = queued_ms / dispatched
        assert queued_ms >= WINDOW_MS > queued_ms - each_ms
        assert len(rig.dispatcher.holds) == 1

    def test_a_first_token_lets_the_next_one_in(self):
        rig = rigged(1)
        first = rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
        _, second = rig.hold()
        pass_now(rig)
        assert second == []
        rig.first_token(first)
        pass_now(rig)
        assert [rig.where(answer) for answer in second] == ["1"]

    def test_window_0_never_waits(self):
        rig = rigged(1)
        rig.bind("adaptive", parameters={"window_ms": 0.0})
        for _ in range(5):
            rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)

    @pytest.mark.parametrize("time_scale", [1.0, 4.0])
    def test_it_is_in_the_engines_time(self, time_scale):
        rig = rigged(1, time_scale=time_scale)
        rig.route(prompt_tokens=2500)  # 190 ms of the engine's own
        rig.route(prompt_tokens=2500)
        rig.hold()

    def test_a_call_that_may_not_wait_is_bound_at_once(self):
        rig = rigged(1)
        rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
        assert rig.where(rig.route(max_wait_s=0.0)) == "1"
        rig.hold()
        assert rig.where(rig.route(max_wait_s=0.0)) == "1"
        assert len(rig.dispatcher.holds) == 1

    def test_a_call_that_may_not_wait_goes_where_there_is_room(self):
        rig = rigged(2)
        rig.route(prompt_tokens=MORE_THAN_THE_WINDOW, **only(1))
        rig.hold(**only(1))
        assert rig.where(rig.route(max_wait_s=0.0)) == "2"


class TestAffinity:
    @pytest.fixture
    def rig(self):
        """Two endpoints; one of them, busy now, holds the prefix."""
        rig = rigged(2)
        rig.finish(rig.route(text=PREFIX))
        rig.home = rig.where(rig.submit(rig.request(text=PREFIX + "warm")))
        rig.other = "21"[int(rig.home) - 1]
        for reservation in list(rig.ledger.reservations.values()):
            rig.ledger.first_token(reservation, rig.clock.now)
        rig.busy = rig.route(prompt_tokens=MORE_THAN_THE_WINDOW, **only(rig.home))
        return rig

    def test_a_hold_waits_for_its_best_though_another_is_free(self, rig):
        _, mine = rig.hold("mine", text=PREFIX + "mine")
        pass_now(rig, after=0.1)
        assert mine == []
        rig.first_token(rig.busy)
        pass_now(rig)
        assert rig.where(mine[0]) == rig.home
        assert mine[0].why.matched_tokens > 7000

    def test_one_that_prefers_the_free_one_passes_it(self, rig):
        _, mine = rig.hold("mine", text=PREFIX + "mine")
        assert rig.where(rig.route(prompt_tokens=2000)) == rig.other
        assert mine == []

    def test_it_changes_its_mind_when_waiting_costs_more(self, rig):
        _, mine = rig.hold("mine", text=PREFIX + "mine")
        rig.ledger.move(
            rig.ledger.find(rig.busy.reservation_id),
            [
                structs.replace(
                    leg, booking=structs.replace(leg.booking, prefill_us=5_000_000, prefill_work_us=5_000_000)
                )
                for leg in self.legs(rig)
            ],
            rig.clock.now,
        )
        pass_now(rig)
        assert rig.where(mine[0]) == rig.other

    @staticmethod
    def legs(rig):
        return rig.ledger.find(rig.busy.reservation_id).legs

    def test_those_behind_see_the_queue_that_they_will_meet(self, rig):
        """Each of them alone would wait for the prefix; together they would wait for longer than a prefill takes."""
        answers = [rig.submit(rig.request(f"m{n}", text=f"{PREFIX}{n} " + "x " * 2000)) for n in range(12)]
        elsewhere = [answer for answer in answers if isinstance(answer, Decision)]
        assert elsewhere
        assert {rig.where(answer) for answer in elsewhere} == {rig.other}
        assert any(isinstance(answer, Waiter) for answer in answers)

    def test_its_endpoint_goes_and_it_goes_elsewhere(self, rig):
        _, mine = rig.hold("mine", text=PREFIX + "mine")
        rig.fleet.remove_endpoint(f"10.0.0.{rig.home}:8000@0")
        pass_now(rig)
        assert rig.where(mine[0]) == rig.other


class TestOvertaking:
    @pytest.fixture
    def rig(self):
        """One endpoint with KV room for 5,000 tokens more, and one request ahead of the line that needs 6,000."""
        desired = desired_state("adaptive", tenants=[Tenant("vip", priority=1)], bindings=[Binding("vip", "all")])
        rig = rigged(1, desired, capacity=10_000)
        rig.running = rig.route(prompt_tokens=4744)
        rig.first_token(rig.running)
        _, rig.ahead = rig.hold("ahead", tenant="vip", prompt_tokens=6000)
        return rig

    def test_nobody_behind_takes_the_endpoint_that_one_waits_for(self, rig):
        _, behind = rig.hold("behind")
        pass_now(rig)
        assert (rig.ahead, behind) == ([], [])

    def test_tenants_and_models_share_one_line(self):
        desired = desired_state(
            "adaptive",
            tenants=[Tenant("vip", priority=1), Tenant("other")],
            bindings=[Binding("vip", "all"), Binding("other", "all")],
            models={name: Model(name) for name in (MODEL, "second")},
        )
        rig = Rig(desired)
        rig.owner = Owner("p", stream=True, sends_first_token=True)
        rig.connect("n", spec(1, models=(MODEL, "second"), kv_capacity_tokens=Measurement(10_000.0)))
        rig.first_token(rig.route(prompt_tokens=4744))
        _, ahead = rig.hold("ahead", tenant="vip", prompt_tokens=6000)
        request = structs.replace(rig.request("behind", tenant="other"), model="second")
        waiter = rig.submit(request)
        assert isinstance(waiter, Waiter)
        pass_now(rig)
        assert ahead == []

    def test_when_it_goes_the_line_moves_on(self, rig):
        waiter = next(iter(rig.dispatcher.holds)).waiters[0]
        _, behind = rig.hold("behind")
        calls = []
        rig.dispatcher.wake = lambda: calls.append(1)
        rig.dispatcher.give_up(waiter)
        assert calls, "its place is free: somebody must look"
        pass_now(rig)
        assert len(behind) == 1

    def test_room_for_it_and_it_goes_first(self, rig):
        _, behind = rig.hold("behind")
        rig.finish(rig.running)
        pass_now(rig)
        assert len(rig.ahead) == 1
        assert behind == [], "over the window now"

    def test_one_that_waited_long_takes_its_place_in_the_engines_own_queue(self, rig):
        """Room may never be seen by a large request: small ones take it as it comes."""
        pass_now(rig, after=5.0)
        assert rig.ahead == []
        pass_now(rig, after=0.1)
        assert len(rig.ahead) == 1


class TestOrder:
    def line(self, rig, *requests):
        """One endpoint, over its window; then these, each `(name, seconds after the one before, changes)`."""
        last = rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
        for name, after, changes in requests:
            rig.clock.now += after
            rig.hold(name, **changes)
        return last

    def test_shortest_uncached_prefill_first(self):
        rig = rigged(1)
        over = [(f"t{tokens}", 0.0, {"prompt_tokens": tokens}) for tokens in (9000, 3000, 6000)]
        assert served_in_order(rig, self.line(rig, *over)) == ["t3000", "t6000", "t9000"]

    def test_uncached_not_total(self):
        rig = rigged(1)
        rig.finish(rig.route(text=PREFIX))
        cached = {"text": PREFIX + "x " * 5600}  # 8,000 tokens cached, 2,800 not
        last = self.line(rig, ("cold", 0.0, {"prompt_tokens": 4000}), ("warm", 0.0, cached))
        assert served_in_order(rig, last)[0] == "warm"

    @pytest.mark.parametrize(("later_s", "first"), [(1.7, "short"), (2.3, "long")])
    def test_ageing(self, later_s, first):
        """854 ms of prefill against 228: 0.3 ms a ms make up for it in 2.1 s."""
        rig = rigged(1)
        long, short = {"prompt_tokens": 10_000}, {"prompt_tokens": MORE_THAN_THE_WINDOW}
        last = self.line(rig, ("long", 0.0, long), ("short", later_s, short))
        assert served_in_order(rig, last)[0] == first

    @pytest.mark.parametrize(
        ("scale", "later_s", "first"), [(1.0, 6.0, "short"), (1.0, 6.6, "long"), (4.0, 1.6, "long")]
    )
    def test_the_hard_cap_of_three_prefills(self, scale, later_s, first):
        """2.1 s of prefill: by ageing alone it would be passed for 6.4 s; the cap is 3 × that."""
        rig = rigged(1, time_scale=scale)
        tokens = 21_000
        last = self.line(
            rig,
            ("long", 0.0, {"prompt_tokens": tokens}),
            ("short", later_s, {"prompt_tokens": MORE_THAN_THE_WINDOW}),
        )
        assert served_in_order(rig, last)[0] == first

    @pytest.mark.parametrize(("waited_s", "first"), [(4.9, "short"), (5.1, "long")])
    def test_the_hard_cap_of_five_seconds(self, waited_s, first):
        rig = rigged(1)
        long = ("long", 0.0, {"prompt_tokens": 17_000})  # 1.6 s: a cap of 5 s, which ageing alone would reach at 5.3 s
        last = self.line(rig, long, ("short", waited_s, {"prompt_tokens": 100}))
        assert served_in_order(rig, last)[0] == first

    @pytest.mark.parametrize(("waited_s", "first"), [(1.4, "short"), (1.6, "long")])
    def test_half_of_what_it_may_wait_is_a_cap_too(self, waited_s, first):
        rig = rigged(1)
        last = self.line(
            rig,
            ("long", 0.0, {"prompt_tokens": 17_000, "max_wait_s": 3.0}),
            ("short", waited_s, {"prompt_tokens": 100}),
        )
        assert served_in_order(rig, last)[0] == first

    def test_among_those_over_the_cap_the_longest_wait_first(self):
        rig = rigged(1)
        last = self.line(
            rig,
            ("first", 0.0, {"prompt_tokens": 12_000}),
            ("second", 1.0, {"prompt_tokens": MORE_THAN_THE_WINDOW}),
            ("third", 1.0, {"prompt_tokens": 6000}),
        )
        rig.clock.now += 6.0
        assert served_in_order(rig, last) == ["first", "second", "third"]

    def test_priority_above_all(self):
        desired = desired_state("adaptive", tenants=[Tenant("vip", priority=1)], bindings=[Binding("vip", "all")])
        rig = rigged(1, desired)
        last = self.line(
            rig,
            ("waited", 0.0, {"prompt_tokens": MORE_THAN_THE_WINDOW}),
            ("vip", 9.0, {"tenant": "vip", "prompt_tokens": 9000}),
            ("low", 0.0, {"priority": -1, "prompt_tokens": 100}),
        )
        assert served_in_order(rig, last) == ["vip", "waited", "low"]


class TestPass:
    def counted(self, rig, monkeypatch):
        tried = []
        cost = Adaptive.cost

        def counting(strategy, request, view, now):
            tried.append(request.request_id)
            return cost(strategy, request, view, now)

        monkeypatch.setattr(Adaptive, "cost", counting)
        return tried

    def test_is_bounded(self, monkeypatch):
        rig = rigged(1, capacity=10_000)
        rig.dispatcher.config = replace(rig.dispatcher.config, holds_per_pass=3)
        rig.first_token(rig.route(prompt_tokens=9_870))
        for number in range(10):
            rig.hold(f"r{number}", prompt_tokens=100 + number)
        tried = self.counted(rig, monkeypatch)
        pass_now(rig)
        assert tried == ["r0", "r1", "r2"]

    def test_tries_nobody_while_every_endpoint_has_a_window_queued(self, monkeypatch):
        rig = rigged(2)
        first = rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
        rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
        rig.hold("held")
        tried = self.counted(rig, monkeypatch)
        pass_now(rig)
        assert tried == []
        rig.first_token(first)
        pass_now(rig)
        assert tried == ["held"]

    def test_a_pool_with_a_long_line_does_not_use_up_anothers_share(self):
        desired = desired_state("adaptive", models={name: Model(name) for name in (MODEL, "second")})
        rig = Rig(desired)
        rig.owner = Owner("p", stream=True, sends_first_token=True)
        rig.dispatcher.config = replace(rig.dispatcher.config, holds_per_pass=3)
        rig.connect("n", spec(1), spec(2, models=("second",)))
        rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
        for number in range(10):
            rig.hold(f"r{number}")
        decision = rig.submit(structs.replace(rig.request(prompt_tokens=50_000), model="second"))
        assert isinstance(decision, Decision)
        assert rig.where(decision) == "2"


class TestNoTrace:
    def test_a_retry_keeps_the_place_and_the_time_waited(self):
        rig = rigged(1)
        first = rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
        waiter, lost = rig.hold("r")
        rig.clock.now += 2
        _, answers = rig.hold("r")
        rig.dispatcher.give_up(waiter)
        rig.hold("later", prompt_tokens=50)
        rig.first_token(first)
        pass_now(rig, after=1.0)
        assert lost == []
        assert answers[0].why.held_ms == 3000

    OPERATION = st.one_of(
        st.tuples(st.just("arrive"), st.integers(50, 9000)),
        st.tuples(st.just("first_token"), st.integers(0, 50)),
        st.tuples(st.just("finish"), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.integers(1, 3000)),
        st.tuples(st.just("sample"), st.integers(0, 100)),
    )

    @given(st.lists(OPERATION, max_size=30), st.integers(50, 9000), st.lists(OPERATION, max_size=15))
    @settings(max_examples=60, deadline=None)
    def test_cancelled_it_is_as_if_it_never_came(self, before, tokens, after):
        plain, visited = Play(), Play()
        for operation in before:
            plain.do(*operation)
            visited.do(*operation)
        if visited.visit(tokens):
            assert state(visited.rig) == state(plain.rig)
            for operation in after:
                plain.do(*operation)
                visited.do(*operation)
            assert state(visited.rig) == state(plain.rig)
            assert visited.log == plain.log


class Play:
    """Operations on a small fleet; what was decided goes to the log."""

    def __init__(self):
        self.rig, self.log, self.live, self.count = rigged(3, capacity=20_000), [], [], 0

    def do(self, verb, amount):
        rig = self.rig
        if verb == "arrive":
            self.count += 1
            name = f"r{self.count}"
            outcome = rig.submit(rig.request(name, prompt_tokens=amount, max_wait_s=8.0))
            if isinstance(outcome, Decision):
                self._take(name, outcome)
            else:
                outcome.answer = lambda answer: self._take(name, answer)
        elif verb == "wait":
            rig.clock.now += amount / 1e3
        elif verb == "sample":
            rig.sample(
                rig.fleet.nodes["n"], *[engine_sample(spec(number), kv_use=amount / 100) for number in (1, 2, 3)]
            )
        elif self.live:
            decision = self.live[amount % len(self.live)]
            if verb == "finish":
                self.live.remove(decision)
                rig.finish(decision)
            else:
                rig.first_token(decision)
        pass_now(rig)

    def visit(self, tokens):
        """One comes, waits, and goes; False if it need not wait."""
        rig = self.rig
        request = rig.request("visitor", prompt_tokens=tokens)
        waiting = len(rig.dispatcher.holds)
        explained = rig.dispatcher.explain(request, "", rig.owner, rig.clock.now, whole=False)
        if not waiting and not explained.would_hold:
            return False
        outcome = rig.submit(request)
        if isinstance(outcome, Decision):
            return False
        pass_now(rig)
        rig.dispatcher.give_up(outcome)
        pass_now(rig)
        return True

    def _take(self, name, outcome):
        self.log.append((name, self.rig.where(outcome) if isinstance(outcome, Decision) else outcome.reason))
        if isinstance(outcome, Decision):
            self.live.append(outcome)


@dataclass
class Served:
    """One request of the property test below. Times in seconds."""

    name: str
    tokens: int
    arrived: float
    answered: float | None = None
    urgent_at: float = float("inf")
    ahead: int = 0


@dataclass
class Fleet:
    """Engines that prefill one request after another, each at its own pace, which the scheduler does not know."""

    paces: list
    rig: Rig = None
    free_at: list = field(default_factory=list)
    events: list = field(default_factory=list)
    requests: list = field(default_factory=list)
    serial: int = 0

    def __post_init__(self):
        self.rig = rigged(len(self.paces))
        self.rig.dispatcher.wake = lambda: None
        self.free_at = [0.0] * len(self.paces)

    def push(self, at, what, *details):
        self.serial += 1
        heapq.heappush(self.events, (at, self.serial, what, details))

    def arrive(self, tokens):
        rig = self.rig
        found = Served(f"r{len(self.requests)}", tokens, rig.clock.now)
        self.requests.append(found)
        outcome = rig.submit(rig.request(found.name, prompt_tokens=tokens, max_wait_s=3600.0))
        if isinstance(outcome, Decision):
            self.start(found, outcome)
        else:
            outcome.answer = lambda answer: self.start(found, answer)

    def start(self, found, decision):
        assert isinstance(decision, Decision)
        rig = self.rig
        found.answered = rig.clock.now
        slot = rig.slot(int(rig.where(decision)))
        prefill_s = rig.ledger.find(decision.reservation_id).legs[0].booking.prefill_us / 1e6
        begin = max(rig.clock.now, self.free_at[slot])
        self.free_at[slot] = begin + prefill_s * self.paces[slot]
        self.push(self.free_at[slot], "first_token", decision)
        self.push(self.free_at[slot] + 2.0, "finish", decision)

    def run(self):
        rig = self.rig
        while self.events:
            rig.clock.now, _, what, details = heapq.heappop(self.events)
            rig.dispatcher.advance(rig.clock.now)
            if what == "arrive":
                self.arrive(*details)
            elif what == "first_token":
                rig.first_token(*details)
            elif what == "finish":
                rig.finish(*details)
            rig.dispatcher.run_pass(rig.clock.now)
            self.note_urgent()
            assert {name: getattr(rig.columns, name).tolist() for name in BOOKED} == {
                name: column.tolist() for name, column in rig.ledger.recompute().items()
            }
            if len(rig.dispatcher.holds) and (not self.events or self.events[0][0] > rig.clock.now + 0.25):
                self.push(rig.clock.now + 0.25, "tick")

    def note_urgent(self):
        """Who has just become urgent, and how many older ones still wait."""
        now = self.rig.clock.now
        waiting = [each for each in self.requests if each.answered is None]
        for place, each in enumerate(waiting):
            if each.urgent_at == float("inf") and now - each.arrived > max(5.0, 3 * prefill_s(each.tokens)):
                each.urgent_at, each.ahead = now, place


def prefill_s(tokens):
    """Alone on an A100 with nothing cached, as the scheduler believes."""
    return (0.0666 * tokens + 2.8e-6 * tokens * tokens / 2 + 9.8 * max(1.0, tokens / 2048)) / 1e3


ARRIVALS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5]), st.sampled_from([60, 400, 3000, 9000, 30_000])),
    min_size=1,
    max_size=60,
)


@given(st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=1, max_size=3), ARRIVALS)
@settings(max_examples=60, deadline=None)
def test_every_hold_ends_in_bounded_time(paces, arrivals):
    """FIELD.md's cap, made a bound.

    Over the cap (5 s, or 3 of its prefills) a hold is passed by nobody younger: only the older ones go before it, and
    nobody at all is given the endpoint that the first in line waits for. So the first in line waits at most for one
    endpoint to work off what it has: the window and the largest prefill. With `ahead` older ones waiting at that
    moment, a hold ends within cap + (ahead + 1) × (window + largest prefill) × slowest pace, and a tick of 250 ms.
    """
    fleet = Fleet(paces)
    at = fleet.rig.clock.now
    for gap, tokens in arrivals:
        at += gap
        fleet.push(at, "arrive", tokens)
    fleet.run()
    assert all(each.answered is not None for each in fleet.requests)
    longest = max(prefill_s(each.tokens) for each in fleet.requests)
    step = (WINDOW_MS / 1e3 + longest) * max(paces)
    for each in fleet.requests:
        if each.urgent_at < float("inf"):
            assert each.answered <= each.urgent_at + (each.ahead + 1) * step + 0.25
    assert fleet.rig.is_empty()
    assert np.all(fleet.rig.columns.external == 0)


def test_it_expires_where_the_line_is_longer_than_it_may_wait():
    rig = rigged(1)
    rig.route(prompt_tokens=MORE_THAN_THE_WINDOW)
    _, answers = rig.hold(max_wait_s=2.0)
    pass_now(rig, after=2.0)
    assert isinstance(answers[0], HoldExpired)
    assert not len(rig.dispatcher.holds)
