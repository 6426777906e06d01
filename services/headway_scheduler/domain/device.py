"""Accelerators and what agents measure on them."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from headway_scheduler.domain.measurement import UNKNOWN, Measurement

__all__ = ["Device", "DeviceEvent", "DeviceEventKind", "DeviceKind", "DeviceSample"]


class DeviceKind(StrEnum):
    """What sort of accelerator."""

    GPU = "gpu"
    MIG = "mig"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, keyed by UUID: a GPU, a MIG instance, or a host's CPU."""

    uuid: str
    kind: DeviceKind
    product: str = ""
    memory_total_bytes: Measurement = UNKNOWN
    power_limit_w: Measurement = UNKNOWN
    temperature_slowdown_c: Measurement = UNKNOWN
    parent_uuid: str = ""
    driver_version: str = ""
    index: int = 0


class DeviceSample(msgspec.Struct, frozen=True):
    """One reading. Utilisation is 0 to 1."""

    uuid: str
    memory_used_bytes: Measurement = UNKNOWN
    utilization: Measurement = UNKNOWN
    temperature_c: Measurement = UNKNOWN
    power_w: Measurement = UNKNOWN
    throttle_reasons: tuple[str, ...] = ()
    ecc_errors: Measurement = UNKNOWN


class DeviceEventKind(StrEnum):
    """What happened to a device between samples."""

    XID = "xid"
    ECC_DOUBLE_BIT = "ecc_double_bit"
    LOST = "lost"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A device failed or came back."""

    uuid: str
    kind: DeviceEventKind
    xid: int = 0
    detail: str = ""
