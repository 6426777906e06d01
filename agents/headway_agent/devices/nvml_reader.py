"""Reads GPUs through NVML, and survives what NVML does in the field.

The library is a module shaped like `pynvml`, passed in, so that a test needs no GPU. This module runs in the
child process of `nvml.py`: any call here may hang in the kernel, and then the parent kills the process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from headway_agent.devices.base import (
    DeviceEvent,
    DeviceEventKind,
    DeviceInfo,
    DeviceKind,
    DeviceReading,
    Measurement,
    MissingReason,
)

# NVML's return codes (nvml.h, nvmlReturn_t). They are an ABI, and a binding older than a code lacks its name.
_UNINITIALIZED = 1
_INVALID_ARGUMENT = 2
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_NOT_FOUND = 6
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_VERSION_MISMATCH = 18
_VGPU_ECC_NOT_SUPPORTED = 22
_ARGUMENT_VERSION_MISMATCH = 25
_DEPRECATED = 26
_GPU_NOT_FOUND = 28

_BROKEN = frozenset({_UNINITIALIZED, _DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _VERSION_MISMATCH})
_LOST = frozenset({_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND})
_UNSUPPORTED = frozenset(
    {_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED, _VGPU_ECC_NOT_SUPPORTED}
)
_TRY_OLDER = _UNSUPPORTED | {_INVALID_ARGUMENT}

_EVENT_ECC_DOUBLE_BIT = 0x2
_EVENT_XID = 0x8
_MAX_EVENTS = 64

_GPM_SM_UTILIZATION = 2
_TEMPERATURE_GPU = 0
_THRESHOLD_SLOWDOWN = 1
_ECC_UNCORRECTED = 1
_ECC_VOLATILE = 0

_THROTTLES = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}

# What NVML stores where it has nothing to say: all bits set in 32 or 64 bits.
_NOT_AVAILABLE = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


class LibraryBrokenError(Exception):
    """NVML as a whole answers no more: only a new process, with a new `nvmlInit`, can help."""


@dataclass(slots=True)
class _Device:
    info: DeviceInfo
    handle: Any  # an opaque ctypes pointer of the binding
    parent: Any = None  # for a MIG instance: its parent's handle
    gpu_instance: int = 0
    gpm: "_Gpm | None" = None


@dataclass(slots=True)
class _Gpm:
    """Two sample buffers of GPM: a metric is what happened between them."""

    previous: Any
    current: Any
    primed: bool = False


@dataclass(slots=True)
class NvmlReader:
    """The GPUs and MIG instances of this host, by UUID."""

    library: ModuleType
    wall: Callable[[], float]
    _devices: dict[str, _Device] = field(default_factory=dict)
    _events: Any = None
    _opened: bool = False

    def open(self) -> tuple[DeviceInfo, ...]:
        """Initialise NVML afresh (shutting it down first if need be) and list the devices.

        Raises LibraryBrokenError when NVML cannot be had at all.
        """
        self.close()
        try:
            self.library.nvmlInit()
        except self.library.NVMLError as error:
            raise LibraryBrokenError(_describe(error)) from error
        except AttributeError as error:
            raise LibraryBrokenError(f"the NVML binding is unusable: {error}") from error
        self._opened = True
        infos = self.scan()
        self._watch_events()
        return infos

    def scan(self) -> tuple[DeviceInfo, ...]:
        """List the devices again, without a new initialisation: MIG instances come and go."""
        try:
            count = int(self.library.nvmlDeviceGetCount())
            driver = _text(self.library.nvmlSystemGetDriverVersion())
        except self.library.NVMLError as error:
            raise LibraryBrokenError(_describe(error)) from error
        found: dict[str, _Device] = {}
        for index in range(count):
            for device in self._at(index, driver):
                known = self._devices.get(device.info.uuid)
                device.gpm = known.gpm if known else self._gpm(device)
                found[device.info.uuid] = device
        for uuid in self._devices.keys() - found.keys():
            self._release(self._devices[uuid])
        self._devices = found
        return tuple(d.info for d in found.values())

    def read(self, uuid: str) -> DeviceReading:
        """Look at one device. Raises LibraryBrokenError when it is NVML itself that fails."""
        device = self._devices.get(uuid)
        if device is None:
            return DeviceReading.absent(uuid, MissingReason.LOST)
        nvml, handle = self.library, device.handle
        physical = device.parent if device.parent is not None else handle
        reading = DeviceReading(
            uuid=uuid,
            memory_used_bytes=self._measure(lambda: self._memory(handle)[0]),
            utilization=self._utilization(device),
            # An instance has no thermometer: its parent's chip is its own.
            temperature_c=self._measure(lambda: self._temperature(physical)),
            power_w=self._measure(lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e-3),
            ecc_errors=self._measure(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(physical, _ECC_UNCORRECTED, _ECC_VOLATILE)
            ),
            throttle_reasons=self._throttles(physical),
        )
        return DeviceReading.absent(uuid, MissingReason.LOST) if reading.lost else reading

    def events(self) -> tuple[DeviceEvent, ...]:
        """XID and double-bit ECC errors since the last call, from NVML's event set; waits for none."""
        happened: list[DeviceEvent] = []
        while self._events is not None and len(happened) < _MAX_EVENTS:
            try:
                data = self.library.nvmlEventSetWait_v2(self._events, 0)
                happened.append(self._event(data))
            except self.library.NVMLError as error:
                if error.value in (_FUNCTION_NOT_FOUND, _NOT_SUPPORTED):
                    self._events = None
                break
        return tuple(happened)

    def close(self) -> None:
        """Shut NVML down, as far as it lets us."""
        if not self._opened:
            return
        for device in self._devices.values():
            self._release(device)
        if self._events is not None:
            self._quietly(lambda: self.library.nvmlEventSetFree(self._events))
        self._quietly(self.library.nvmlShutdown)
        self._devices, self._events, self._opened = {}, None, False

    def _at(self, index: int, driver: str) -> list[_Device]:
        """The device at an index and its MIG instances; nothing where it is gone or cannot tell its UUID."""
        nvml = self.library
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            if error.value in _BROKEN:
                raise LibraryBrokenError(_describe(error)) from error
            return []
        if not uuid:
            return []
        info = self._info(handle, uuid, DeviceKind.GPU, driver, index)
        return [_Device(info, handle), *self._instances(handle, info)]

    def _instances(self, parent: Any, info: DeviceInfo) -> list[_Device]:
        nvml = self.library
        try:
            enabled, _pending = nvml.nvmlDeviceGetMigMode(parent)
            count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)) if enabled else 0
        except (nvml.NVMLError, AttributeError):
            return []
        instances = []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                gpu_instance = int(nvml.nvmlDeviceGetGpuInstanceId(handle))
            except nvml.NVMLError:
                continue  # a slot without an instance answers NOT_FOUND
            instance = self._info(handle, uuid, DeviceKind.MIG, info.driver_version, index, info.uuid)
            instances.append(_Device(instance, handle, parent, gpu_instance))
        return instances

    def _info(
        self, handle: Any, uuid: str, kind: DeviceKind, driver: str, index: int, parent_uuid: str = ""
    ) -> DeviceInfo:
        nvml = self.library
        try:
            product = _text(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError:
            product = ""
        return DeviceInfo(
            uuid=uuid,
            kind=kind,
            product=product,
            memory_total_bytes=self._measure(lambda: self._memory(handle)[1]),
            power_limit_w=self._measure(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle), 1e-3),
            temperature_slowdown_c=self._measure(
                lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, _THRESHOLD_SLOWDOWN)
            ),
            parent_uuid=parent_uuid,
            driver_version=driver,
            index=index,
        )

    def _measure(self, call: Callable[[], Any], scale: float = 1.0) -> Measurement:
        """What a call answers, or why it does not."""
        try:
            return _number(call(), scale)
        except self.library.NVMLError as error:
            return _reason(error)
        except AttributeError:
            return MissingReason.UNSUPPORTED  # a binding without this function

    def _newest(self, *calls: Callable[[], Any]) -> Any:
        """The answer of the newest form of a call that this driver and binding know."""
        for call in calls[:-1]:
            try:
                return call()
            except self.library.NVMLError as error:
                if error.value not in _TRY_OLDER:
                    raise
            except AttributeError:
                pass
        return calls[-1]()

    def _memory(self, handle: Any) -> tuple[Any, Any]:
        """Used and total bytes, both without the driver's own; the first version counts those as used."""
        nvml = self.library
        memory = self._newest(
            lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2),
            lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
        )
        reserved = getattr(memory, "reserved", 0)
        total = memory.total
        if isinstance(total, int) and isinstance(reserved, int) and not {total, reserved} & _NOT_AVAILABLE:
            total -= reserved
        return memory.used, total

    def _temperature(self, handle: Any) -> Any:
        nvml = self.library
        return self._newest(
            lambda: nvml.nvmlDeviceGetTemperatureV(handle, _TEMPERATURE_GPU),
            lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU),
        )

    def _throttles(self, handle: Any) -> tuple[str, ...]:
        nvml = self.library
        try:
            mask = self._newest(
                lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            )
        except (nvml.NVMLError, AttributeError):
            return ()
        return tuple(name for bit, name in _THROTTLES.items() if isinstance(mask, int) and mask & bit)

    def _utilization(self, device: _Device) -> Measurement:
        """SM activity by GPM where the chip has it (Hopper and newer), else `utilization.gpu`."""
        if device.gpm is not None:
            activity = self._measure(lambda: self._sm_activity(device), 0.01)
            if not isinstance(activity, MissingReason):
                return min(1.0, max(0.0, activity))
            if activity is not MissingReason.STALE:
                device.gpm = None
        if device.parent is not None and device.gpm is None:
            return MissingReason.UNSUPPORTED  # NVML tells an instance's utilisation by GPM or not at all
        busy = self._measure(lambda: self.library.nvmlDeviceGetUtilizationRates(device.handle).gpu, 0.01)
        return busy if isinstance(busy, MissingReason) else min(1.0, max(0.0, busy))

    def _gpm(self, device: _Device) -> _Gpm | None:
        nvml = self.library
        try:
            physical = device.parent if device.parent is not None else device.handle
            if not nvml.nvmlGpmQueryDeviceSupport(physical).isSupportedDevice:
                return None
            return _Gpm(nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc())
        except (nvml.NVMLError, AttributeError):
            return None

    def _sm_activity(self, device: _Device) -> Any:
        """Percent of SMs busy since the last call; NaN the first time."""
        nvml, gpm = self.library, device.gpm
        assert gpm is not None  # noqa: S101 - the caller looked
        gpm.previous, gpm.current = gpm.current, gpm.previous
        if device.parent is not None:
            nvml.nvmlGpmMigSampleGet(device.parent, device.gpu_instance, gpm.current)
        else:
            nvml.nvmlGpmSampleGet(device.handle, gpm.current)
        if not gpm.primed:
            gpm.primed = True
            return math.nan
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = 1
        wanted.sample1, wanted.sample2 = gpm.previous, gpm.current
        wanted.metrics[0].metricId = _GPM_SM_UTILIZATION
        metric = nvml.nvmlGpmMetricsGet(wanted).metrics[0]
        if metric.nvmlReturn:
            raise nvml.NVMLError(metric.nvmlReturn)
        return metric.value

    def _watch_events(self) -> None:
        nvml = self.library
        try:
            events = nvml.nvmlEventSetCreate()
        except (nvml.NVMLError, AttributeError):
            return
        watched = False
        for device in self._devices.values():
            if device.info.kind is DeviceKind.GPU:
                watched |= self._register(device.handle, events)
        if watched:
            self._events = events
        else:
            self._quietly(lambda: nvml.nvmlEventSetFree(events))

    def _register(self, handle: Any, events: Any) -> bool:
        nvml = self.library
        try:
            wanted = nvml.nvmlDeviceGetSupportedEventTypes(handle) & (_EVENT_XID | _EVENT_ECC_DOUBLE_BIT)
            if wanted:
                nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
            return bool(wanted)
        except (nvml.NVMLError, AttributeError):
            return False

    def _event(self, data: Any) -> DeviceEvent:
        uuid = _text(self.library.nvmlDeviceGetUUID(data.device))
        if data.eventType & _EVENT_XID:
            xid = int(data.eventData)
            return DeviceEvent(uuid, DeviceEventKind.XID, self.wall(), xid, f"XID {xid}")
        return DeviceEvent(uuid, DeviceEventKind.ECC_DOUBLE_BIT, self.wall(), detail="double-bit ECC error")

    def _release(self, device: _Device) -> None:
        if device.gpm is not None:
            for sample in (device.gpm.previous, device.gpm.current):
                self._quietly(partial(self.library.nvmlGpmSampleFree, sample))
            device.gpm = None

    def _quietly(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except (self.library.NVMLError, AttributeError):
            return


def _number(raw: Any, scale: float) -> Measurement:
    """A raw answer as a number; `[N/A]`, sentinels and NaN are no numbers."""
    if isinstance(raw, bool) or not isinstance(raw, int | float) or raw in _NOT_AVAILABLE:
        return MissingReason.UNSUPPORTED
    if math.isnan(raw) or math.isinf(raw):
        return MissingReason.STALE
    return raw * scale


def _reason(error: Any) -> MissingReason:
    """Why one value is missing, by NVML's code. Raises LibraryBrokenError when all of NVML is."""
    code = error.value
    if code in _BROKEN:
        raise LibraryBrokenError(_describe(error)) from error
    if code in _LOST:
        return MissingReason.LOST
    if code == _NO_PERMISSION:
        return MissingReason.NO_PERMISSION
    if code in _TRY_OLDER or code == _NOT_FOUND:
        return MissingReason.UNSUPPORTED
    return MissingReason.STALE


def _describe(error: Any) -> str:
    return f"NVML error {error.value}: {error}"


def _text(raw: Any) -> str:
    """A string of NVML: bytes in older bindings."""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
    return "" if text.strip("[]") == "N/A" else text
