"""Each strategy's formula, on states computed by hand."""

import numpy as np
import pytest
from fakes.rig import CHAT, LONG, SHORT, Rig, desired_state, device_sample, engine_sample, gpu, spec
from headway_scheduler.domain.desired import StrategyConfig
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.request import BlocksPrompt
from headway_scheduler.learning.history import classify, task_weight


def costs(rig, strategy, request=None):
    """Cost by endpoint number."""
    explanation = rig.dispatcher.explain(request or rig.request(), strategy, rig.owner, rig.clock.now, whole=True)
    assert explanation.why.strategy == strategy, explanation.why
    return {int(rig.where_of(row.endpoint)): row.cost for row in explanation.rows}


def test_the_articles_example():
    """A has 5 long tasks (15 units), B has 10 short ones (10 units): the next goes to B."""
    rig = Rig(desired_state("global_least_request"))
    rig.endpoints(2)
    a, b = rig.slot(1), rig.slot(2)
    for _ in range(5):
        rig.route(task_class=LONG, excluded=frozenset({"10.0.0.2"}))
    for _ in range(10):
        rig.route(task_class=SHORT, excluded=frozenset({"10.0.0.1"}))
    assert (rig.columns.inflight[a], rig.columns.inflight[b]) == (5, 10)
    assert costs(rig, "global_least_request") == {1: 15.0, 2: 10.0}
    decision = rig.route(task_class=CHAT)
    assert rig.where(decision) == "2"
    assert decision.why.strategy == "global_least_request"
    assert decision.why.task_weight == 1.5


class TestTaskClasses:
    @pytest.mark.parametrize(
        ("hint", "max_tokens", "prompt", "expected"),
        [
            (None, None, 10, CHAT),
            (None, 64, 10, SHORT),
            (None, 65, 10, CHAT),
            (None, 511, 10, CHAT),
            (None, 512, 10, LONG),
            (None, None, 4095, CHAT),
            (None, None, 4096, LONG),
            (None, 64, 9999, SHORT),
            (LONG, 1, 1, LONG),
            (SHORT, 9999, 9999, SHORT),
        ],
    )
    def test_classify(self, hint, max_tokens, prompt, expected):
        assert classify(hint, max_tokens, prompt) is expected

    def test_weights(self):
        assert [task_weight(each) for each in (SHORT, CHAT, LONG)] == [1.0, 1.5, 3.0]


class TestClassics:
    def test_round_robin_rotates(self):
        rig = Rig(desired_state("round_robin"))
        rig.endpoints(3)
        assert [rig.where(rig.route()) for _ in range(6)] == ["1", "2", "3"] * 2

    def test_round_robin_keeps_rotating_when_a_node_joins(self):
        rig = Rig(desired_state("round_robin"))
        rig.endpoints(3)
        for _ in range(4):
            rig.route()
        rig.connect("n2", spec(4))
        assert [rig.where(rig.route()) for _ in range(8)] == ["4", "2", "3", "1"] * 2

    def test_least_request(self):
        rig = Rig(desired_state("least_request"))
        node = rig.connect("n", spec(1), spec(2))
        rig.sample(node, engine_sample(spec(1), 3))
        assert costs(rig, "least_request") == {1: 3, 2: 0}
        assert [rig.where(rig.route()) for _ in range(3)] == ["2"] * 3

    def test_equal_costs_rotate(self):
        rig = Rig(desired_state("least_request"))
        rig.endpoints(4)
        seen = []
        for _ in range(8):
            decision = rig.route()
            seen.append(rig.where(decision))
            rig.finish(decision)
        assert seen == ["1", "2", "3", "4"] * 2

    def test_random_is_even_and_seeded(self):
        def chosen(seed):
            rig = Rig(desired_state("random"), seed=seed)
            rig.endpoints(4)
            return [rig.where(rig.route()) for _ in range(400)]

        assert chosen(1) == chosen(1)
        assert chosen(1) != chosen(2)
        assert min(np.unique(chosen(1), return_counts=True)[1]) > 60


