"""Telemetry's messages to domain values. Proto messages stop here."""

from typing import Final

from headway.telemetry.v1 import telemetry_pb2 as pb

from headway_scheduler.domain.device import Device, DeviceEvent, DeviceEventKind, DeviceKind, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, EngineRole, EngineSample
from headway_scheduler.domain.measurement import UNKNOWN, Measurement, MissingReason
from headway_scheduler.domain.names import ENDPOINTS, MODELS, NODES, check_id, endpoint_id
from headway_scheduler.domain.plausible import MOST, MOST_TOKENS, RANGES, SMALLEST_LIMIT
from headway_scheduler.domain.telemetry import Hello, KvEvents, Sample
from headway_scheduler.errors import InvalidField
from headway_scheduler.index.hashing import SCHEMES, TOKENS
from headway_scheduler.index.kv import TIERS

__all__ = [
    "device_event_from_proto",
    "device_sample_to_proto",
    "device_to_proto",
    "engine_sample_to_proto",
    "hello_from_proto",
    "kv_events_from_proto",
    "role_to_proto",
    "sample_from_proto",
    "spec_from_proto",
]

_MISSING: Final = {
    pb.MISSING_REASON_UNSPECIFIED: MissingReason.UNSPECIFIED,
    pb.MISSING_REASON_UNSUPPORTED: MissingReason.UNSUPPORTED,
    pb.MISSING_REASON_LOST: MissingReason.LOST,
    pb.MISSING_REASON_STALE: MissingReason.STALE,
    pb.MISSING_REASON_NO_PERMISSION: MissingReason.NO_PERMISSION,
}
_MISSING_BACK: Final = {reason: number for number, reason in _MISSING.items()}
_REASONS: Final = {number: Measurement(None, reason) for number, reason in _MISSING.items()}
_KINDS: Final = {
    pb.DEVICE_KIND_GPU: DeviceKind.GPU,
    pb.DEVICE_KIND_MIG: DeviceKind.MIG,
    pb.DEVICE_KIND_CPU: DeviceKind.CPU,
}
_KINDS_BACK: Final = {kind: number for number, kind in _KINDS.items()}
_ROLES: Final = {
    pb.ENGINE_ROLE_UNSPECIFIED: EngineRole.BOTH,
    pb.ENGINE_ROLE_BOTH: EngineRole.BOTH,
    pb.ENGINE_ROLE_PREFILL: EngineRole.PREFILL,
    pb.ENGINE_ROLE_DECODE: EngineRole.DECODE,
}
_ROLES_BACK: Final = {role: number for number, role in _ROLES.items() if number}
_EVENTS: Final = {
    pb.DEVICE_EVENT_KIND_XID: DeviceEventKind.XID,
    pb.DEVICE_EVENT_KIND_ECC_DOUBLE_BIT: DeviceEventKind.ECC_DOUBLE_BIT,
    pb.DEVICE_EVENT_KIND_LOST: DeviceEventKind.LOST,
    pb.DEVICE_EVENT_KIND_RECOVERED: DeviceEventKind.RECOVERED,
}


def _measured(message: pb.Measurement, least_and_most: tuple[float, float]) -> Measurement:
    """Unknown where it is beyond what can be, or no number."""
    value = message.value
    if value or message.WhichOneof("kind") == "value":  # one that is not 0 says by itself that it is there
        least, most = least_and_most
        return Measurement(value) if least <= value <= most else UNKNOWN
    return _REASONS.get(message.missing, UNKNOWN)


def _measured_size(message: pb.Measurement) -> Measurement:
    """A capacity: an engine that says 0 does not know it yet."""
    found = _measured(message, (0.0, MOST_TOKENS))
    return UNKNOWN if found.value == 0 else found


def _limit(message: pb.Device, name: str) -> Measurement:
    return _measured(getattr(message, name), (SMALLEST_LIMIT, MOST[name]))


def _measured_back(measurement: Measurement) -> pb.Measurement:
    if measurement.value is None:
        return pb.Measurement(missing=_MISSING_BACK[measurement.missing])
    return pb.Measurement(value=measurement.value)


def hello_from_proto(message: pb.Hello) -> Hello:
    """A node's full state. Raises InvalidField."""
    if not message.node:
        raise InvalidField("hello.node", "is required")
    if not message.instance_id:
        raise InvalidField("hello.instance_id", "is required")
    return Hello(
        node=check_id(NODES, message.node, "hello.node"),
        instance_id=message.instance_id,
        boot_id=message.boot_id,
        agent_version=message.agent_version,
        labels=dict(message.labels),
        devices=tuple(_device(each, f"hello.devices[{n}]") for n, each in enumerate(message.devices)),
        endpoints=tuple(spec_from_proto(each, f"hello.endpoints[{n}]") for n, each in enumerate(message.endpoints)),
        clock_s=message.clock.ToNanoseconds() / 1e9 if message.HasField("clock") else None,
    )


def _device(message: pb.Device, field: str) -> Device:
    if not message.uuid:
        raise InvalidField(f"{field}.uuid", "is required")
    if message.kind not in _KINDS:
        raise InvalidField(f"{field}.kind", f"{message.kind} is no DeviceKind")
    return Device(
        uuid=message.uuid,
        kind=_KINDS[message.kind],
        product=message.product,
        memory_total_bytes=_limit(message, "memory_total_bytes"),
        power_limit_w=_limit(message, "power_limit_w"),
        temperature_slowdown_c=_limit(message, "temperature_slowdown_c"),
        parent_uuid=message.parent_uuid,
        driver_version=message.driver_version,
        index=message.index,
    )


