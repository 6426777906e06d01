"""What a device source tells the agent, in the agent's own words.

Missing is never zero: a measurement is a number, or the reason why there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class MissingReason(Enum):
    """Why a value is missing; the four are different things and mean different actions."""

    UNSUPPORTED = "unsupported"
    """The hardware, the driver or the engine does not offer it: it will never come."""
    LOST = "lost"
    """The device is gone: fallen off the bus, or a reset is needed."""
    STALE = "stale"
    """There was a value, or should be, but reading timed out or it stopped changing."""
    NO_PERMISSION = "no_permission"
    """It exists, and this agent may not read it."""


Measurement = float | MissingReason
"""A number in the unit that its field names, or why there is none."""


class DeviceKind(Enum):
    """What sort of accelerator a device is."""

    GPU = "gpu"
    MIG = "mig"
    CPU = "cpu"


class DeviceEventKind(Enum):
    """What happened to a device."""

    XID = "xid"
    ECC_DOUBLE_BIT = "ecc_double_bit"
    LOST = "lost"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What does not change while a device lives; `uuid` is its only key."""

    uuid: str
    kind: DeviceKind
    product: str
    memory_total_bytes: Measurement = MissingReason.UNSUPPORTED
    power_limit_w: Measurement = MissingReason.UNSUPPORTED
    temperature_slowdown_c: Measurement = MissingReason.UNSUPPORTED
    parent_uuid: str = ""
    driver_version: str = ""
    index: int = 0
    """For humans; changes over reboots."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One look at a device. `utilization` is 0 to 1."""

    uuid: str
    memory_used_bytes: Measurement
    utilization: Measurement
    temperature_c: Measurement
    power_w: Measurement
    ecc_errors: Measurement
    throttle_reasons: tuple[str, ...] = ()

    @classmethod
    def absent(cls, uuid: str, reason: MissingReason) -> "DeviceReading":
        """A reading in which everything is missing for the same reason."""
        return cls(uuid, reason, reason, reason, reason, reason)

    @property
    def lost(self) -> bool:
        """Is the device gone?"""
        return MissingReason.LOST in (
            self.memory_used_bytes,
            self.utilization,
            self.temperature_c,
            self.power_w,
        )

    @property
    def measured(self) -> bool:
        """Does it hold at least one number?"""
        return any(
            not isinstance(m, MissingReason)
            for m in (self.memory_used_bytes, self.utilization, self.temperature_c, self.power_w)
        )


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something that happened to a device at `at_s` (seconds since the epoch)."""

    uuid: str
    kind: DeviceEventKind
    at_s: float
    xid: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """All that a source knows now: one reading for each device, and the events since the last snapshot."""

    devices: tuple[DeviceInfo, ...] = ()
    readings: tuple[DeviceReading, ...] = ()
    events: tuple[DeviceEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engines on a device are; what a simulated device follows."""

    utilization: float
    kv_use: float


@dataclass(slots=True)
class LoadBoard:
    """The newest engine load for each device UUID: written by the collector, read by simulated devices."""

    by_device: dict[str, EngineLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """What the agent lends to every device source."""

    node: str
    clock: Callable[[], float]
    """Monotonic seconds."""
    wall: Callable[[], float]
    """Seconds since the epoch."""
    loads: LoadBoard


class DeviceSource(Protocol):
    """A kind of device on this host."""

    async def start(self) -> None:
        """Get ready. Does not raise for absent hardware: that shows in the snapshots."""

    async def read(self, budget_s: float) -> DeviceSnapshot:
        """Look at every device, within `budget_s`. Never raises; what could not be read says why."""

    async def close(self) -> None:
        """Let everything go."""
