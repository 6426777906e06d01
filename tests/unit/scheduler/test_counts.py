"""What is counted, and how Prometheus reads it: bounded labels, histograms that add up."""

from dataclasses import replace

import pytest
from fakes.rig import Rig, desired_state, engine_sample, spec
from headway_scheduler.config import Config
from headway_scheduler.domain.desired import Tenant
from headway_scheduler.domain.report import Outcome, Usage
from headway_scheduler.errors import HeadwayError
from headway_scheduler.exposition import SchedulerCollector
from headway_scheduler.metrics.counts import OTHER, Histogram
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def samples(rig):
    """By name and labels, as they are scraped."""
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(rig.scheduler))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(sample.name, *sorted(sample.labels.items())): sample.value for each in families for sample in each.samples}


def of(rig, name, **labels):
    return samples(rig).get((name, *sorted(labels.items())))


DEFAULT = {"tenant": "default", "model": "m"}


class TestRequests:
    def rig(self, **config):
        rig = Rig(desired_state("adaptive"), **config)
        rig.endpoints(2)
        return rig

    def test_one_that_ends_well(self):
        rig = self.rig()
        decision = rig.route(text="x" * 4000)
        rig.first_token(decision, 120.0)
        rig.finish(decision, usage=Usage(1000, 101, 400), duration_ms=2120.0)
        assert of(rig, "headway_requests_routed_total", **DEFAULT) == 1
        assert of(rig, "headway_request_outcomes_total", outcome="success", **DEFAULT) == 1
        assert of(rig, "headway_prompt_tokens_total", **DEFAULT) == 1000
        assert of(rig, "headway_cached_tokens_total", **DEFAULT) == 400
        assert of(rig, "headway_completion_tokens_total", **DEFAULT) == 101
        assert of(rig, "headway_ttft_seconds_sum", **DEFAULT) == pytest.approx(0.12)
        assert of(rig, "headway_tpot_seconds_sum", **DEFAULT) == pytest.approx(0.02)
        predicted = decision.why.predicted_ttft_ms
        assert of(rig, "headway_ttft_prediction_ratio_sum", **DEFAULT) == pytest.approx(120.0 / predicted)
        assert of(rig, "headway_ttft_seconds_bucket", le="0.2", **DEFAULT) == 1
        assert of(rig, "headway_ttft_seconds_bucket", le="0.1", **DEFAULT) == 0
        assert of(rig, "headway_hold_seconds_count", **DEFAULT) == 0
        assert of(rig, "headway_decision_seconds_count") == 1

    def test_a_ttft_that_comes_with_the_end_counts_once(self):
        rig = self.rig()
        decision = rig.route()
        rig.finish(decision, ttft_ms=50.0)
        rig.finish(decision, ttft_ms=50.0)
        assert of(rig, "headway_ttft_seconds_count", **DEFAULT) == 1

    def test_a_hold(self):
        rig = self.rig()
        rig.bind("gpu_aware")
        rig.full(1, 2)
        rig.hold()
        rig.pass_time(1)
        rig.full()
        rig.pass_time(4)
        assert of(rig, "headway_hold_seconds_count", **DEFAULT) == 1
        assert of(rig, "headway_hold_seconds_sum", **DEFAULT) >= 1.0

    def test_a_refusal_and_an_end_that_nobody_reported(self):
        rig = self.rig()
        rig.route()
        rig.connect("n")
        with pytest.raises(HeadwayError):
            rig.pass_time(10)
            rig.submit(rig.request())
        assert of(rig, "headway_request_outcomes_total", outcome="endpoint_gone", **DEFAULT) == 1
        assert of(rig, "headway_request_refusals_total", reason="NO_ENDPOINTS", **DEFAULT) == 1


class TestLabels:
    def test_pairs_beyond_the_limit_share_a_label(self):
        tenants = tuple(Tenant(f"t{number}") for number in range(5))
        rig = Rig(desired_state("round_robin", tenants=tenants), metrics_series=2)
        binding = rig.store.desired.bindings[0]
        rig.desire(bindings=(binding, *(replace(binding, tenant=tenant.id) for tenant in tenants)))
        rig.endpoints(1)
        for tenant in tenants:
            rig.finish(rig.route(tenant=tenant.id), Outcome.CANCELLED)
        found = {key: value for key, value in samples(rig).items() if key[0] == "headway_requests_routed_total"}
        assert found == {
            ("headway_requests_routed_total", ("model", model), ("tenant", tenant)): count
            for tenant, model, count in (("t0", "m", 1), ("t1", "m", 1), (OTHER, OTHER, 3))
        }
        assert len(rig.scheduler.counts.series) == 2

    def test_endpoints_and_models_beyond_the_limit_share_a_label(self):
        rig = Rig(desired_state("round_robin"), metrics_endpoints=2, metrics_series=1)
        rig.connect("n", *[spec(number, models=("m", f"x{number}")) for number in range(1, 6)])
        rig.sample(rig.fleet.nodes["n"], engine_sample(spec(4), kv_use=0.2), engine_sample(spec(5), kv_use=0.6))
        for _ in range(5):
            rig.route()
        assert of(rig, "headway_endpoint_inflight", endpoint="10.0.0.1:8000@0") == 1
        assert of(rig, "headway_endpoint_inflight", endpoint=OTHER) == 3  # counts add up
        assert of(rig, "headway_endpoint_kv_use", endpoint=OTHER) == pytest.approx(0.4)  # shares are means
        assert of(rig, "headway_endpoint_kv_use", endpoint="10.0.0.1:8000@0") is None  # missing is never zero
        assert of(rig, "headway_pool_endpoints", model="m") == 5
        assert of(rig, "headway_pool_endpoints", model=OTHER) == 5

    def test_the_defaults_bound_a_scrape(self):
        config = Config(name="s1")
        assert config.metrics_series <= 100 and config.metrics_endpoints <= 1000


@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=50))
def test_a_histogram_counts_each_once_in_the_right_bucket(values):
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for number, bound in enumerate(histogram.bounds, 1):
        assert sum(histogram.counts[:number]) == sum(value <= bound for value in values)
