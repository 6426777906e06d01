"""The record: what was decided, what each candidate looked like then, what came of it; bounded, blind to others."""

from dataclasses import replace

import pytest
from fakes.rig import Rig, desired_state, engine_sample, spec
from headway.fleet.v1 import fleet_pb2 as pb
from headway_scheduler.domain.desired import GpuGroup, Principal, Role, Tenant
from headway_scheduler.domain.report import Outcome, Usage
from headway_scheduler.errors import HeadwayError, InvalidField, UnknownResource
from headway_scheduler.metrics.counts import Counts
from headway_scheduler.record.entry import IN_FLIGHT, REFUSED
from headway_scheduler.record.recorder import observe
from headway_scheduler.record.ring import ENTRY_BYTES, Filter, Record, RecordConfig
from headway_scheduler.rpc.decisions import Decisions
from hypothesis import given
from hypothesis import strategies as st

ADMIN = Principal("a", Role.ADMIN)
TEXT = "All work and no play makes Jack a dull boy. " * 100


def rig_of(count=3, strategy="adaptive", **config):
    rig = Rig(desired_state(strategy), **config)
    rig.endpoints(count)
    return rig


class TestWhatIsRemembered:
    def test_a_decision_in_flight(self):
        rig = rig_of()
        decision = rig.route("r1", text=TEXT, session_id="s")
        (entry,) = rig.scheduler.record.newest(10)
        assert (entry.request.request_id, entry.request.session_id) == ("r1", "s")
        assert entry.decision is decision
        assert entry.outcome == IN_FLIGHT and not entry.is_over
        assert entry.request.prompt is None

    def test_every_candidate_as_it_was_then(self):
        rig = rig_of()
        explained = rig.dispatcher.explain(rig.request(text=TEXT), "", rig.owner, rig.clock.now, False)
        decision = rig.route("r1", text=TEXT)
        costs = {row.endpoint.id: row.cost for row in explained.rows}
        (entry,) = rig.scheduler.record.newest(1)
        for _ in range(5):
            rig.route(text=TEXT)  # what follows changes columns and costs, and nothing of what was recorded
        candidates = entry.candidates()
        assert {each.endpoint: each.cost for each in candidates} == costs
        assert [each.endpoint for each in candidates if each.chosen] == [decision.endpoint.spec.id]
        assert [each.cost for each in candidates] == sorted(costs.values())
        assert all(each.predicted_ttft_ms > 0 for each in candidates)

    def test_matched_tokens_of_each(self):
        rig = rig_of()
        first = rig.route("r1", text=TEXT)
        rig.finish(first, usage=Usage(1100, 10, 0), duration_ms=10.0)
        rig.route("r2", text=TEXT)
        entry = rig.scheduler.record.find("r2")
        matched = {each.endpoint: each.matched_tokens for each in entry.candidates()}
        assert matched.pop(first.endpoint.spec.id) > 900
        assert set(matched.values()) == {0}

    def test_soft_guards_at_that_moment(self):
        rig = rig_of(strategy="gpu_aware")
        rig.full(1)
        rig.route("r1")
        rig.full()
        rig.pass_time(3)
        entry = rig.scheduler.record.find("r1")
        guards = {each.endpoint: each.soft_guards for each in entry.candidates()}
        assert guards.pop("10.0.0.1:8000@0") == ("memory_pressure",)
        assert set(guards.values()) == {()}

    def test_no_room_for_this_prompt(self):
        rig = Rig(desired_state("adaptive"))
        rig.connect("n", spec(1), spec(2))
        rig.columns.kv_capacity[:2] = 10_000.0
        full, roomy = engine_sample(spec(1), running=9, kv_use=0.99), engine_sample(spec(2), running=3, kv_use=0.1)
        rig.sample(rig.fleet.nodes["n"], full, roomy)
        rig.route("r1", prompt_tokens=5_000)
        guards = {each.endpoint: each.soft_guards for each in rig.scheduler.record.find("r1").candidates()}
        assert guards == {"10.0.0.1:8000@0": ("kv_room",), "10.0.0.2:8000@0": ()}

    def test_names_stay_when_a_slot_is_given_to_another(self):
        rig = rig_of(2)
        rig.route("r1")
        rig.connect("n", spec(1), spec(9))
        rig.route("r2")
        then, now = ({each.endpoint for each in rig.scheduler.record.find(name).candidates()} for name in ("r1", "r2"))
        assert then == {"10.0.0.1:8000@0", "10.0.0.2:8000@0"}
        assert now == {"10.0.0.1:8000@0", "10.0.0.9:8000@0"}


