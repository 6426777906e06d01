"""What clusters hold, without a wire."""

from fakes.rig import Rig, desired_state, spec
from headway_scheduler.admission.retries import RetryConfig
from headway_scheduler.domain.desired import Binding, BindingMode, GpuGroup, Tenant
from headway_scheduler.domain.endpoint import EngineRole
from headway_scheduler.envoy.clusters import Scope, Weights, assignments, cluster
from hypothesis import given, settings
from hypothesis import strategies as st


def hosts(found, name):
    return {
        host.endpoint.address.socket_address.address for group in found[name].endpoints for host in group.lb_endpoints
    }


def test_a_cluster_depends_on_its_name_alone():
    first, second = (cluster("a", RetryConfig()).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second
    made = cluster("tenants/acme", RetryConfig())
    assert made.common_lb_config.HasField("healthy_panic_threshold")
    assert made.common_lb_config.healthy_panic_threshold.value == 0


def test_an_envoy_keeps_to_the_retry_budget_by_itself():
    (limits,) = cluster("a", RetryConfig(percent=10, minimum=2)).circuit_breakers.thresholds
    assert (limits.retry_budget.budget_percent.value, limits.retry_budget.min_retry_concurrency.value) == (10, 2)
    (limits,) = cluster("a", RetryConfig(percent=100)).circuit_breakers.thresholds
    assert not limits.HasField("retry_budget")


def test_weights_move_when_the_speed_is_another_and_not_by_noise():
    rig = Rig()
    (slot,) = rig.endpoints(1)
    weights = Weights(rig.scheduler)
    (endpoint,) = rig.fleet.endpoints.values()
    rig.columns.tok_ms[slot] = 0.0666
    weights.refresh()
    before, version = weights.of(endpoint), weights.version
    for noisy in (0.060, 0.074, 0.0666):
        rig.columns.tok_ms[slot] = noisy
        weights.refresh()
    assert (weights.of(endpoint), weights.version) == (before, version)
    rig.columns.tok_ms[slot] = 0.0333
    weights.refresh()
    assert weights.of(endpoint) == 2 * before
    assert weights.version == version + 1
    rig.columns.tok_ms[slot] = float("nan")
    weights.refresh()
    assert weights.of(endpoint) == 1
    rig.columns.tok_ms[slot] = 100.0
    weights.refresh()
    assert weights.of(endpoint) == 1


def test_an_engine_that_runs_half_of_requests_is_in_no_cluster():
    rig = Rig()
    rig.connect("n", spec(1), spec(2, role=EngineRole.PREFILL))
    found = assignments(rig.scheduler, Scope(("*",)), Weights(rig.scheduler))
    assert hosts(found, "models/m") == hosts(found, "tenants/default") == {"10.0.0.1"}


TENANTS = ("a", "b", "c")
MODES = st.sampled_from(list(BindingMode))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 2), MODES), max_size=6, unique_by=lambda b: b[:2]))
def test_no_cluster_of_a_tenant_leaves_its_groups(bindings):
    """Whatever is bound: what a tenant's clusters hold is what Route would choose from."""
    groups = [GpuGroup(f"g{number}", nodes=(f"n{number}",)) for number in range(3)]
    bound = [Binding(tenant, f"g{group}", mode) for tenant, group, mode in bindings]
    rig = Rig(desired_state(tenants=[Tenant(each) for each in TENANTS], groups=groups, bindings=bound))
    for number in range(3):
        rig.connect(f"n{number}", spec(2 * number + 1), spec(2 * number + 2))
    found = assignments(rig.scheduler, Scope(("*",)), Weights(rig.scheduler))
    for tenant in ("default", *TENANTS):
        own, burst = rig.fleet.candidates(tenant, "m", "")
        allowed = {rig.fleet.by_slot[slot].spec.address.partition(":")[0] for slot in {*own.tolist(), *burst.tolist()}}
        assert hosts(found, f"tenants/{tenant}") == hosts(found, f"tenants/{tenant}/models/m") == allowed
        for group in found[f"tenants/{tenant}"].endpoints:
            assert group.priority in (0, 1)
