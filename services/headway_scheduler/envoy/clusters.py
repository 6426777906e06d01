"""The fleet as Envoy's clusters: which there are, and what each holds.

| cluster | holds |
|---|---|
| `models/M` | every endpoint that serves M; for credentials that may name any tenant |
| `tenants/T` | the endpoints T may use; those of its burst groups at priority 1 |
| `tenants/T/models/M` | those of them that serve M |
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from envoy.config.cluster.v3 import circuit_breaker_pb2, cluster_pb2
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.extensions.load_balancing_policies.least_request.v3 import least_request_pb2
from envoy.extensions.load_balancing_policies.override_host.v3 import override_host_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from headway_scheduler.admission.retries import RetryConfig
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.names import MODELS, TENANTS
from headway_scheduler.envoy.head import DESTINATION
from headway_scheduler.fleet.columns import Slots
from headway_scheduler.fleet.health import HardGuard
from headway_scheduler.fleet.members import Endpoint

__all__ = ["Scope", "Weights", "assignments", "cluster"]

_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_MANY: Final = 100_000
"""A streaming request is one that is open: Envoy's default limit of 1024 is far too low."""
_CONNECT_S: Final = 2
_IDLE_S: Final = 4
"""Below the 5 s after which uvicorn, and so vLLM, closes an idle connection that Envoy might be about to use."""
_REFERENCE: Final = 4.0
"""Weight of an endpoint that prefills one token a millisecond."""
_HEAVIEST: Final = 65_536
_WEIGHTS: Final = [round(2 ** (step / 2)) for step in range(33)]
_CACHED: Final = 65_536
_STICKY: Final = 0.75
"""Weights go by steps of √2, and change when the speed is this many steps away."""

Health = int  # a health_check_pb2.HealthStatus
_HEALTHY: Final[Health] = health_check_pb2.HEALTHY
_DRAINING: Final[Health] = health_check_pb2.DRAINING
_UNHEALTHY: Final[Health] = health_check_pb2.UNHEALTHY
_DEGRADED: Final[Health] = health_check_pb2.DEGRADED
_BEST_FIRST: Final = (_HEALTHY, _DEGRADED, _DRAINING, _UNHEALTHY)
_ON_TRIAL: Final = frozenset({HardGuard.EJECTED.value, HardGuard.PROBING.value})
_NO_LIMIT_PERCENT: Final = 100.0
_ANY_HEALTHY: Final = 10_000
"""Overprovisioning in percent: while one in a hundred is healthy, nothing falls back on those that are degraded."""

Assignments = Mapping[str, endpoint_pb2.ClusterLoadAssignment]


@dataclass(frozen=True, slots=True)
class Scope:
    """What one Envoy is told about: its principal's tenants, or of these the ones that it asks for."""

    tenants: tuple[str, ...]
    asked: frozenset[str] = frozenset()

    @classmethod
    def of(cls, principal: Principal, asked: Iterable[str] = ()) -> "Scope":
        """Of a principal; `asked`: tenants' ids, none means all that it may name."""
        return cls(principal.tenants, frozenset(asked))

    @property
    def everything(self) -> bool:
        """May it see endpoints of any tenant?"""
        return "*" in self.tenants

    def holds(self, tenant: str) -> bool:
        """Is this tenant within it?"""
        return (self.everything or tenant in self.tenants) and (not self.asked or tenant in self.asked)


