"""A fake NVML, shaped like the module `pynvml`, that plays every hazard an agent must survive.

In a test: `FakeNvml(scenario)`. In the agent's child process: the module itself (`fakes.nvml`), which reads
the scenario from the JSON file that FAKE_NVML names, anew at each call, so that a test can change it under a
running child.
"""

# ruff: noqa: N802 - the binding's names

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, TIMEOUT, FUNCTION_NOT_FOUND = 3, 4, 6, 10, 13
GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN = 15, 18, 999
NOT_AVAILABLE_64 = 0xFFFFFFFFFFFFFFFF
GIB = 2**30


class NVMLError(Exception):
    """As the binding raises it: with the code in `value`."""

    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return f"code {self.value}"


def gpu(uuid, **changes):
    """A healthy A100, and whatever is to be different about it.

    `errors` maps a function's name to the code it raises; `hang` lists functions that never return; `gone`
    makes every call raise GPU_IS_LOST, the handle's included; `mig` lists instances; `sm` is GPM's SM
    activity, where there is GPM.
    """
    return {
        "uuid": uuid,
        "name": "NVIDIA A100-SXM4-40GB",
        "used": 10 * GIB,
        "total": 40 * GIB,
        "reserved": 1 * GIB,
        "utilization": 50,
        "temperature": 60,
        "power_mw": 250_000,
        "limit_mw": 400_000,
        "slowdown": 92,
        "ecc": 0,
        "throttles": 0,
        "sm": None,
        "errors": {},
        "hang": [],
        "gone": False,
        "mig": None,
        **changes,
    }


def instance(uuid, gpu_instance, **changes):
    """A MIG instance: it knows its memory, and nothing of temperature, power or utilisation."""
    none = dict.fromkeys(
        (
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetUtilizationRates",
            "nvmlDeviceGetTemperatureV",
            "nvmlDeviceGetTemperature",
            "nvmlDeviceGetEnforcedPowerLimit",
            "nvmlDeviceGetTemperatureThreshold",
            "nvmlDeviceGetTotalEccErrors",
        ),
        NOT_SUPPORTED,
    )
    return gpu(uuid, **{"name": "MIG 1g.5gb", "gpu_instance": gpu_instance, "errors": none, **changes})


def scenario(*gpus, **changes):
    """A driver with these GPUs.

    `missing` lists symbols it lacks; `init_error` is nvmlInit's code; `poison` is a code that every call of a
    process answers once it saw it, until NVML is initialised again (18: for as long as it lives); `events`
    are (uuid, type, data), each told once to each process.
    """
    return {"gpus": list(gpus), "missing": [], "init_error": None, "poison": None, "events": [], **changes}


@dataclass(frozen=True)
class _Handle:
    uuid: str