class TestWhatCameOfIt:
    def test_as_reported(self):
        rig = rig_of()
        decision = rig.route("r1", text=TEXT)
        rig.first_token(decision, 81.5)
        rig.finish(decision, usage=Usage(1100, 40, 512), duration_ms=900.0)
        entry = rig.scheduler.record.find(decision.reservation_id)
        assert (entry.outcome, entry.ttft_ms, entry.duration_ms) == ("success", 81.5, 900.0)
        assert (entry.usage.completion_tokens, entry.served_by, entry.moved) == (40, decision.endpoint.spec.id, False)
        assert entry.ended_at >= entry.at

    def test_moved(self):
        rig = rig_of()
        decision = rig.route("r1")
        other = decision.fallbacks[0].spec.id
        rig.served_by(decision, other)
        rig.finish(decision, Outcome.CANCELLED)
        entry = rig.scheduler.record.find("r1")
        assert (entry.moved, entry.served_by, entry.endpoint) == (True, other, decision.endpoint.spec.id)

    @pytest.mark.parametrize("cause", ["expired", "endpoint_gone", "cancelled"])
    def test_unreported(self, cause):
        rig = rig_of(1)
        decision = rig.route("r1")
        if cause == "expired":
            rig.pass_time(10_000, step=100.0)
        elif cause == "endpoint_gone":
            rig.connect("n")
        else:
            rig.dispatcher.give_back(decision.reservation_id, rig.owner, rig.clock.now)
        assert rig.scheduler.record.find("r1").outcome == cause

    def test_refused_at_once(self):
        rig = Rig()
        rig.pass_time(10)
        with pytest.raises(HeadwayError):
            rig.submit(rig.request("r1", text=TEXT))
        (entry,) = rig.scheduler.record.newest(5)
        assert (entry.outcome, entry.refusal.reason, entry.endpoint) == (REFUSED, "NO_ENDPOINTS", "")
        assert entry.request.prompt is None and entry.candidates() is None

    def test_refused_after_a_hold(self):
        rig = rig_of(1, strategy="gpu_aware")
        rig.full(1)
        _, answers = rig.hold("r1", max_wait_s=2.0)
        rig.pass_time(3)
        entry = rig.scheduler.record.find("r1")
        assert entry.refusal.reason == answers[0].reason == "HOLD_EXPIRED"
        assert entry.refusal.held_ms >= 2000

    def test_a_hold_that_was_served_says_how_long_it_was_held(self):
        rig = rig_of(1, strategy="gpu_aware")
        rig.full(1)
        rig.hold("r1")
        rig.pass_time(2)
        rig.full()
        rig.pass_time(4)
        entry = rig.scheduler.record.find("r1")
        assert entry.decision.why.held_ms >= 2000 and entry.candidates()


class TestBounds:
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 40))
    def test_count_and_bytes(self, pools, entries, kilobytes):
        rig = Rig(desired_state("round_robin"), record_decisions=0)
        rig.endpoints(12)
        config = RecordConfig(entries, 2 * ENTRY_BYTES * entries + kilobytes * 100)
        record = Record(config)
        observe(rig.scheduler.core, record, Counts(), lambda: 0.0, lambda: 0.0)
        for count in pools:
            keep = frozenset(f"10.0.0.{number}:8000@0" for number in range(count + 1, 13))
            rig.route(excluded=keep)
        kept = record.newest(1000)
        assert len(kept) == min(entries, len(pools)) == len(record)
        assert record.size_bytes <= config.size_bytes
        tables = [entry.table is not None for entry in kept]
        assert tables == sorted(tables, reverse=True)  # those of the oldest went first

    def test_a_flood_of_refusals_leaves_decisions_be(self):
        rig = rig_of(1, record_decisions=5)
        rig.route("r1")
        rig.desire(groups={"all": GpuGroup("all", all=False)})
        for _ in range(50):
            with pytest.raises(HeadwayError):
                rig.submit(rig.request())
        assert rig.scheduler.record.find("r1") is not None
        assert len(rig.scheduler.record) == 6

    def test_off(self):
        rig = rig_of(record_decisions=0)
        rig.finish(rig.route("r1"))
        assert len(rig.scheduler.record) == 0
        assert rig.scheduler.counts.series["default", "m"].outcomes == {"success": 1}


