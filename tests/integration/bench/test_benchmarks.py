"""`headway bench route|index|telemetry|mixed` measure what they say, with processes that are gone afterwards."""

import psutil
import pytest
from headway_bench.figures import BenchError, percentile
from headway_bench.idle_fleet import IdleSettings, measure_idle
from headway_bench.index import measure_index
from headway_bench.inproc import InprocSettings, measure_inproc
from headway_bench.kv import KvSettings, measure_kv
from headway_bench.processes import run_json
from headway_bench.route import RouteSettings, measure_route
from headway_bench.soak import measure_soak
from headway_bench.telemetry import MixedSettings, TelemetrySettings, measure_mixed, measure_telemetry
from headway_bench.tenancy import TenancySettings, measure_tenancy


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    left = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [line for line in left if "headway_bench" in line or "headway_scheduler" in line]


@pytest.mark.parametrize("mode", ["unary", "connect", "stream"])
async def test_a_route_is_measured_beside_its_echo(mode):
    settings = RouteSettings(mode, endpoints=3, prompt_bytes=600, concurrency=4, seconds=0.6)
    found = await measure_route(settings)
    for part in ("route", "echo"):
        assert found[part]["requests_per_s"] > 0
        assert found[part]["server_cpu_us"] >= 0
        assert found[part]["p50_us"] <= found[part]["p99_us"]
    assert found["vs_echo"] == round(found["route"]["requests_per_s"] / found["echo"]["requests_per_s"], 3)
    assert found["one_caller"]["vs_echo"] > 0


async def test_a_strategy_that_there_is_not_says_so():
    with pytest.raises(BenchError, match="'none-such'"):
        await measure_route(RouteSettings(endpoints=1, strategy="none-such", auth=False, seconds=0.1))


@pytest.fixture
def collector():
    """In process, a benchmark calms the collector of its process: this one's is put back."""
    import gc

    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector")
def test_a_decision_without_a_wire():
    settings = InprocSettings(endpoints=4, prompt_bytes=600, concurrency=4, seconds=0.3, observability=None)
    found = measure_inproc(settings)
    rows = [row for row in found.values() if isinstance(row, dict)]
    assert len(rows) == 2 and "added_us" in found
    for row in rows:
        assert row["cpu_us"] > 0
        assert row["p50_us"] <= row["p99_us"]


@pytest.mark.usefixtures("collector")
def test_too_many_for_the_fleet_is_no_figure():
    with pytest.raises(BenchError, match="held"):
        measure_inproc(InprocSettings(endpoints=1, prompt_bytes=40_000, concurrency=64, seconds=0.3))


@pytest.mark.usefixtures("collector")
def test_an_index_holds_what_it_was_given():
    found = measure_index(20_000, 4)
    assert found["blocks"] > 19_000
    assert found["match_16_p50_us"] > 0
    assert found["longest_pause_ms"] >= found["drop_endpoint_ms"]


@pytest.mark.usefixtures("collector")
def test_a_soak_leaves_nothing():
    found = measure_soak(3000, 20)
    assert sum(found["ends"].values()) == 3000
    assert min(found["ends"].values()) > 0
    assert (found["reservations_left"], found["counts_left"]) == (0, 0)


async def test_events_and_routes_beside_them():
    found = await measure_kv(
        KvSettings(blocks_per_s=4000, endpoints=4, nodes=2, prompt_bytes=600, seconds=0.8, rounds=1)
    )
    for part in ("without_events", "with_events"):
        assert 0 < found[part]["p50_us"] <= found[part]["p99_us"]
    assert len(found["p99_ratios"]) == 1


async def test_a_fleet_of_agents():
    found = await measure_telemetry(TelemetrySettings(nodes=3, devices=2, engines=1, hz=5.0, seconds=0.5))
    assert found["samples_of_wanted"] > 0
    assert found["rss_mb"] > 0


async def test_idle_engines_are_watched_by_real_agents():
    found = await measure_idle(IdleSettings(endpoints=3, per_agent=2, interval_s=0.2, seconds=0.5))
    assert found["agents"] == 2
    assert found["cpu_cores"] == pytest.approx(found["scheduler_cores"] + found["agents_cores"], abs=1e-3)
    assert found["agent_rss_mb"] > 10


@pytest.mark.parametrize("mode", ["stream", "unary"])
async def test_routes_beside_agents_and_an_admin(mode):
    settings = MixedSettings(nodes=2, devices=2, engines=2, rate=50.0, mode=mode, prompt_bytes=600, seconds=0.5)
    found = await measure_mixed(settings)
    for part in ("route", "echo"):
        assert found[part]["requests_per_s"] > 0
        assert 0 < found[part]["p50_us"] <= found[part]["p99_us"]
    assert found["load"]["route_late_p99_us"] >= 0
    assert found["telemetry"]["samples_of_wanted"] > 0


async def test_what_tenancy_costs():
    found = await measure_tenancy(TenancySettings(endpoints=3, prompt_bytes=600, concurrency=4, seconds=1.0))
    assert found["without_us"] > 0
    assert found["with_us"] > 0


async def test_a_load_that_fails_is_no_figure():
    with pytest.raises(BenchError, match="status 1"):
        await run_json("headway_bench.index", "none", 1)


def test_percentiles():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert (percentile(values, 0.0), percentile(values, 0.5), percentile(values, 0.99)) == (1.0, 3.0, 5.0)
    assert percentile([], 0.5) != percentile([], 0.5)
