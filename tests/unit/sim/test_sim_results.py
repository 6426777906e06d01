"""Figures, bounds and searches, by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from fakes.measured import measured
from headway_sim.engine import Hardware
from headway_sim.simulation import Policy, Record, Run, SessionSource, Timeline, TraceSource
from headway_sim.simulation.bound import lower_bound
from headway_sim.simulation.compare import compare, sweep
from headway_sim.simulation.metrics import distribution, figures, measure
from headway_sim.simulation.report import write_report
from headway_sim.simulation.scenario import Scenario, run_task
from headway_sim.simulation.search import find_goodputs, find_overload, search_rate, within_objective
from headway_sim.simulation.tune import neighbours, tune
from headway_sim.traces import HashedPrompt, TraceRequest
from headway_sim.workloads import ArticleWorkload
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

PLAIN = Hardware("plain", 10.0, 0.1, 0.0, 0.0, kv_tokens=16_000, step_budget_tokens=1024, max_sequences=8)


def test_a_distribution_by_nearest_rank():
    found = distribution(np.arange(1.0, 201.0))
    assert found == {"mean": 100.5, "p50": 100.0, "p90": 180.0, "p99": 198.0, "max": 200.0}
    assert distribution(np.zeros(0))["mean"] is None


def test_a_run_in_numbers():
    done = Record(100.0, 50, 11, held_ms=20.0, engine=0, first_token_ms=150.0, finished_ms=350.0, cached_tokens=16)
    refused = Record(200.0, 70, 5, held_ms=30.0, refused="HOLD_EXPIRED")
    timeline = Timeline(2, 1000.0, [0.0], [(1, 0)], [0.25])
    found = measure(Run([done, refused], timeline, 400.0))
    assert found.ttft_ms.tolist() == [50.0]
    assert found.tpot_ms.tolist() == [20.0]
    assert found.e2e_ms.tolist() == [250.0]
    assert found.hold_ms.tolist() == [20.0]
    assert found.arrival_s.tolist() == [0.0]
    assert (found.prompt_tokens, found.cached_tokens, found.requests) == (50, 16, 2)
    assert found.refusals == {"HOLD_EXPIRED": 1}
    assert found.duration_s == pytest.approx(0.25)


def test_what_arrives_during_the_warmup_counts_in_nothing():
    early = Record(100.0, 50, 11, engine=0, first_token_ms=900.0, finished_ms=5000.0, cached_tokens=16)
    refused = Record(200.0, 70, 5, refused="HOLD_EXPIRED")
    late = Record(1000.0, 30, 11, engine=0, first_token_ms=1050.0, finished_ms=1250.0)
    found = measure(Run([early, refused, late], Timeline(1, 1000.0, [0.0], [(1,)], [0.25]), 5000.0), warmup_ms=1000.0)
    assert found.ttft_ms.tolist() == [50.0]
    assert (found.requests, found.prompt_tokens, found.refusals) == (1, 30, {})
    assert found.duration_s == pytest.approx(0.25)


def test_an_answer_of_one_token_has_no_tpot():
    one = Record(0.0, 5, 1, first_token_ms=1.0, finished_ms=1.0)
    assert not len(measure(Run([one], Timeline(1, 1.0, [0.0], [(0,)], [0.0]), 1.0)).tpot_ms)


def test_runs_of_one_policy_are_pooled():
    found = figures([measured((100.0, 200.0), refused=2), measured((300.0, 400.0))], baseline_ttft_ms=1000.0)
    assert found["ttft_ms"]["mean"] == 250.0
    assert found["vs_round_robin"] == 0.25
    assert found["rejected_ratio"] == pytest.approx(2 / 6)
    assert found["hit_ratio"] == 0.25
    assert found["requests_per_s"] == pytest.approx(4 / 20)
    assert found["spread"] == pytest.approx(1.5)


def test_the_lower_bound_by_hand():
    requests = [
        TraceRequest(0.0, HashedPrompt((1, 2), 1024), 3),
        TraceRequest(1.0, HashedPrompt((1, 3, 4), 1536), 1),
        TraceRequest(2.0, HashedPrompt((1, 3, 4), 1536), 1),
    ]
    found = lower_bound(TraceSource(requests), [PLAIN])
    first = 10 + 0.1 * (1024 - 128)
    second = 10 + 0.1 * (1024 - 128)  # 512 of 1,536 tokens are known
    third = 10.0  # all is known; the last block is computed again
    assert found["ttft_ms"]["mean"] == pytest.approx((first + second + third) / 3)
    assert found["e2e_ms"]["max"] == pytest.approx(first + 2 * 10)
    assert found["tpot_ms"]["mean"] == 10.0
    assert found["hit_ratio"] == pytest.approx((512 + 1520) / (1024 + 1536 + 1536))


def test_the_lower_bound_takes_the_fastest_engine_and_plays_sessions():
    slow = Hardware("slow", 100.0, 1.0, 0.0, 0.0, kv_tokens=16_000, step_budget_tokens=1024, max_sequences=8)
    workload = ArticleWorkload(sessions=2, turns=3, concurrency=1, input_tokens=20, output_tokens=5)
    found = lower_bound(SessionSource(workload), [slow, PLAIN])
    assert found["ttft_ms"]["max"] == 10.0
    assert found["hit_ratio"] > 0.3


@given(st.floats(0.05, 200.0))
def test_the_rate_search_finds_a_threshold(threshold):
    search = search_rate(1.0)
    rate = next(search)
    while True:
        try:
            rate = search.send(rate <= threshold)
        except StopIteration as end:
            found = end.value
            break
    assert found <= threshold
    assert math.isclose(found, threshold, rel_tol=0.03)


def test_the_rate_search_gives_up_on_what_never_passes():
    search = search_rate(1.0)
    next(search)
    with pytest.raises(StopIteration) as end:
        for _ in range(100):
            search.send(False)
    assert end.value.value == 0.0


def test_the_objective_is_on_the_95th_percentile_and_on_refusals():
    assert within_objective(measured([100.0] * 95 + [900.0] * 5), 100.0)
    assert not within_objective(measured([100.0] * 94 + [900.0] * 6), 100.0)
    assert within_objective(measured([100.0] * 98, refused=2), 100.0)
    assert not within_objective(measured([100.0] * 97, refused=3), 100.0)
    assert not within_objective(measured([], refused=1), 100.0)


def test_goodput_of_policies_that_bear_unlike_rates():
    def run(tasks):
        limits = {"round_robin": 3.0, "adaptive": 5.0}
        return [measured([100.0 if task.scenario.rate <= limits[task.policy.name] else 900.0] * 8) for task in tasks]

    policies = [Policy(name, name) for name in ("round_robin", "adaptive")]
    found = find_goodputs(Scenario(workload="article"), policies, 500.0, run)
    assert found["round_robin"].rate == pytest.approx(3.0, rel=0.02)
    assert found["adaptive"].rate == pytest.approx(5.0, rel=0.02)
    assert found["adaptive"].goodput_per_s == 1.0  # they arrive a second apart


def test_goodput_is_of_the_middle_half():
    """A fleet that fills and empties slowly is measured while it is full."""
    arrivals = np.array([0.0, 10.0, 20.0, 20.5, 21.0, 21.5, 30.0, 40.0])
    runs = [replace(measured([100.0] * 8), arrival_s=arrivals), measured([100.0] * 3)]

    def run(tasks):
        return [runs[0] if task.scenario.rate <= 1.0 else measured([900.0]) for task in tasks]

    found = find_goodputs(Scenario(workload="article"), [Policy("a", "adaptive")], 500.0, run)
    assert found["a"].goodput_per_s == pytest.approx(2.0)


def test_overload_is_where_round_robin_refuses_twelve_percent():
    def run(tasks):
        # Refuses nothing up to 5.0, then ever more.
        shares = [max(0.0, 1 - 5.0 / task.scenario.rate) for task in tasks]
        return [measured([1.0] * (1000 - round(1000 * share)), refused=round(1000 * share)) for share in shares]

    found = find_overload(Scenario(workload="article-overload"), run)
    assert 1 - 5.0 / found == pytest.approx(0.12, abs=0.003)


def here(tasks):
    return [run_task(task) for task in tasks]


SMALL = Scenario(workload="article", fleet="2xa100-40g-8b", limit=12)


def test_a_comparison_of_real_runs_and_its_report(tmp_path):
    policies = [Policy("adaptive", "adaptive"), Policy("random", "random")]
    comparison = compare(SMALL, policies, 2, here)
    document = json.loads(json.dumps(comparison.document()))
    assert set(document) == {"policies", "noise_floor", "lower_bound"}
    assert set(document["policies"]) == {"adaptive", "random"}
    for found in document["policies"].values():
        assert found["requests"] == 24
        assert found["ttft_ms"]["mean"] > document["lower_bound"]["ttft_ms"]["mean"]
        assert found["vs_round_robin"] is not None
    loads = sweep(Scenario(workload="bursty", limit=20), policies, here)
    assert {point.policy for point in loads} == {"adaptive", "random"}
    assert sweep(SMALL, policies, here) == []
    write_report(tmp_path / "out", "a <title>", comparison, loads)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "a &lt;title&gt;" in page
    assert page.count("data:image/png;base64,") == 3
    assert "http://" not in page
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == document
    assert (tmp_path / "out" / "ttft_cdf.png").read_bytes().startswith(b"\x89PNG")


class Knobs(BaseModel):
    ratio: float = Field(0.5, ge=0.0, le=1.0)
    count: int = Field(4, ge=1, le=8)
    nothing: float = 0.0
    on: bool = True
    word: str = "x"


def test_neighbours_stay_within_bounds():
    found = {name: list(neighbours(field, field.default)) for name, field in Knobs.model_fields.items()}
    assert found == {
        "ratio": [0.125, 0.25, 1.0],
        "count": [1, 2, 8],
        "nothing": [0.01, 0.1, 1.0],
        "on": [False],
        "word": [],
    }


def test_tuning_finds_the_better_parameter():
    def run(tasks):
        return [
            measured([100.0 * abs(1 - task.policy.parameters.get("externality", 0.1)) + 10.0 + task.seed])
            for task in tasks
        ]

    tuned = tune(SMALL, Policy("adaptive", "adaptive"), 3, run)
    assert tuned.parameters["externality"] == pytest.approx(0.8)
    assert tuned.gain == pytest.approx(1 - 30.0 / 100.0)
    assert tuned.noise_floor == pytest.approx(2.0 / 101.0)
