"""GPUs that do not exist: a scripted profile for demos, compose files and tests.

A device follows its curves, or the load that the local engines report, and has the faults its script names.
"""

import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway_agent.config import Fault, SimulatedDevices
from headway_agent.devices.base import (
    DeviceContext,
    DeviceEvent,
    DeviceEventKind,
    DeviceInfo,
    DeviceKind,
    DeviceReading,
    DeviceSnapshot,
    EngineLoad,
    MissingReason,
)

Point = tuple[float, float]


def curve_at(points: Sequence[Point], t: float) -> float:
    """The value at `t` of a curve of (seconds, value): straight between points, constant beyond the ends."""
    after = bisect_right(points, t, key=lambda p: p[0])
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (t0, v0), (t1, v1) = points[after - 1], points[after]
    return v0 + (v1 - v0) * (t - t0) / (t1 - t0)


@dataclass(slots=True)
class SimulatedSource:
    """`settings.count` GPUs of one product. Times count from `start`."""

    settings: SimulatedDevices
    context: DeviceContext
    _started: float = 0.0
    _reported: set[int] = field(default_factory=set)

    async def start(self) -> None:
        """Begin the script."""
        self._started = self.context.clock()

    async def read(self, budget_s: float) -> DeviceSnapshot:
        """Every device at this second of the script."""
        t = self.context.clock() - self._started
        devices = tuple(self._device(index) for index in range(self.settings.count))
        readings = tuple(self._reading(device, t) for device in devices)
        return DeviceSnapshot(devices, readings, tuple(self._events(devices, t)))

    async def close(self) -> None:
        """Nothing is held."""

    def _device(self, index: int) -> DeviceInfo:
        s = self.settings
        name = f"{s.seed or self.context.node}/{s.product}/{index}"
        return DeviceInfo(
            uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, name)}",
            kind=DeviceKind.GPU,
            product=s.product,
            memory_total_bytes=s.memory_gib * 2**30,
            power_limit_w=s.power_limit_w,
            temperature_slowdown_c=s.temperature_slowdown_c,
            driver_version="simulated",
            index=index,
        )

    def _reading(self, device: DeviceInfo, t: float) -> DeviceReading:
        faults = [f for f in self.settings.faults if f.device == device.index and f.active(t)]
        kinds = {f.kind for f in faults}
        if "lost" in kinds:
            return DeviceReading.absent(device.uuid, MissingReason.LOST)
        if "stale" in kinds:
            return DeviceReading.absent(device.uuid, MissingReason.STALE)
        reading = self._healthy(device.uuid, t)
        if "hot" in kinds:
            hot = self.settings.temperature_slowdown_c + 3
            reading = replace(reading, temperature_c=hot, throttle_reasons=("hw_thermal",))
        return reading

    def _healthy(self, device_uuid: str, t: float) -> DeviceReading:
        s, curves = self.settings, self.settings.curves
        load = self.context.loads.by_device.get(device_uuid) if s.follow_engines else None
        load = load or EngineLoad(utilization=curve_at(curves.utilization, t), kv_use=0.0)
        busy = load.utilization
        power = curve_at(curves.power_w, t) if curves.power_w else _between(s.idle_w, s.power_limit_w, busy)
        degrees = (
            curve_at(curves.temperature_c, t)
            if curves.temperature_c
            else _between(s.idle_c, s.temperature_slowdown_c - 10, busy)
        )
        return DeviceReading(
            uuid=device_uuid,
            # Engines reserve their share when they start; how full their cache is does not show here.
            memory_used_bytes=curve_at(curves.memory, t) * s.memory_gib * 2**30,
            utilization=busy,
            temperature_c=degrees,
            power_w=power,
            ecc_errors=0.0,
        )

    def _events(self, devices: Sequence[DeviceInfo], t: float) -> list[DeviceEvent]:
        events = []
        for number, fault in enumerate(self.settings.faults):
            if fault.kind == "xid" and fault.at_s <= t and number not in self._reported:
                self._reported.add(number)
                events.append(self._xid(devices[fault.device].uuid, fault))
        return events

    def _xid(self, device_uuid: str, fault: Fault) -> DeviceEvent:
        at_s = self.context.wall()
        return DeviceEvent(device_uuid, DeviceEventKind.XID, at_s, fault.xid, f"XID {fault.xid} (scripted)")


def _between(idle: float, full: float, share: float) -> float:
    return idle + (full - idle) * share
