"""The wire's messages from the agent's values, and back. Proto stops here."""

import math
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from headway.telemetry.v1 import telemetry_pb2 as pb

from headway_agent.devices.base import (
    DeviceEvent,
    DeviceEventKind,
    DeviceInfo,
    DeviceKind,
    DeviceReading,
    Measurement,
    MissingReason,
)
from headway_agent.engines.base import EngineReading
from headway_agent.inventory import Endpoint, EndpointChange, EndpointKey, Inventory, NodeIdentity, Sample
from headway_agent.kv.hashing import SCHEME
from headway_agent.kv.pending import KvBatch

_MISSING = {
    MissingReason.UNSUPPORTED: pb.MISSING_REASON_UNSUPPORTED,
    MissingReason.LOST: pb.MISSING_REASON_LOST,
    MissingReason.STALE: pb.MISSING_REASON_STALE,
    MissingReason.NO_PERMISSION: pb.MISSING_REASON_NO_PERMISSION,
}
_DEVICE_KINDS = {
    DeviceKind.GPU: pb.DEVICE_KIND_GPU,
    DeviceKind.MIG: pb.DEVICE_KIND_MIG,
    DeviceKind.CPU: pb.DEVICE_KIND_CPU,
}
_EVENT_KINDS = {
    DeviceEventKind.XID: pb.DEVICE_EVENT_KIND_XID,
    DeviceEventKind.ECC_DOUBLE_BIT: pb.DEVICE_EVENT_KIND_ECC_DOUBLE_BIT,
    DeviceEventKind.LOST: pb.DEVICE_EVENT_KIND_LOST,
    DeviceEventKind.RECOVERED: pb.DEVICE_EVENT_KIND_RECOVERED,
}
_ROLES = {
    "both": pb.ENGINE_ROLE_BOTH,
    "prefill": pb.ENGINE_ROLE_PREFILL,
    "decode": pb.ENGINE_ROLE_DECODE,
}


def hello(identity: NodeIdentity, inventory: Inventory, now_s: float) -> pb.ConnectRequest:
    """The full state."""
    return pb.ConnectRequest(
        hello=pb.Hello(
            agent_version=identity.agent_version,
            node=identity.node,
            boot_id=identity.boot_id,
            instance_id=identity.instance_id,
            labels=identity.labels,
            devices=[_device(d) for d in inventory.devices],
            endpoints=[_endpoint(e) for e in inventory.endpoints],
            clock=_timestamp(now_s),
        )
    )


def sample(value: Sample) -> pb.ConnectRequest:
    """One numbered sample."""
    return pb.ConnectRequest(
        sample=pb.Sample(
            sequence=value.sequence,
            taken=_timestamp(value.taken_s),
            devices=[_reading(r) for r in value.devices],
            engines=[_engine(key, r) for key, r in value.engines],
        )
    )


def event(value: DeviceEvent | EndpointChange) -> pb.ConnectRequest:
    """A device event or an endpoint change."""
    if isinstance(value, EndpointChange):
        return pb.ConnectRequest(
            endpoint_change=pb.EndpointChange(endpoint=_endpoint(value.endpoint), removed=value.removed)
        )
    return pb.ConnectRequest(
        device_event=pb.DeviceEvent(
            uuid=value.uuid,
            kind=_EVENT_KINDS[value.kind],
            xid=value.xid,
            detail=value.detail,
            at=_timestamp(value.at_s),
        )
    )


def kv_events(batches: Iterable[KvBatch]) -> pb.ConnectRequest:
    """What caches gained and lost."""
    return pb.ConnectRequest(kv_event_batches=pb.KvEventBatches(batches=map(_kv_batch, batches)))


def _kv_batch(batch: KvBatch) -> pb.KvEventBatch:
    address, dp_rank = batch.key
    return pb.KvEventBatch(
        address=address,
        dp_rank=dp_rank,
        sequence=batch.sequence,
        scheme=SCHEME,
        stored=batch.stored,
        removed=batch.removed,
        cleared=batch.cleared,
        tier=batch.tier.value,
        incomplete=not batch.complete,
    )


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def _measurement(value: Measurement) -> pb.Measurement:
    if isinstance(value, MissingReason):
        return pb.Measurement(missing=_MISSING[value])
    return pb.Measurement(value=value)


def _timestamp(at_s: float) -> Timestamp:
    whole = math.floor(at_s)
    return Timestamp(seconds=whole, nanos=min(999_999_999, int((at_s - whole) * 1e9)))


def _device(info: DeviceInfo) -> pb.Device:
    return pb.Device(
        uuid=info.uuid,
        kind=_DEVICE_KINDS[info.kind],
        product=info.product,
        memory_total_bytes=_measurement(info.memory_total_bytes),
        power_limit_w=_measurement(info.power_limit_w),
        temperature_slowdown_c=_measurement(info.temperature_slowdown_c),
        parent_uuid=info.parent_uuid,
        driver_version=info.driver_version,
        index=info.index,
    )


def _reading(reading: DeviceReading) -> pb.DeviceSample:
    return pb.DeviceSample(
        uuid=reading.uuid,
        memory_used_bytes=_measurement(reading.memory_used_bytes),
        utilization=_measurement(reading.utilization),
        temperature_c=_measurement(reading.temperature_c),
        power_w=_measurement(reading.power_w),
        throttle_reasons=reading.throttle_reasons,
        ecc_errors=_measurement(reading.ecc_errors),
    )


def _endpoint(endpoint: Endpoint) -> pb.EngineEndpoint:
    settings, facts = endpoint.settings, endpoint.facts
    return pb.EngineEndpoint(
        address=settings.address,
        dp_rank=settings.dp_rank or 0,
        engine=settings.engine,
        engine_version=facts.version,
        role=_ROLES[settings.role],
        models=facts.models,
        adapters=facts.adapters,
        device_uuids=endpoint.device_uuids,
        labels=settings.labels,
        kv_capacity_tokens=_measurement(facts.kv_capacity_tokens),
        block_size_tokens=_measurement(facts.block_size_tokens),
        max_num_seqs=_measurement(facts.max_num_seqs),
        hardware=settings.hardware,
        engine_boot_id=facts.boot_id,
        ready=endpoint.ready,
        pulls_prefixes=settings.pulls_prefixes,
    )


def _engine(key: EndpointKey, reading: EngineReading) -> pb.EngineSample:
    address, dp_rank = key
    return pb.EngineSample(
        address=address,
        dp_rank=dp_rank,
        running=_measurement(reading.running),
        waiting=_measurement(reading.waiting),
        kv_use=_measurement(reading.kv_use),
        prefix_queries=_measurement(reading.prefix_queries),
        prefix_hits=_measurement(reading.prefix_hits),
        ready=reading.ready,
    )
