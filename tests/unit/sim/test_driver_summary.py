"""What a run is summed up to."""

import pytest
from headway_sim.driver import Ending, LoadResult, Outcome, VirtualTimes, percentiles, summarise


def ok(ttft_ms, cached):
    return Outcome(
        Ending.OK,
        200,
        None,
        0.0,
        ttft_ms=ttft_ms,
        e2e_ms=2 * ttft_ms,
        prompt_tokens=100,
        cached_tokens=cached,
        completion_tokens=10,
        virtual=VirtualTimes(0.0, 5.0, 50.0),
    )


def test_every_request_is_counted_once():
    refused = Outcome(Ending.REFUSED, 429, None, 0.0)
    lost = Outcome(Ending.LOST, None, None, 0.0)
    summary = summarise(LoadResult((ok(10.0, 80), ok(30.0, 0), refused, lost), elapsed_s=4.0))
    assert (summary["requests"], summary["ok"], summary["refused"], summary["lost"]) == (4, 2, 1, 1)
    assert summary["rejected_ratio"] == 0.25
    assert summary["ttft_ms"] == {"mean": 20.0, "p50": 10.0, "p99": 30.0}
    assert summary["requests_per_s"] == 0.5
    assert summary["hit_ratio"] == 0.4
    assert summary["virtual"]["ttft_ms"]["mean"] == 5.0
    assert summary["statuses"] == {"429": 1, "none": 1}
    assert summary["completion_tokens"] == 20


def test_a_speedup_converts_wall_time_to_the_engines_time():
    summary = summarise(LoadResult((ok(10.0, 80),), elapsed_s=2.0), speedup=10.0)
    assert summary["ttft_ms"]["mean"] == 100.0
    assert summary["elapsed_s"] == 20.0
    assert summary["requests_per_s"] == pytest.approx(0.05)
    assert summary["virtual"]["ttft_ms"]["mean"] == 5.0


def test_nothing_is_summed_up_to_nothing():
    summary = summarise(LoadResult((), 0.0))
    assert summary["ttft_ms"] == {"mean": None, "p50": None, "p99": None}
    assert summary["hit_ratio"] is None
    assert summary["virtual"] == {}


def test_percentiles_take_the_nearest_rank():
    assert percentiles([float(value) for value in range(1, 101)]) == {"mean": 50.5, "p50": 50.0, "p99": 99.0}
    assert percentiles([7.0]) == {"mean": 7.0, "p50": 7.0, "p99": 7.0}