def spec_from_proto(message: pb.EngineEndpoint, field: str) -> EndpointSpec:
    """One engine rank. Raises InvalidField below `field`."""
    host, _, port = message.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidField(f"{field}.address", f"{message.address!r} must look like HOST:PORT")
    check_id(ENDPOINTS, endpoint_id(message.address, message.dp_rank), f"{field}.address")
    if message.role not in _ROLES:
        raise InvalidField(f"{field}.role", f"{message.role} is no EngineRole")
    for number, model in enumerate(message.models):
        check_id(MODELS, model, f"{field}.models[{number}]")
    return EndpointSpec(
        address=message.address,
        dp_rank=message.dp_rank,
        engine=message.engine,
        engine_version=message.engine_version,
        role=_ROLES[message.role],
        models=tuple(message.models),
        adapters=tuple(message.adapters),
        device_uuids=tuple(message.device_uuids),
        labels=dict(message.labels),
        kv_capacity_tokens=_measured_size(message.kv_capacity_tokens),
        block_size_tokens=_measured_size(message.block_size_tokens),
        max_num_seqs=_measured_size(message.max_num_seqs),
        hardware=message.hardware,
        engine_boot_id=message.engine_boot_id,
        ready=message.ready,
        pulls_prefixes=message.pulls_prefixes,
    )


def sample_from_proto(message: pb.Sample) -> Sample:
    """One reading. Written for speed, there are thousands a second: values in the order of their fields."""
    measured, ranges = _measured, RANGES
    devices = [
        DeviceSample(
            each.uuid,
            measured(each.memory_used_bytes, ranges["memory_used_bytes"]),
            measured(each.utilization, ranges["utilization"]),
            measured(each.temperature_c, ranges["temperature_c"]),
            measured(each.power_w, ranges["power_w"]),
            tuple(each.throttle_reasons),
            measured(each.ecc_errors, ranges["ecc_errors"]),
        )
        for each in message.devices
    ]
    engines = [
        EngineSample(
            each.address,
            each.dp_rank,
            measured(each.running, ranges["running"]),
            measured(each.waiting, ranges["waiting"]),
            measured(each.kv_use, ranges["kv_use"]),
            measured(each.prefix_queries, ranges["prefix_queries"]),
            measured(each.prefix_hits, ranges["prefix_hits"]),
            each.ready,
        )
        for each in message.engines
    ]
    return Sample(message.sequence, tuple(devices), tuple(engines))


def device_event_from_proto(message: pb.DeviceEvent) -> DeviceEvent:
    """What happened to a device. Raises InvalidField."""
    if not message.uuid:
        raise InvalidField("device_event.uuid", "is required")
    if message.kind not in _EVENTS:
        raise InvalidField("device_event.kind", f"{message.kind} is no DeviceEventKind")
    return DeviceEvent(message.uuid, _EVENTS[message.kind], message.xid, message.detail)


def kv_events_from_proto(message: pb.KvEventBatch, field: str) -> KvEvents:
    """What a KV cache gained and lost. Raises InvalidField below `field`."""
    if message.scheme not in SCHEMES:
        raise InvalidField(f"{field}.scheme", f"{message.scheme!r} is none of {', '.join(SCHEMES)}")
    if message.scheme != TOKENS.name and (message.stored or message.removed):
        raise InvalidField(f"{field}.scheme", f"{message.scheme}: engines' blocks are of {TOKENS.name}")
    tier = message.tier or TIERS[0]
    if tier not in TIERS:
        raise InvalidField(f"{field}.tier", f"{tier!r} is none of {', '.join(TIERS)}")
    return KvEvents(
        endpoint=endpoint_id(message.address, message.dp_rank),
        sequence=message.sequence,
        scheme=message.scheme,
        stored=tuple(message.stored),
        removed=tuple(message.removed),
        cleared=message.cleared,
        tier=tier,
        complete=not message.incomplete,
    )


def device_to_proto(device: Device) -> pb.Device:
    """A device, for Fleet."""
    return pb.Device(
        uuid=device.uuid,
        kind=_KINDS_BACK[device.kind],
        product=device.product,
        memory_total_bytes=_measured_back(device.memory_total_bytes),
        power_limit_w=_measured_back(device.power_limit_w),
        temperature_slowdown_c=_measured_back(device.temperature_slowdown_c),
        parent_uuid=device.parent_uuid,
        driver_version=device.driver_version,
        index=device.index,
    )


def device_sample_to_proto(sample: DeviceSample) -> pb.DeviceSample:
    """A reading, for Fleet."""
    return pb.DeviceSample(
        uuid=sample.uuid,
        memory_used_bytes=_measured_back(sample.memory_used_bytes),
        utilization=_measured_back(sample.utilization),
        temperature_c=_measured_back(sample.temperature_c),
        power_w=_measured_back(sample.power_w),
        throttle_reasons=sample.throttle_reasons,
        ecc_errors=_measured_back(sample.ecc_errors),
    )


def engine_sample_to_proto(sample: EngineSample) -> pb.EngineSample:
    """An engine's reading, for Fleet."""
    return pb.EngineSample(
        address=sample.address,
        dp_rank=sample.dp_rank,
        running=_measured_back(sample.running),
        waiting=_measured_back(sample.waiting),
        kv_use=_measured_back(sample.kv_use),
        prefix_queries=_measured_back(sample.prefix_queries),
        prefix_hits=_measured_back(sample.prefix_hits),
        ready=sample.ready,
    )


def role_to_proto(role: EngineRole) -> "pb.EngineRole.ValueType":
    """A role, for Fleet."""
    return _ROLES_BACK[role]