class Weights:
    """How fast each endpoint prefills, as learned, in steps that small changes do not move. `version` grows with it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.version = 0
        self._scheduler = scheduler
        self._steps: dict[str, int] = {}

    def refresh(self) -> None:
        """Take over what has been learned since."""
        fleet = self._scheduler.fleet
        steps = {each.id: self._step(each) for each in fleet.endpoints.values()}
        if steps != self._steps:
            self._steps = steps
            self.version += 1

    def of(self, endpoint: Endpoint) -> int:
        """At least 1."""
        step = self._steps.get(endpoint.id)
        if step is None:
            step = self._steps[endpoint.id] = self._step(endpoint)
        return _WEIGHTS[min(max(step, 0), len(_WEIGHTS) - 1)]

    def _step(self, endpoint: Endpoint) -> int:
        token_ms = float(self._scheduler.fleet.columns.tok_ms[endpoint.slot])
        if not token_ms > 0:  # also when unknown
            return 0
        exact = 2 * math.log2(_REFERENCE / token_ms)
        before = self._steps.get(endpoint.id)
        return before if before is not None and abs(exact - before) <= _STICKY else round(exact)


def cluster(name: str, retries: RetryConfig) -> cluster_pb2.Cluster:
    """A cluster by its name alone, so that none ever changes: what it holds comes by EDS.

    Each Envoy keeps to the scheduler's retry budget by itself, for what it tries again without asking.
    """
    least = least_request_pb2.LeastRequest()
    override = override_host_pb2.OverrideHost()
    override.override_host_sources.add(header=DESTINATION)
    fallback = override.fallback_policy.policies.add().typed_extension_config
    fallback.name = "envoy.load_balancing_policies.least_request"
    fallback.typed_config.Pack(least)
    made = cluster_pb2.Cluster(name=name, type=cluster_pb2.Cluster.EDS)
    made.eds_cluster_config.eds_config.ads.SetInParent()
    made.eds_cluster_config.eds_config.resource_api_version = 2  # V3
    made.connect_timeout.seconds = _CONNECT_S
    policy = made.load_balancing_policy.policies.add().typed_extension_config
    policy.name = "envoy.load_balancing_policies.override_host"
    policy.typed_config.Pack(override)
    # Without this Envoy would use what we call unhealthy or draining as soon as that is half of the cluster.
    made.common_lb_config.healthy_panic_threshold.value = 0
    thresholds = circuit_breaker_pb2.CircuitBreakers.Thresholds()
    for limit in ("max_connections", "max_pending_requests", "max_requests", "max_retries"):
        getattr(thresholds, limit).value = _MANY
    if retries.percent < _NO_LIMIT_PERCENT:
        thresholds.retry_budget.budget_percent.value = retries.percent
        thresholds.retry_budget.min_retry_concurrency.value = retries.minimum
    made.circuit_breakers.thresholds.append(thresholds)
    options = http_protocol_options_pb2.HttpProtocolOptions()
    options.explicit_http_config.http_protocol_options.SetInParent()
    options.common_http_protocol_options.idle_timeout.seconds = _IDLE_S
    made.typed_extension_protocol_options[_OPTIONS].CopyFrom(_packed(options))
    return made


def assignments(scheduler: Scheduler, scope: Scope, weights: Weights) -> Assignments:
    """Every cluster within the scope by name, those that hold nothing at present too."""
    fleet, catalogue = scheduler.fleet, scheduler.intake.desired
    builder = _Builder(scheduler, weights)
    found: dict[str, endpoint_pb2.ClusterLoadAssignment] = {}
    if scope.everything and not scope.asked:
        for model in catalogue.models:
            name = f"{MODELS}/{model}"
            found[name] = builder.assignment(name, [fleet.pool(model)])
    for tenant in catalogue.tenants.values():
        if scope.holds(tenant.id):
            found.update(_of_tenant(scheduler, tenant, builder))
    return found


def _of_tenant(scheduler: Scheduler, tenant: Tenant, builder: "_Builder") -> Assignments:
    fleet = scheduler.fleet
    models = [model for model in scheduler.intake.desired.models if scheduler.intake.allows(tenant, model)]
    pools = {model: fleet.tiers(tenant.id, model) for model in models}
    whole = f"{TENANTS}/{tenant.id}"
    found = {whole: builder.assignment(whole, *zip(*pools.values(), strict=True))}
    for model, tiers in pools.items():
        name = f"{whole}/{MODELS}/{model}"
        found[name] = builder.assignment(name, *([tier] for tier in tiers))
    return found


@dataclass(slots=True)
class _Builder:
    """Makes assignments out of the fleet of this moment."""

    scheduler: Scheduler
    weights: Weights
    _made: dict[frozenset[int], Mapping[str, endpoint_components_pb2.LbEndpoint]] = field(default_factory=dict)

    def assignment(self, name: str, *priorities: Iterable[Slots]) -> endpoint_pb2.ClusterLoadAssignment:
        """Each of `priorities` is a union of slots; one that holds nothing does not count."""
        made = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
        made.policy.overprovisioning_factor.value = _ANY_HEALTHY
        placed: set[str] = set()
        for pools in priorities:
            hosts = self._hosts(frozenset(slot for slots in pools for slot in slots.tolist()))
            new = [host for address, host in hosts.items() if address not in placed] if placed else hosts.values()
            if new:
                made.endpoints.add(priority=len(made.endpoints), lb_endpoints=new)
                placed.update(hosts)
        return made

    def _hosts(self, slots: frozenset[int]) -> Mapping[str, endpoint_components_pb2.LbEndpoint]:
        """One an address, in their order: an engine's ranks share it. Most tenants share their sets of slots."""
        found = self._made.get(slots)
        if found is None:
            ranks: dict[str, list[Endpoint]] = {}
            for slot in slots:
                endpoint = self.scheduler.fleet.by_slot[slot]
                address = self.scheduler.addresses.of(endpoint.spec.address)
                if address is not None:
                    ranks.setdefault(address, []).append(endpoint)
            found = self._made[slots] = {address: self._host(address, ranks[address]) for address in sorted(ranks)}
        return found

    def _host(self, address: str, ranks: list[Endpoint]) -> endpoint_components_pb2.LbEndpoint:
        health = min((self._health(each) for each in ranks), key=_BEST_FIRST.index)
        weight = min(_HEAVIEST, sum(self.weights.of(each) for each in ranks))
        return _lb_endpoint(address, health, weight)

    def _health(self, endpoint: Endpoint) -> Health:
        if self.scheduler.fleet.columns.open[endpoint.slot]:
            # One that is probed is open now and not in a moment: Envoy is told once.
            return _DEGRADED if endpoint.id in self.scheduler.fleet.ejections.out else _HEALTHY
        if _ON_TRIAL.issuperset(self.scheduler.fleet.hard_guards(endpoint)):
            return _DEGRADED
        wanted = {endpoint.state, endpoint.node.state}
        return _UNHEALTHY if wanted == {SchedulingState.ACTIVE} else _DRAINING


@lru_cache(_CACHED)
def _lb_endpoint(address: str, health: Health, weight: int) -> endpoint_components_pb2.LbEndpoint:
    """Never changed: assignments take copies."""
    host, _, port = address.rpartition(":")
    made = endpoint_components_pb2.LbEndpoint(health_status=health)
    made.endpoint.address.socket_address.address = host.strip("[]")
    made.endpoint.address.socket_address.port_value = int(port)
    made.load_balancing_weight.value = weight
    return made


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