class TestConsistentHash:
    def rig(self, count=8):
        rig = Rig(desired_state("consistent_hash"))
        rig.endpoints(count)
        return rig

    def once(self, rig, **changes):
        decision = rig.route(**changes)
        rig.finish(decision)
        return rig.where(decision)

    def test_the_same_session_goes_to_the_same_endpoint(self):
        rig = self.rig()
        assert len({self.once(rig, session_id="s") for _ in range(10)}) == 1
        assert len({self.once(rig, session_id=f"s{n}") for n in range(60)}) == 8

    def test_without_a_session_the_prompts_head_counts(self):
        rig = self.rig()
        assert self.once(rig, text="x" * 100 + "a") == self.once(rig, text="x" * 100 + "b")
        assert len({self.once(rig, text=f"{n} prompt") for n in range(60)}) == 8
        blocks = [self.once(rig, prompt=BlocksPrompt("tokens-xxh3-128", (7, n))) for n in range(5)]
        assert len(set(blocks)) == 1

    def test_tenants_are_apart(self):
        rig = self.rig()
        by_domain = {self.once(rig, session_id="s", domain=f"tenant/{n}") for n in range(40)}
        assert len(by_domain) > 4

    def test_a_few_keys_move_when_an_endpoint_joins(self):
        rig = self.rig(8)
        before = [self.once(rig, session_id=f"s{n}") for n in range(200)]
        rig.connect("n2", spec(9))
        moved = [(a, self.once(rig, session_id=f"s{n}")) for n, a in enumerate(before)]
        changed = [new for old, new in moved if new != old]
        assert set(changed) == {"9"}
        assert len(changed) < 60

    def test_load_is_bounded(self):
        rig = self.rig(4)
        for _ in range(40):
            rig.route(session_id="s")
        loads = rig.columns.inflight[[rig.slot(n) for n in range(1, 5)]]
        assert loads.sum() == 40
        assert loads.max() <= 41 / 4 * 1.25 + 1
        assert loads.min() > 0

    def test_at_low_load_too(self):
        rig = self.rig(4)
        first, second = rig.route(session_id="s"), rig.route(session_id="s")
        assert rig.where(first) != rig.where(second), "1 > (1 + 1) / 4 · 1.25"


class TestGpuAware:
    def rig(self, **levels):
        """Endpoints with one GPU each: number → (memory, utilisation, heat, power), None: unknown."""
        rig = Rig(desired_state("gpu_aware"))
        limits = {"power_limit_w": Measurement(100.0), "temperature_slowdown_c": Measurement(100.0)}
        specs = [spec(int(n[1:]), device_uuids=(n,)) for n in levels]
        node = rig.connect("n", *specs, devices=[gpu(n, **limits) for n in levels])
        samples = []
        for n, (memory, utilization, heat, power) in levels.items():
            values = {"utilization": utilization, "temperature_c": heat, "power_w": power}
            known = {name: value for name, value in values.items() if value is not None}
            used = {} if memory is None else {"used": memory}
            samples.append(device_sample(n, **used, **known))
        rig.sample(node, devices=samples)
        return rig

    def test_the_water_level(self):
        rig = self.rig(e1=(50, 0.5, 50, 50), e2=(20, 1.0, 80, 10))
        assert costs(rig, "gpu_aware") == pytest.approx({1: 2.0 + 1.0 + 0.5 + 0.5, 2: 0.8 + 2.0 + 0.8 + 0.1})

    def test_our_own_requests_count_at_once(self):
        rig = self.rig(e1=(50, 0.5, 50, 50), e2=(50, 0.5, 50, 50))
        assert [rig.where(rig.route()) for _ in range(4)] == ["1", "2", "1", "2"]

    def test_unknown_is_neither_preferred_nor_starved(self):
        rig = self.rig(e1=(20, 0.2, 20, 20), e2=(60, 0.6, 60, 60), e3=(None, None, None, None))
        found = costs(rig, "gpu_aware")
        assert found[1] < found[3] < found[2]

    def test_all_unknown_is_least_request(self):
        rig = self.rig(e1=(None, None, None, None), e2=(None, None, None, None))
        assert {rig.where(rig.route()) for _ in range(2)} == {"1", "2"}

    def test_over_80_percent_pressure_goes_elsewhere(self):
        rig = self.rig(e1=(81, 0.0, 0, 0), e2=(79, 1.0, 90, 100))
        assert costs(rig, "gpu_aware")[1] < costs(rig, "gpu_aware")[2]
        assert {rig.where(rig.route()) for _ in range(5)} == {"2"}

    def test_kv_use_counts_before_nvml(self):
        rig = self.rig(e1=(90, 0.1, 10, 10), e2=(90, 0.1, 10, 10))
        node = rig.fleet.nodes["n"]
        rig.sample(node, engine_sample(spec(1), kv_use=0.3), engine_sample(spec(2), kv_use=0.95))
        assert {rig.where(rig.route()) for _ in range(5)} == {"1"}