class TestFilters:
    def rig(self):
        rig = Rig(desired_state("round_robin", tenants=(Tenant("acme"),)))
        rig.desire(bindings=(*rig.store.desired.bindings, replace(rig.store.desired.bindings[0], tenant="acme")))
        rig.endpoints(2)
        return rig

    def test_each_part(self):
        rig = self.rig()
        decision, other = rig.route("r1"), rig.route("r2", tenant="acme")
        rig.finish(decision)
        record = rig.scheduler.record

        def names(**wanted):
            return [entry.request.request_id for entry in record.newest(10, Filter(**wanted))]

        assert names() == ["r2", "r1"]
        assert names(tenant="acme") == ["r2"]
        assert names(model="other") == []
        assert names(endpoint=other.endpoint.spec.id) == ["r2"]
        assert names(outcome="success") == ["r1"]
        assert names(refused=True) == []
        assert names(refused=False) == ["r2", "r1"]
        assert names(tenants=frozenset({"default"})) == ["r1"]
        assert names(since=record.find("r2").at) == ["r2"]
        assert names(since=2e9 * 10) == []

    def test_pages_cover_all_once_whatever_comes_meanwhile(self):
        rig = self.rig()
        for number in range(25):
            rig.route(f"r{number}")
        decisions = Decisions(rig.scheduler.record)
        seen, token = [], ""
        while True:
            page = decisions.list_page(pb.ListDecisionsRequest(page_size=10, page_token=token), ADMIN)
            seen += [each.request_id for each in page.decisions]
            rig.route()
            token = page.next_page_token
            if not token:
                break
        assert seen == [f"r{number}" for number in reversed(range(25))]

    def test_a_token_belongs_to_its_filter(self):
        rig = self.rig()
        rig.route(), rig.route()
        decisions = Decisions(rig.scheduler.record)
        token = decisions.list_page(pb.ListDecisionsRequest(page_size=1), ADMIN).next_page_token
        with pytest.raises(InvalidField):
            decisions.list_page(
                pb.ListDecisionsRequest(page_token=token, filter=pb.DecisionFilter(tenant="acme")), ADMIN
            )

    def test_a_tenants_viewer_sees_its_own_only(self):
        rig = self.rig()
        rig.route("r1", text=TEXT), rig.route("r2", tenant="acme", text=TEXT)
        decisions, viewer = Decisions(rig.scheduler.record), Principal("v", Role.VIEWER, tenants=("acme",))
        (listed,) = decisions.list_page(pb.ListDecisionsRequest(), viewer).decisions
        assert listed.request_id == "r2"
        with pytest.raises(UnknownResource):
            decisions.get(pb.GetDecisionRequest(id="r1"), viewer)
        # What it sees of its own says nothing of the same text that another tenant sent before it.
        shown = decisions.get(pb.GetDecisionRequest(id="r2"), viewer).decision
        assert {each.matched_tokens for each in shown.candidates} == {0}
        assert shown.decision.matched_tokens == 0

    def test_not_there(self):
        decisions = Decisions(Record())
        for name, error in (("", InvalidField), ("r1", UnknownResource)):
            with pytest.raises(error):
                decisions.get(pb.GetDecisionRequest(id=name), ADMIN)


class TestWatch:
    def watch(self, rig, **wanted):
        from headway_scheduler.rpc.decisions import _Watch

        return _Watch(rig.scheduler.record, Filter(**wanted), 1.0)

    def test_what_is_new_and_then_what_came_of_it(self):
        rig = rig_of()
        rig.route("before")
        watch = self.watch(rig)
        decision = rig.route("r1")
        (first,) = watch.news(outcomes=True).decisions
        assert (first.request_id, first.outcome) == ("r1", "in_flight")
        assert not watch.news(outcomes=True).decisions
        rig.finish(decision)
        (last,) = watch.news(outcomes=True).decisions
        assert (last.number, last.outcome) == (first.number, "success")

    def test_a_slow_reader_is_told_what_it_lost(self):
        rig = rig_of(1, strategy="round_robin", record_decisions=600)
        watch = self.watch(rig)
        for _ in range(1000):
            rig.finish(rig.route())
        news = watch.news(outcomes=False)
        assert (len(news.decisions), news.lost) == (500, 500)
        assert watch.news(outcomes=False) == pb.WatchDecisionsResponse()

    def test_a_share_is_about_that_share(self):
        rig = rig_of(1, strategy="round_robin")
        from headway_scheduler.rpc.decisions import _Watch

        watch = _Watch(rig.scheduler.record, Filter(), 0.25)
        for _ in range(400):
            rig.finish(rig.route())
        assert 60 <= len(watch.news(outcomes=False).decisions) <= 140
