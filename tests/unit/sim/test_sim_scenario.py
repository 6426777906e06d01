"""How scenarios are written: fleets, policies, traces and workloads."""

import pytest
from headway_sim.engine import HARDWARE
from headway_sim.simulation import FleetError, parse_fleet
from headway_sim.simulation.policies import PolicyError, catalogue, parse_policies
from headway_sim.simulation.scenario import Scenario, ScenarioError
from headway_sim.traces import TraceError
from headway_sim.workloads import WORKLOADS


def test_fleets():
    assert [each.name for each in parse_fleet("2xa100-40g-8b+h100-8b")] == ["a100-40g-8b", "a100-40g-8b", "h100-8b"]
    assert [each.name for each in parse_fleet("4xh100-70b-tp4")] == ["h100-70b-tp4"] * 4
    assert parse_fleet("cpu-8b", cache_scale=5)[0].kv_tokens == 5 * HARDWARE["cpu-8b"].kv_tokens


@pytest.mark.parametrize("text", ["", "8x", "0xh100-8b", "8xz80", "8x a100-40g-8b", "h100-8b+", "99999xh100-8b"])
def test_fleets_that_cannot_be(text):
    with pytest.raises(FleetError):
        parse_fleet(text)


@pytest.mark.parametrize("scale", [0, -1, float("nan")])
def test_cache_scales_that_cannot_be(scale):
    with pytest.raises(FleetError):
        parse_fleet("h100-8b", cache_scale=scale)


def test_policies():
    plain, tuned = parse_policies("round_robin, adaptive:externality=0.2")
    assert (plain.name, plain.algorithm, plain.parameters) == ("round_robin", "round_robin", {})
    assert (tuned.name, tuned.algorithm) == ("adaptive:externality=0.2", "adaptive")
    assert tuned.parameters == {"externality": 0.2}
    assert [each.name for each in parse_policies("all")] == list(catalogue())


@pytest.mark.parametrize(
    "text",
    ["nobody", "adaptive:externality", "adaptive:externality=-1", "adaptive:nothing=1", "random,random", ""],
)
def test_policies_that_cannot_be(text):
    with pytest.raises(PolicyError):
        parse_policies(text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"workload": "nothing"},
        {"workload": "article", "trace": "x"},
        {"workload": "article", "rate": 0},
        {"workload": "article", "limit": 0},
        {"workload": "article", "skip": 1},
        {"workload": "article", "telemetry_period_s": -1},
        {"workload": "article", "prior_error": 0},
        {"workload": "article", "warmup_s": -1},
    ],
)
def test_scenarios_that_cannot_be(fields):
    with pytest.raises(ScenarioError):
        Scenario(**fields).check()


def test_skip_and_limit_of_a_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"timestamp": {1000 * n}, "input": "hello {n}", "output_length": 2}}\n' for n in range(10))
    )
    source = Scenario(trace=trace, skip=3, limit=4, rate=2.0).source()
    assert [at_ms for at_ms, _ in source.arrivals()] == [0.0, 500.0, 1000.0, 1500.0]
    with pytest.raises(ScenarioError):
        Scenario(trace=trace, skip=10).check()
    with pytest.raises(TraceError):
        Scenario(trace=tmp_path / "none.jsonl").check()


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_follow_from_their_seed(name):
    def beginning(seed):
        scenario = Scenario(workload=name, workload_seed=seed)
        scenario.check()
        arrivals = scenario.source().arrivals()
        return [
            (at_ms, job.tenant, job.prompt, job.engine) for (at_ms, job), _ in zip(arrivals, range(15), strict=False)
        ]

    assert beginning(1) == beginning(1)
    assert beginning(1) != beginning(2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_send_as_many_requests_as_they_say(name):
    workload = WORKLOADS[name].make(0)
    count, tenants = 0, set()
    for (_, session), _ in zip(workload.schedule(), range(40), strict=False):
        turn = next(session)
        while turn is not None:
            count += 1
            tenants.add(turn.tenant)
            try:
                turn = session.send("")
            except StopIteration:
                turn = None
    assert count <= workload.requests
    assert tenants == set(WORKLOADS[name].tenants)


def test_open_loops_arrive_in_order_and_scale_with_the_rate():
    slow, fast = (
        [
            at_ms
            for (at_ms, _), _ in zip(
                Scenario(workload="bursty", rate=rate).source().arrivals(), range(500), strict=False
            )
        ]
        for rate in (1.0, 4.0)
    )
    assert slow == sorted(slow)
    assert fast == pytest.approx([at_ms / 4 for at_ms in slow])


def test_bursts_are_ten_times_as_dense():
    arrivals = [at_ms / 1e3 for at_ms, _ in WORKLOADS["bursty"].make(0).schedule()]
    arrivals = [at_s for at_s in arrivals if at_s < arrivals[-1] // 30 * 30]
    inside = sum(1 for at_s in arrivals if at_s % 30 < 5)
    # Of 30 seconds 5 at ten times the rate: two thirds of all.
    assert inside / len(arrivals) == pytest.approx(2 / 3, abs=0.05)


def test_agents_share_their_tools_and_nothing_else():
    first, second = (
        next(session) for (_, session), _ in zip(WORKLOADS["agentic"].make(0).schedule(), range(2), strict=False)
    )
    assert first.messages[0]["role"] == "system"
    assert first.messages[1]["content"][:8] != second.messages[1]["content"][:8]