class TestPrefixMatch:
    TEXT = "You are a helpful assistant of the company Example. " * 20

    def rig(self):
        rig = Rig(desired_state("prefix_match"))
        rig.endpoints(4)
        return rig

    def test_similar_prompts_go_together(self):
        rig = self.rig()
        first = rig.where(rig.route(text=self.TEXT + "one"))
        assert {rig.where(rig.route(text=self.TEXT + str(n))) for n in range(10)} == {first}
        assert rig.where(rig.route(text="Something else entirely, about the sea and its ships.")) != first

    def test_the_exact_prefix_decides_among_the_similar(self):
        rig = self.rig()
        a = rig.route(text=self.TEXT + "a" * 600)
        b = rig.route(text=self.TEXT + "b" * 600, excluded=frozenset({a.endpoint.spec.address}))
        for _ in range(3):
            assert rig.where(rig.route(text=self.TEXT + "b" * 600 + "more")) == rig.where(b)
            assert rig.where(rig.route(text=self.TEXT + "a" * 600 + "more")) == rig.where(a)

    def test_affinity_ends_where_load_is_out_of_balance(self):
        rig = self.rig()
        for n in range(100):
            rig.route(text=self.TEXT + str(n))
        loads = rig.columns.inflight[[rig.slot(n) for n in range(1, 5)]]
        assert loads.max() - loads.min() <= 17, "the shared system prompt must not send all to one"

    def test_costs(self):
        rig = self.rig()
        decision = rig.route(text=self.TEXT)
        found = costs(rig, "prefix_match", rig.request(text=self.TEXT))
        chosen = int(rig.where(decision))
        matched = len(self.TEXT) // 256 * 64 / round(len(self.TEXT) / 4)
        assert found[chosen] == pytest.approx(1 - 17 * (1 + 2 * matched))
        assert [cost for number, cost in found.items() if number != chosen] == [0, 0, 0]

    def test_tenants_never_meet(self):
        rig = self.rig()
        rig.route(text=self.TEXT)
        found = costs(rig, "prefix_match", rig.request(text=self.TEXT, domain="tenant/other"))
        assert min(found.values()) == 0


# Adaptive that never waits for an endpoint: its prices alone.
def adaptive(**parameters):
    return StrategyConfig("adaptive", "adaptive", parameters)


AT_ONCE = desired_state("adaptive", strategies={"adaptive": adaptive(window_ms=0.0)})