class FakeNvml:
    """The functions of `pynvml` that the agent uses."""

    NVMLError = NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlMemory_v2 = 2  # noqa: N815 - the binding's name

    def __init__(self, state):
        self._state = state if callable(state) else lambda: state
        self._poisoned = None
        self._initialised = False
        self._told = 0
        self.calls = []

    # library
    def nvmlInit(self):
        self.calls.append("nvmlInit")
        state = self._state()
        if state["init_error"]:
            raise NVMLError(state["init_error"])
        if self._poisoned == VERSION_MISMATCH:
            raise NVMLError(VERSION_MISMATCH)
        self._poisoned = None
        self._initialised = True

    def nvmlShutdown(self):
        self.calls.append("nvmlShutdown")
        self._initialised = False

    def nvmlSystemGetDriverVersion(self):
        self._enter("nvmlSystemGetDriverVersion")
        return b"580.65.06"  # bytes, as older bindings answer

    def nvmlDeviceGetCount(self):
        return len(self._enter("nvmlDeviceGetCount")["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index):
        state = self._enter("nvmlDeviceGetHandleByIndex")
        found = state["gpus"][index]
        if found["gone"]:
            raise NVMLError(GPU_IS_LOST)
        return _Handle(found["uuid"])

    # a device
    def nvmlDeviceGetUUID(self, handle):
        return self._ask("nvmlDeviceGetUUID", handle)["uuid"]

    def nvmlDeviceGetName(self, handle):
        return self._ask("nvmlDeviceGetName", handle)["name"]

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        device = self._ask("nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo", handle)
        if version:
            return SimpleNamespace(used=device["used"], total=device["total"], reserved=device["reserved"])
        used = device["used"]
        return SimpleNamespace(used=used + device["reserved"] if isinstance(used, int) else used, total=device["total"])

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._ask("nvmlDeviceGetUtilizationRates", handle)["utilization"])

    def nvmlDeviceGetTemperatureV(self, handle, sensor):
        return self._ask("nvmlDeviceGetTemperatureV", handle)["temperature"]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self._ask("nvmlDeviceGetTemperature", handle)["temperature"]

    def nvmlDeviceGetTemperatureThreshold(self, handle, which):
        return self._ask("nvmlDeviceGetTemperatureThreshold", handle)["slowdown"]

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._ask("nvmlDeviceGetPowerUsage", handle)["power_mw"]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)["limit_mw"]

    def nvmlDeviceGetTotalEccErrors(self, handle, error, counter):
        return self._ask("nvmlDeviceGetTotalEccErrors", handle)["ecc"]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)["throttles"]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)["throttles"]

    # MIG
    def nvmlDeviceGetMigMode(self, handle):
        mig = self._ask("nvmlDeviceGetMigMode", handle)["mig"]
        return (0, 0) if mig is None else (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        instances = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle)["mig"]
        if index >= len(instances):
            raise NVMLError(NOT_FOUND)
        return _Handle(instances[index]["uuid"])

    def nvmlDeviceGetGpuInstanceId(self, handle):
        return self._ask("nvmlDeviceGetGpuInstanceId", handle)["gpu_instance"]

    # GPM
    def nvmlGpmQueryDeviceSupport(self, handle):
        return SimpleNamespace(isSupportedDevice=int(self._ask("nvmlGpmQueryDeviceSupport", handle)["sm"] is not None))

    def nvmlGpmSampleAlloc(self):
        return {}

    def nvmlGpmSampleFree(self, sample):
        self.calls.append("nvmlGpmSampleFree")

    def nvmlGpmSampleGet(self, handle, sample):
        sample["sm"] = self._ask("nvmlGpmSampleGet", handle)["sm"]

    def nvmlGpmMigSampleGet(self, parent, gpu_instance, sample):
        instances = self._ask("nvmlGpmMigSampleGet", parent)["mig"]
        sample["sm"] = next(i["sm"] for i in instances if i["gpu_instance"] == gpu_instance)

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)])

    def nvmlGpmMetricsGet(self, wanted):
        assert wanted.numMetrics == 1 and wanted.metrics[0].metricId == 2
        assert wanted.sample1, "the first sample was never taken"
        wanted.metrics[0].value = wanted.sample2["sm"]
        return wanted

    # events
    def nvmlEventSetCreate(self):
        self._enter("nvmlEventSetCreate")
        return set()

    def nvmlEventSetFree(self, events):
        self.calls.append("nvmlEventSetFree")

    def nvmlDeviceGetSupportedEventTypes(self, handle):
        self._ask("nvmlDeviceGetSupportedEventTypes", handle)
        return 0x1F

    def nvmlDeviceRegisterEvents(self, handle, wanted, events):
        self._ask("nvmlDeviceRegisterEvents", handle)
        events.add((handle.uuid, wanted))

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        assert timeout_ms == 0, "the agent must not wait for events"
        state = self._enter("nvmlEventSetWait_v2")
        while self._told < len(state["events"]):
            uuid, kind, data = state["events"][self._told]
            self._told += 1
            if any(uuid == u and wanted & kind for u, wanted in events):
                return SimpleNamespace(device=_Handle(uuid), eventType=kind, eventData=data)
        raise NVMLError(TIMEOUT)

    # how it goes wrong
    def _enter(self, name):
        self.calls.append(name)
        state = self._state()
        self._poisoned = self._poisoned or state["poison"]
        if not self._initialised:
            raise NVMLError(1)
        if self._poisoned:
            raise NVMLError(self._poisoned)
        if name in state["missing"]:
            raise NVMLError(FUNCTION_NOT_FOUND)
        return state

    def _ask(self, name, handle):
        device = _find(self._enter(name)["gpus"], handle.uuid)
        if name in device["hang"]:
            time.sleep(3600)
        if device["gone"]:
            raise NVMLError(GPU_IS_LOST)
        if name in device["errors"]:
            raise NVMLError(device["errors"][name])
        return device


def _find(gpus, uuid):
    for device in gpus:
        if device["uuid"] == uuid:
            return device
        for one in device["mig"] or ():
            if one["uuid"] == uuid:
                return one
    raise NVMLError(NOT_FOUND)


_library = None


def __getattr__(name):
    """The module as a library, for a child process."""
    global _library
    if name.startswith("__"):
        raise AttributeError(name)
    if _library is None:
        path = Path(os.environ["FAKE_NVML"])
        print("NVML writes to stdout too")  # as some libraries do: it must not disturb the conversation
        _library = FakeNvml(lambda: json.loads(path.read_text()))
    return getattr(_library, name)
