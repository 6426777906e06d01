"""Reports: idempotent, and each teaches what it can."""

import contextlib

import pytest
from fakes.rig import CHAT, LONG, NO_USAGE, Rig, desired_state, spec
from headway_scheduler.domain.desired import Binding, GpuGroup, Tenant
from headway_scheduler.domain.report import Outcome, Progress, ReportStatus, Usage
from headway_scheduler.errors import AllUnhealthy
from headway_scheduler.fleet.values import Owner

APPLIED, DUPLICATE = (ReportStatus.APPLIED, ""), (ReportStatus.DUPLICATE, "")
UNKNOWN = (ReportStatus.UNKNOWN, "")
FAULTS = [Outcome.SERVER_ERROR, Outcome.CONNECT_ERROR, Outcome.TIMEOUT]


@pytest.fixture
def rig():
    rig = Rig(desired_state("adaptive"))
    rig.endpoints(4)
    return rig


class TestIdempotency:
    def test_each_counts_once(self, rig):
        decision = rig.route()
        assert rig.first_token(decision) == APPLIED
        assert rig.first_token(decision) == DUPLICATE
        assert rig.progress(decision) == APPLIED
        assert rig.progress(decision) == APPLIED
        assert rig.finish(decision) == APPLIED
        for again in (rig.finish, rig.progress, rig.first_token):
            assert again(decision) == DUPLICATE
        assert rig.served_by(decision, "10.0.0.2:8000") == DUPLICATE
        assert rig.is_empty()

    def test_usage_is_recorded_once(self, rig):
        decision = rig.route()
        for _ in range(3):
            rig.finish(decision, usage=Usage(100, 20, 60))
        (row,) = rig.recorded()
        assert (row.requests, row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (1, 100, 20, 60)

    def test_of_another_principal_it_is_unknown(self, rig):
        decision, stranger = rig.route(), Owner("stranger", stream=False)
        assert rig.report(decision, Progress(), stranger) == UNKNOWN
        assert rig.finish(decision, owner=stranger) == UNKNOWN
        assert rig.ledger.reservations
        rig.finish(decision)
        assert rig.finish(decision, owner=stranger) == UNKNOWN, "also what it was"

    def test_what_never_was_is_unknown(self, rig):
        assert rig.scheduler.reporting.apply(rig.owner, "s1.e0.1", Progress(), 0.0) == UNKNOWN

    def test_an_orphans_holder_speaks_up_again(self, rig):
        stream = Owner("p", stream=True)
        decision = rig.route(owner=stream)
        rig.ledger.lose_owner(stream, rig.clock.now)
        assert rig.progress(decision) == APPLIED
        rig.pass_time(60, step=5)
        assert rig.ledger.reservations


class TestServedBy:
    def test_moves_it(self, rig):
        decision = rig.route("r", text="hello " * 100)
        assert rig.where(decision) == "1"
        assert rig.served_by(decision, "10.0.0.3:8000@0") == APPLIED
        assert rig.served_by(decision, "10.0.0.3:8000") == DUPLICATE
        assert rig.counts(rig.slot(1))["inflight"] == 0
        assert rig.counts(rig.slot(3))["inflight"] == 1
        again = rig.route("r", text="hello " * 100)
        assert rig.where(again) == "3", "a retry is told where it is now"
        assert again.endpoint not in again.fallbacks
        assert rig.scheduler.index.blocks(rig.slot(3)) == 2
        rig.finish(decision)
        assert rig.is_empty()

    def test_by_the_address_of_a_rank_it_is_on_already(self):
        rig = Rig()
        rig.connect("n", spec(1, dp_rank=1), spec(1))
        decision = next(d for d in (rig.route(), rig.route()) if d.endpoint.spec.dp_rank == 1)
        assert rig.served_by(decision, "10.0.0.1:8000") == DUPLICATE
        assert rig.counts(rig.fleet.endpoints["10.0.0.1:8000@1"].slot)["inflight"] == 1

    @pytest.mark.parametrize("name", ["10.0.0.9:8000", "nonsense", "10.0.0.2:8000", ""])
    def test_outside_the_tenants_groups_is_invalid(self, name):
        group = GpuGroup("g", endpoints=("10.0.0.1:8000@0", "10.0.0.3:8000@0"))
        rig = Rig(desired_state(tenants=[Tenant("a")], groups=[group], bindings=[Binding("a", "g")]))
        rig.endpoints(3)
        decision = rig.route(tenant="a")
        status, detail = rig.served_by(decision, name)
        assert status is ReportStatus.INVALID
        assert detail.startswith("served_by.endpoint: ")
        assert rig.counts(rig.slot(1))["inflight"] == 1
        assert rig.served_by(decision, "10.0.0.3:8000") == APPLIED

    def test_it_speaks_against_the_endpoint_that_was_left(self, rig):
        for _ in range(5):
            decision = rig.route(excluded=frozenset({"10.0.0.2", "10.0.0.3", "10.0.0.4"}))
            rig.served_by(decision, "10.0.0.2:8000")
            rig.finish(decision)
        assert rig.fleet.hard_guards(rig.fleet.endpoints["10.0.0.1:8000@0"]) == ["ejected"]

    def test_an_endpoint_that_left_takes_its_reservations_along(self, rig):
        decision = rig.route()
        rig.fleet.remove_endpoint(decision.endpoint.spec.id)
        assert rig.is_empty()
        assert rig.served_by(decision, "10.0.0.3:8000") == DUPLICATE


class TestEjection:
    def fail(self, rig, outcome, times, only="1"):
        others = frozenset(f"10.0.0.{n}" for n in range(1, 5) if str(n) != only)
        for _ in range(times):
            rig.finish(rig.route(excluded=others), outcome)

    def guards(self, rig, number):
        return rig.fleet.hard_guards(rig.fleet.endpoints[f"10.0.0.{number}:8000@0"])

    @pytest.mark.parametrize("outcome", FAULTS)
    def test_five_in_a_row_eject_it_for_a_while(self, rig, outcome):
        self.fail(rig, outcome, 4)
        assert self.guards(rig, 1) == []
        self.fail(rig, outcome, 1)
        assert self.guards(rig, 1) == ["ejected"]
        assert "1" not in {rig.where(rig.route()) for _ in range(12)}
        rig.clock.now += 5
        rig.fleet.sweep(rig.clock.now)
        assert self.guards(rig, 1) == []
        self.fail(rig, outcome, 1)
        assert self.guards(rig, 1) == ["ejected"], "back on probation, one more is enough"
        rig.clock.now += 5
        rig.fleet.sweep(rig.clock.now)
        assert self.guards(rig, 1) == ["ejected"], "and for longer"

    @pytest.mark.parametrize("outcome", [Outcome.CLIENT_ERROR, Outcome.CANCELLED])
    def test_a_requests_own_fault_never_does(self, rig, outcome):
        self.fail(rig, outcome, 30)
        assert self.guards(rig, 1) == []

    def test_a_success_in_between_starts_anew(self, rig):
        for _ in range(3):
            self.fail(rig, Outcome.SERVER_ERROR, 4)
            self.fail(rig, Outcome.SUCCESS, 1)
        assert self.guards(rig, 1) == []

    def test_what_was_sent_before_does_not_let_it_back_in(self, rig):
        others = frozenset({"10.0.0.2", "10.0.0.3", "10.0.0.4"})
        early = rig.route(excluded=others)
        self.fail(rig, Outcome.SERVER_ERROR, 5)
        rig.finish(early, Outcome.SUCCESS)
        assert self.guards(rig, 1) == ["ejected"]
        assert not rig.columns.open[rig.slot(1)]
        rig.clock.now += 5
        rig.fleet.sweep(rig.clock.now)
        assert rig.columns.open[rig.slot(1)]

    def test_never_more_than_half(self, rig):
        for number in "1234":
            self.fail(rig, Outcome.SERVER_ERROR, 5, only=number)
        assert sum(bool(self.guards(rig, n)) for n in range(1, 5)) == 2
        rig.route()

    def test_nor_more_than_half_of_one_models(self):
        rig = Rig()
        rig.connect("n", spec(1), spec(2), *[spec(n, models=("other",)) for n in range(3, 30)])
        for number in ("1", "2"):
            other = frozenset({"10.0.0.1", "10.0.0.2"} - {f"10.0.0.{number}"})
            for _ in range(9):
                with contextlib.suppress(AllUnhealthy):  # the first of the two, once it is ejected
                    rig.finish(rig.route(excluded=other), Outcome.CONNECT_ERROR)
        assert len([n for n in (1, 2) if self.guards(rig, n)]) == 1

    def test_the_only_one_stays(self):
        rig = Rig()
        rig.endpoints(1)
        for _ in range(20):
            rig.finish(rig.route(), Outcome.CONNECT_ERROR)
        assert self.guards(rig, 1) == []

    def test_expiry_goes_on_while_guards_are_frozen(self, rig):
        self.fail(rig, Outcome.SERVER_ERROR, 5)
        rig.clock.now += 6
        rig.fleet.sweep(rig.clock.now)
        assert rig.fleet.guards_frozen
        assert self.guards(rig, 1) == []


class TestLearning:
    def serve(self, rig, slower, usage=NO_USAGE, **request):
        """A request whose first token takes `slower` times what was predicted, and that ends a second later."""
        decision = rig.route(**request)
        ttft_ms = decision.why.predicted_ttft_ms * slower
        rig.clock.now += ttft_ms / 1e3
        rig.first_token(decision, ttft_ms=ttft_ms)
        rig.clock.now += 1.0
        rig.finish(decision, usage=usage, duration_ms=ttft_ms + 1000.0)
        return decision

    def test_first_tokens_teach_the_endpoints_speed(self):
        rig = Rig(desired_state("adaptive"))
        (slot,) = rig.endpoints(1)
        before = rig.columns.tok_ms[slot]
        for _ in range(3):
            self.serve(rig, 2.0, prompt_tokens=1000)
        assert rig.columns.tok_ms[slot] > 1.3 * before

    def test_the_first_of_two_counts(self):
        rig, twice = Rig(desired_state("adaptive")), Rig(desired_state("adaptive"))
        for each in (rig, twice):
            each.endpoints(1)
        for _ in range(3):
            self.serve(rig, 2.0, prompt_tokens=1000)
            decision = twice.route(prompt_tokens=1000)
            ttft_ms = decision.why.predicted_ttft_ms * 2
            twice.clock.now += ttft_ms / 1e3
            twice.first_token(decision, ttft_ms=ttft_ms)
            twice.clock.now += 1.0
            twice.first_token(decision, ttft_ms=1e9)
            twice.finish(decision, duration_ms=ttft_ms + 1000.0)
        assert rig.scheduler.costs.dump() == twice.scheduler.costs.dump()

    def test_so_does_a_ttft_that_comes_with_the_end(self, rig):
        before = rig.columns.tok_ms[rig.slot(1)]
        decision = rig.route(prompt_tokens=1000)
        rig.clock.now += 1.0
        rig.finish(decision, ttft_ms=decision.why.predicted_ttft_ms * 2)
        assert rig.columns.tok_ms[rig.slot(1)] > before

    def test_costs_not_to_be_learned_stay(self):
        rig = Rig(desired_state("adaptive"), learn_costs=False, learn_history=False)
        (slot,) = rig.endpoints(1)
        before = rig.columns.tok_ms[slot]
        for _ in range(60):
            self.serve(rig, 3.0, Usage(1000, 50, 0), prompt_tokens=1000)
        assert rig.columns.tok_ms[slot] == before
        assert rig.scheduler.history.expected_output("default", "m", CHAT, None) == 256

    def test_one_that_met_a_queue_teaches_nothing(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(1)
        rig.route(prompt_tokens=1000)
        before = rig.columns.tok_ms[rig.slot(1)]
        rig.first_token(rig.route(prompt_tokens=1000), ttft_ms=9999.0)
        assert rig.columns.tok_ms[rig.slot(1)] == before

    def test_nor_one_that_was_moved(self, rig):
        decision = rig.route(prompt_tokens=1000)
        rig.served_by(decision, "10.0.0.2:8000")
        before = rig.columns.tok_ms[rig.slot(2)]
        rig.first_token(decision, ttft_ms=9999.0)
        assert rig.columns.tok_ms[rig.slot(2)] == before

    def test_output_lengths_and_speed(self, rig):
        history = rig.scheduler.history
        for _ in range(50):
            decision = rig.route(task_class=LONG)
            rig.first_token(decision, ttft_ms=1000.0)
            rig.finish(decision, usage=Usage(100, 400, 0), duration_ms=9000.0)
        assert history.expected_output("default", "m", LONG, None) == 400
        assert history.expected_output("default", "m", LONG, 50) == 50
        assert history.seconds_per_token("m") == pytest.approx(8.0 / 400), "without the time to the first token"

    def test_bytes_a_token(self, rig):
        for _ in range(200):
            rig.finish(rig.route(text="x" * 600), usage=Usage(200, 1, 0))
        assert rig.scheduler.history.bytes_per_token("m") == pytest.approx(3.0, abs=0.01)
        rig.finish(rig.route(text="x" * 600), usage=Usage(1, 1, 0))
        assert rig.scheduler.history.bytes_per_token("m") == pytest.approx(3.0, abs=0.01), "nonsense is not believed"

    def test_failures_teach_no_lengths(self, rig):
        rig.finish(rig.route(task_class=LONG), Outcome.SERVER_ERROR, Usage(100, 1, 0), duration_ms=1.0)
        assert rig.scheduler.history.expected_output("default", "m", LONG, None) == 800

    def test_what_a_cancelled_one_used_is_recorded(self, rig):
        rig.finish(rig.route(), Outcome.CANCELLED, Usage(100, 50, 0))
        rig.finish(rig.route(), Outcome.CANCELLED)
        rig.finish(rig.route(), Outcome.SERVER_ERROR, Usage(100, 50, 0))
        (row,) = rig.recorded()
        assert (row.requests, row.completion_tokens) == (1, 50)

    def test_state_survives_a_restart(self, rig):
        for _ in range(30):
            decision = self.serve(rig, 3.0, Usage(1300, 77, 0), text="x" * 4000)
            slot = rig.fleet.endpoints[decision.endpoint.spec.id].slot
        after = Rig(desired_state("adaptive"))
        after.scheduler.costs.restore(rig.scheduler.costs.dump())
        after.scheduler.history.restore(rig.scheduler.history.dump())
        after.endpoints(4)
        assert after.columns.tok_ms[slot] == rig.columns.tok_ms[slot] > 0.0666
        assert after.scheduler.history.bytes_per_token("m") == rig.scheduler.history.bytes_per_token("m")
        assert after.scheduler.history.dump() == rig.scheduler.history.dump()