class TestAdaptive:
    def test_the_formula(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(1)
        slot, c = rig.slot(1), rig.columns
        c.prefill_work_us[slot], c.prefill_tokens[slot], c.inflight[slot] = 50_000, 700, 5
        c.decoding[slot], c.context_tokens[slot] = 4, 10_000
        try:
            step, work = 9.8 + 1.05e-4 * 10_000, 0.0666 * 1000 + 2.8e-6 * 1000 * 500
            ttft = (50.0 + work - (128 - 4) * 0.0666) + 1.5 * step
            delays = 0.1 * (work + 9.8) + 1.5 * (1.05e-4 * 1000 + 0.0666)
            assert costs(rig, "adaptive", rig.request(prompt_tokens=1000)) == {1: pytest.approx(ttft + 5 * delays)}
        finally:
            c.prefill_work_us[slot] = c.prefill_tokens[slot] = c.inflight[slot] = 0
            c.decoding[slot] = c.context_tokens[slot] = 0

    def test_an_idle_engine_starts_at_once(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(1)
        assert costs(rig, "adaptive", rig.request(prompt_tokens=100)) == {1: pytest.approx(9.8)}

    def test_a_prompt_of_several_steps(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(1)
        work, steps = 0.0666 * 4096 + 2.8e-6 * 4096 * 2048, 2.0
        expected = work - 128 * 0.0666 * steps + 9.8 * steps
        assert costs(rig, "adaptive", rig.request(prompt_tokens=4096)) == {1: pytest.approx(expected)}

    def test_prompts_in_one_step_share_its_fixed_time(self):
        """Three prompts of 100 tokens take one step, not three."""
        rig = Rig(AT_ONCE)
        rig.endpoints(1)
        for _ in range(3):
            found = rig.route(prompt_tokens=100).why.predicted_ttft_ms
        assert found == pytest.approx(9.8 * 1.5 + 0.0666 * (300 - 128) + 3 * 2.8e-6 * 100 * 50)

    def test_decoding_is_balanced_where_nothing_else_tells_endpoints_apart(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(2)
        for n in range(40):
            rig.first_token(rig.route(prompt_tokens=500, request_id=str(n)))
        assert rig.columns.inflight[[rig.slot(1), rig.slot(2)]].tolist() == [20, 20]

    def test_a_hit_is_worth_its_prefill(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(3)
        text = "word " * 2000
        first = rig.route(text=text)
        rig.first_token(first)
        again = rig.route(text=text + "more")
        assert rig.where(again) == rig.where(first)
        assert again.why.matched_tokens == 39 * 64
        assert again.why.predicted_ttft_ms > 0

    def test_but_not_any_queue(self):
        rig = Rig(AT_ONCE)
        rig.endpoints(3)
        text = "word " * 2000
        seen = {rig.where(rig.route(text=text)) for _ in range(60)}
        assert len(seen) == 3

    def test_a_shared_prefix_spreads_before_its_holders_are_full(self):
        """A system prompt that everybody begins with: without replication one endpoint would serve nearly all."""
        system = "be kind " * 1024

        def loads(replication):
            rig = Rig(desired_state("adaptive", strategies={"adaptive": adaptive(replication=replication)}))
            rig.endpoints(8)
            for n in range(160):
                rig.first_token(rig.route(text=f"{system}{n}", request_id=str(n)))
            return sorted(rig.columns.inflight[[rig.slot(n) for n in range(1, 9)]].tolist())

        spread, piled = loads(2.0), loads(0.0)
        assert spread[-1] <= 2 * 160 / 8
        assert sum(load > 0 for load in spread) >= 6
        assert piled[-1] >= 3 * 160 / 8

    def test_a_shared_prefix_takes_memory_once(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(1)
        system = "be kind " * 1024
        for n in range(30):
            rig.first_token(rig.route(text=f"{system}{n}", request_id=str(n)))
        booked = rig.columns.kv_tokens[rig.slot(1)]
        # Half of an expected answer each, the prompt of the first two, who could not know; and what stands behind it.
        assert booked == pytest.approx(30 * 256 / 2 + 2 * 2048, abs=2 * 30)

    def test_a_session_of_its_own_is_not_replicated(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(8)
        text, places = "once upon a time " * 200, set()
        for turn in range(20):
            decision = rig.route(text=text, request_id=str(turn))
            places.add(rig.where(decision))
            rig.first_token(decision)
            rig.finish(decision)
            text += f"turn {turn} " * 20
        assert len(places) == 1

    def test_a_new_endpoint_is_neither_starved_nor_flooded(self):
        """Four loaded endpoints that hold the prefix, and then a fifth, which holds nothing."""
        system = "be kind " * 1024
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(4)
        for n in range(80):
            rig.first_token(rig.route(text=f"{system}{n}", request_id=f"old {n}"))
        rig.connect("late", spec(5))
        for n in range(40):
            rig.first_token(rig.route(text=f"{system}new {n}", request_id=f"new {n}"))
        assert 8 <= rig.columns.inflight[rig.slot(5)] <= 32

    def test_a_faster_gpu_gets_more(self):
        rig = Rig(AT_ONCE)
        rig.connect("n", spec(1, hardware="a100-40g-8b"), spec(2, hardware="h100-8b"), spec(3, hardware="cpu-8b"))
        for n in range(60):
            rig.route(prompt_tokens=2000, request_id=str(n))
        loads = rig.columns.inflight[[rig.slot(n) for n in (1, 2, 3)]]
        assert loads[1] > loads[0] > loads[2]

    def test_a_speedup_scales_every_time(self):
        plain, fast = Rig(desired_state("adaptive")), Rig(desired_state("adaptive"), time_scale=10.0)
        for rig in (plain, fast):
            rig.endpoints(1)
        one, other = plain.route(), fast.route()
        assert one.why.predicted_ttft_ms == pytest.approx(10 * other.why.predicted_ttft_ms)

    def test_an_empty_prompt(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(2)
        assert rig.route(prompt_tokens=0).why.strategy == "adaptive"


@pytest.mark.parametrize("strategy", sorted(desired_state().strategies))
class TestEveryStrategy:
    def test_a_fleet_that_says_nothing_is_used_evenly(self, strategy):
        rig = Rig(desired_state(strategy))
        rig.endpoints(4)
        for n in range(40):
            decision = rig.route(text=f"{n} prompt {n * 7919}")
            assert decision.why.strategy == strategy
        loads = rig.columns.inflight[[rig.slot(n) for n in range(1, 5)]]
        assert loads.min() >= 4, loads

    def test_one_endpoint_that_says_nothing_among_others_that_do(self, strategy):
        rig = Rig(desired_state(strategy))
        node = rig.connect("n", *[spec(n) for n in range(1, 5)])
        rig.sample(node, *[engine_sample(spec(n), 2, 0, 0.3) for n in range(1, 4)], engine_sample(spec(4)))
        for n in range(60):
            rig.route(text=f"{n} prompt {n * 7919}")
        loads = rig.columns.inflight[[rig.slot(n) for n in range(1, 5)]]
        assert 4 <= loads[3] <= 32, loads

    def test_pure(self, strategy):
        rig = Rig(desired_state(strategy))
        rig.endpoints(3)
        if strategy == "random":
            return
        request = rig.request("r", text="hello" * 100)
        assert costs(rig, strategy, request) == costs(rig, strategy, request)
        assert rig.is_empty()
