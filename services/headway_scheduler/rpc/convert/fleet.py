"""The live fleet as Fleet's messages."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
from headway.fleet.v1 import fleet_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.certificates import expires_at
from headway_scheduler.domain.desired import Principal
from headway_scheduler.domain.device import DeviceEventKind
from headway_scheduler.domain.measurement import MissingReason
from headway_scheduler.domain.names import ENDPOINTS, GPU_GROUPS, NODES, STRATEGIES, TENANTS
from headway_scheduler.fleet.members import Endpoint, Node
from headway_scheduler.rpc.convert.admin import bypassed_names
from headway_scheduler.rpc.convert.numbers import uint32
from headway_scheduler.rpc.convert.routing import known
from headway_scheduler.rpc.convert.telemetry import (
    device_sample_to_proto,
    device_to_proto,
    engine_sample_to_proto,
    role_to_proto,
)
from headway_scheduler.store.schema import REVISION as SCHEMA
from headway_scheduler.strategies.base import SoftGuard

__all__ = ["endpoint_to_proto", "node_to_proto", "observations_to_proto", "status_to_proto"]

_MOST_SHARES = 200


def _expiry_of(certificate: Path) -> float | None:
    try:
        return expires_at(certificate.read_bytes())
    except OSError:
        return None


def observations_to_proto(scheduler: Scheduler, principal: Principal) -> pb.GetObservationsResponse:
    """What was seen of requests that others placed, of the tenants that this principal may name."""
    response = pb.GetObservationsResponse(unpriced=scheduler.observations.unpriced)
    response.since.FromNanoseconds(int(scheduler.started_at * 1e9))
    for (tenant, model), tally in sorted(scheduler.observations.tallies.items()):
        if not principal.may_name(tenant):
            continue
        response.observations.add(tenant=tenant, model=model, **asdict(tally))
    return response


def node_to_proto(scheduler: Scheduler, node: Node, now: float) -> pb.NodeState:
    """A node and its devices."""
    devices = []
    for device in node.hello.devices:
        sample = node.samples.get(device.uuid)
        event, failure = node.failures.get(device.uuid), ""
        if event is not None:
            failure = event.kind.value if not event.xid else f"{event.kind.value} {event.xid}"
        if sample is not None and sample.memory_used_bytes.missing is MissingReason.LOST:
            failure = DeviceEventKind.LOST.value
        devices.append(
            pb.DeviceState(
                device=device_to_proto(device),
                sample=None if sample is None else device_sample_to_proto(sample),
                node=f"{NODES}/{node.id}",
                health=_health(failure),
                health_detail=failure,
            )
        )
    state = pb.NodeState(
        name=f"{NODES}/{node.id}",
        connected=node.connected,
        state=node.state.value,
        boot_id=node.hello.boot_id,
        agent_version=node.hello.agent_version,
        labels=dict(node.hello.labels),
        clock_skew_s=node.clock_skew_s,
        devices=devices,
        sample_age_ms=(now - node.heard_at) * 1e3,
    )
    if (expires := scheduler.agent_certificates.get(node.id)) is not None:
        state.certificate_expire_time.FromSeconds(int(expires))
    return state


def _health(failure: str) -> str:
    if not failure:
        return "ok"
    return "lost" if failure == DeviceEventKind.LOST.value else "failed"


def endpoint_to_proto(scheduler: Scheduler, endpoint: Endpoint, now: float) -> pb.EndpointState:
    """An endpoint with its load, guards and groups."""
    fleet, spec, slot = scheduler.fleet, endpoint.spec, endpoint.slot
    columns, sample = fleet.columns, endpoint.sample
    closed = fleet.why_closed(endpoint)
    details = {guard: detail for guard, detail in closed.items() if detail}
    return pb.EndpointState(
        name=f"{ENDPOINTS}/{endpoint.id}",
        address=spec.address,
        dp_rank=spec.dp_rank,
        node=f"{NODES}/{endpoint.node.id}",
        devices=spec.device_uuids,
        engine=spec.engine,
        engine_version=spec.engine_version,
        role=role_to_proto(spec.role),
        models=spec.models,
        adapters=spec.adapters,
        labels=endpoint.labels,
        gpu_groups=[f"{GPU_GROUPS}/{group}" for group in fleet.groups_of(endpoint)],
        state=endpoint.state.value,
        healthy=not closed,
        hard_guards=list(closed),
        soft_guards=_soft_guards(scheduler, slot),
        reservations=uint32(columns.inflight[slot]),
        inflight=uint32(columns.inflight[slot] + columns.external[slot]),
        weighted_inflight=float(columns.weight_micro[slot] / 1e6 + columns.external[slot]),
        queued_prefill_ms=float(columns.prefill_us[slot] / 1e3),
        sample=None if sample is None else engine_sample_to_proto(sample),
        index_blocks=scheduler.index.blocks(slot),
        memory_pressure=known(columns.memory_pressure[slot]),
        sample_age_ms=known((now - columns.sampled_at[slot]) * 1e3),
        hit_ratio=_hit_ratio(endpoint),
        guard_details=details | scheduler.dispatcher.guards.details(slot),
        ejection=_ejection(scheduler, endpoint, now),
        handicap=float(columns.handicap[slot]),
    )


def _soft_guards(scheduler: Scheduler, slot: int) -> list[str]:
    closed = scheduler.dispatcher.guards.peek(frozenset(SoftGuard), slot)
    return [guard.value for guard in closed]


def _ejection(scheduler: Scheduler, endpoint: Endpoint, now: float) -> pb.EndpointEjection | None:
    ejections = scheduler.fleet.ejections
    phase = ejections.out.get(endpoint.id)
    if phase is None:
        return None
    reason, count, for_s = ejections.history(endpoint.id)
    return pb.EndpointEjection(
        phase=phase.value,
        reason=reason.value,
        count=count,
        duration_s=for_s,
        remaining_s=ejections.remaining_s(endpoint.id, now),
    )


def _hit_ratio(endpoint: Endpoint) -> float | None:
    sample = endpoint.sample
    if sample is None or not sample.prefix_queries.value or sample.prefix_hits.value is None:
        return None
    return sample.prefix_hits.value / sample.prefix_queries.value


def status_to_proto(scheduler: Scheduler, version: str, principal: Principal) -> pb.GetStatusResponse:
    """How the scheduler does; shares are those of the tenants that this principal may name."""
    fleet = scheduler.fleet
    strategies = [
        pb.StrategyStatus(
            name=f"{STRATEGIES}/{each.config.id}",
            algorithm=each.config.algorithm,
            enabled=each.config.enabled,
            tripped=each.tripped_until is not None and scheduler.clock() < each.tripped_until,
            decisions=each.decisions,
            failures=each.failures,
            last_error=each.last_error,
        )
        for each in scheduler.registry.installed.values()
    ]
    dispatcher, inflight = scheduler.dispatcher, scheduler.ledger.tenant_inflight
    shares = [
        pb.TenantShare(
            tenant=f"{TENANTS}/{each.tenant}",
            arena=f"{GPU_GROUPS}/{each.arena}",
            weight=each.weight,
            service=each.service,
            ahead=each.ahead,
            holds=dispatcher.holds.tenants.get(each.tenant, 0),
            reservations=inflight.get(each.tenant, 0),
        )
        for each in dispatcher.fair.shares(_MOST_SHARES)
        if principal.may_name(each.tenant)
    ]
    response = pb.GetStatusResponse(
        shares=shares,
        scheduler=scheduler.config.name,
        epoch=scheduler.epoch,
        version=version,
        draining=scheduler.draining,
        standing=scheduler.leadership.standing.value,
        store_available=scheduler.store.available,
        nodes=len(fleet.nodes),
        endpoints=len(fleet.endpoints),
        endpoints_healthy=int(np.count_nonzero(fleet.columns.open)),
        reservations=len(scheduler.ledger.reservations),
        holds=len(scheduler.dispatcher.holds),
        routes=scheduler.dispatcher.routes,
        refusals=scheduler.refusals,
        strategies=strategies,
        guards_frozen=fleet.guards_frozen,
        bypassed=bypassed_names(scheduler.desired),
        schema_revision=scheduler.schema_revision,
        schema_expected=SCHEMA,
        notifications=scheduler.store.notified.value,
        first_tokens=scheduler.reporting.first_tokens,
        ttft_ms_sum=scheduler.reporting.ttft_ms_sum,
        predicted_ttft_ms_sum=scheduler.reporting.predicted_ttft_ms_sum,
    )
    config = scheduler.config
    if config.tls_certificate is not None and (expires := _expiry_of(config.tls_certificate)) is not None:
        response.certificate_expire_time.FromSeconds(int(expires))
    response.max_wait.FromNanoseconds(int(config.max_wait_s * 1e9))
    response.clock.GetCurrentTime()
    response.started.FromNanoseconds(int(scheduler.started_at * 1e9))
    return response
