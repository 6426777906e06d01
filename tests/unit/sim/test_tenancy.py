"""Tenants in the simulator: figures by tenant, engines of one's own, orders of holds, and the comparison of them."""

import numpy as np
import pytest
from headway_scheduler.admission.holds import HoldOrder
from headway_sim.simulation.metrics import Measured, OfTenant, figures, measure
from headway_sim.simulation.policies import catalogue
from headway_sim.simulation.records import Record, Run, Timeline
from headway_sim.simulation.router import Policy
from headway_sim.simulation.scenario import Scenario, Task, run_task
from headway_sim.simulation.simulator import simulate
from headway_sim.simulation.tenancy import compare_tenants, jain
from headway_sim.workloads import EQUALS, FLOOD, QUIET

ADAPTIVE = Policy("adaptive", "adaptive")
NONE = np.zeros(0)


def part(ttft_ms=(100.0,), service=0.0, refused=0, prompt=100, cached=0):
    return OfTenant(np.array(ttft_ms), len(ttft_ms) + refused, refused, prompt, cached, service)


def measured(tokens=1000, prompt=100, cached=50, **tenants):
    return Measured(
        np.array([1.0]),
        NONE,
        NONE,
        NONE,
        1,
        {},
        prompt,
        cached,
        1.0,
        0.0,
        NONE,
        np.ones((1, 1)),
        NONE,
        arriving_s=10.0,
        tokens=tokens,
        tenants=tenants,
    )


def test_jains_index():
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([0.0, 0.0]) == 1.0


def test_figures_by_tenant_of_all_runs_together():
    runs = [measured(a=part([100.0, 300.0], 50.0)), measured(a=part([200.0], 30.0, refused=1), b=part())]
    found = figures(runs, None)
    assert found["tenants"]["a"]["ttft_ms"]["p50"] == 200.0
    assert found["tenants"]["a"]["rejected_ratio"] == 0.25
    assert found["tenants"]["a"]["service_per_s"] == 80.0 / 20.0
    assert found["tenants"]["b"]["requests"] == 1
    assert found["tokens_per_s"] == 100.0


def test_what_arrives_too_early_or_too_late_does_not_count():
    def record(arrival_ms, held_ms=0.0):
        finished = {"first_token_ms": arrival_ms + held_ms + 10, "finished_ms": arrival_ms + held_ms + 20}
        return Record(arrival_ms, 100, 10, held_ms=held_ms, engine=0, cached_tokens=40, tenant="a", **finished)

    records = [record(0.0), record(1000.0), record(2000.0, held_ms=500.0), record(3000.0)]
    timeline = Timeline(1, 1000.0, [0.0], [[1]], [0.0])
    found = measure(Run(records, timeline, 3020.0), 500.0, 2400.0).tenants["a"]
    assert found.requests == 2
    assert found.service == 60 + 0.1 * 40 + 2 * 10, "the other was dispatched after the last one came"


def test_engines_of_ones_own_serve_nobody_else():
    scenario = Scenario(workload=FLOOD, fleet="3xa100-40g-8b", limit=150, dedicated=(("quiet", 1),))
    run = simulate(ADAPTIVE, catalogue(), scenario.source(), scenario.setup())
    where = {tenant: {each.engine for each in run.records if each.tenant == tenant} for tenant in ("quiet", "noisy")}
    assert where == {"quiet": {0}, "noisy": {1, 2}}


@pytest.mark.parametrize("order", list(HoldOrder))
def test_every_order_serves_everybody_in_the_end(order):
    scenario = Scenario(workload=EQUALS, fleet="1xa100-40g-8b", limit=60, hold_order=order, max_wait_s=600.0)
    found = run_task(Task(scenario, ADAPTIVE))
    assert (len(found.ttft_ms), found.refusals) == (60, {})
    assert (found.hold_ms > 0).any()


def test_fair_share_keeps_a_flood_away():
    worst = {}
    for order in (HoldOrder.FAIR, HoldOrder.SHORTEST):
        scenario = Scenario(workload=FLOOD, fleet="1xa100-40g-8b", limit=250, hold_order=order, max_wait_s=600.0)
        found = run_task(Task(scenario, ADAPTIVE))
        worst[order] = float(found.tenants["quiet"].ttft_ms.max())
    assert worst[HoldOrder.FAIR] < worst[HoldOrder.SHORTEST] / 2


def test_the_comparison_says_what_was_found():
    """By a runner whose figures are known: 100 ms alone, 250 beside the flood, and the other orders half as fair."""
    asked = []

    def run(tasks):
        asked.extend(tasks)
        return [answer(task.scenario) for task in tasks]

    def answer(scenario):
        fair = scenario.hold_order is HoldOrder.FAIR
        if scenario.workload == QUIET:
            return measured(quiet=part([100.0]))
        if scenario.workload == FLOOD:
            beside = 110.0 if scenario.dedicated else 250.0 if fair else 5000.0
            return measured(
                980 if fair else 1000, cached=48 if fair else 50, quiet=part([beside]), noisy=part([9000.0])
            )
        share = 10.0 if fair else 30.0
        return measured(a=part(service=10.0), b=part(service=share))

    found = compare_tenants(ADAPTIVE, 1, run)
    assert {task.scenario.fleet for task in asked} == {"4xa100-40g-8b"}
    assert found["quiet"]["ttft_p99_vs_alone"] == {"shared": 2.5, "dedicated": 1.1}
    assert found["quiet"]["shared_limit_ms"] == 350.0
    assert found["throughput_vs_unfair"] == pytest.approx(0.98)
    assert found["hit_points_vs_unfair"] == pytest.approx(-2.0)
    assert found["jain"] == 1.0
    assert found["orders"]["arrival"]["jain"] == pytest.approx(0.8)
    assert set(found["orders"]) == set(HoldOrder)
