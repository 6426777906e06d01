"""Each hazard of the field, played by a fake NVML."""

import inspect

import pynvml
import pytest
from fakes.nvml import (
    GIB,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_AVAILABLE_64,
    NOT_SUPPORTED,
    TIMEOUT,
    VERSION_MISMATCH,
    FakeNvml,
    gpu,
    instance,
    scenario,
)
from headway_agent.devices import nvml_reader
from headway_agent.devices.base import DeviceEventKind, DeviceKind, DeviceReading, MissingReason
from headway_agent.devices.nvml_reader import LibraryBrokenError, NvmlReader


def opened(*gpus, **changes):
    library = FakeNvml(scenario(*gpus, **changes))
    reader = NvmlReader(library, wall=lambda: 1000.0)
    reader.open()
    return reader


def test_a_healthy_gpu_is_read_whole():
    reader = opened(gpu("GPU-a", throttles=0x04 | 0x40))
    (info,) = reader.scan()
    assert (info.uuid, info.kind, info.product, info.index) == (
        "GPU-a",
        DeviceKind.GPU,
        "NVIDIA A100-SXM4-40GB",
        0,
    )
    assert (info.memory_total_bytes, info.power_limit_w, info.temperature_slowdown_c) == (
        39.0 * GIB,
        400.0,
        92.0,
    )
    assert info.driver_version == "580.65.06"
    assert reader.read("GPU-a") == DeviceReading(
        "GPU-a", 10.0 * GIB, 0.5, 60.0, 250.0, 0.0, ("sw_power_cap", "hw_thermal")
    )


def test_devices_are_keyed_by_uuid_whatever_their_order():
    first, second = gpu("GPU-a", temperature=40), gpu("GPU-b", temperature=70)
    state = scenario(first, second)
    reader = NvmlReader(FakeNvml(state), wall=lambda: 0.0)
    reader.open()
    state["gpus"].reverse()
    assert [d.uuid for d in reader.scan()] == ["GPU-b", "GPU-a"]
    assert reader.read("GPU-a").temperature_c == 40.0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetTotalEccErrors", "ecc_errors"),
    ],
)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (NOT_SUPPORTED, MissingReason.UNSUPPORTED),
        (NO_PERMISSION, MissingReason.NO_PERMISSION),
        (TIMEOUT, MissingReason.STALE),
    ],
)
def test_one_missing_value_has_its_own_reason_and_leaves_the_others(call, field, code, reason):
    reading = opened(gpu("GPU-a", errors={call: code})).read("GPU-a")
    assert getattr(reading, field) is reason
    assert reading.memory_used_bytes == 10.0 * GIB


def test_unified_memory_without_a_thermometer_is_unsupported():
    """GB10, Jetson, vGPU."""
    calls = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV")
    calls += ("nvmlDeviceGetTemperature",)
    reader = opened(gpu("GPU-a", errors=dict.fromkeys(calls, NOT_SUPPORTED)))
    reading = reader.read("GPU-a")
    assert reading.memory_used_bytes is MissingReason.UNSUPPORTED
    assert reading.temperature_c is MissingReason.UNSUPPORTED
    assert reading.power_w == 250.0


def test_memory_falls_back_to_its_first_version_on_an_old_driver():
    reader = opened(gpu("GPU-a"), missing=["nvmlDeviceGetMemoryInfo_v2"])
    assert reader.read("GPU-a").memory_used_bytes == 11.0 * GIB  # the first version counts the reserved as used


def test_a_binding_newer_than_the_driver_uses_the_older_symbols():
    reader = opened(
        gpu("GPU-a", throttles=0x80),
        missing=[
            "nvmlDeviceGetTemperatureV",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlGpmQueryDeviceSupport",
        ],
    )
    reading = reader.read("GPU-a")
    assert (reading.temperature_c, reading.throttle_reasons) == (60.0, ("power_brake",))


def test_a_symbol_missing_altogether_is_unsupported():
    reader = opened(gpu("GPU-a"), missing=["nvmlDeviceGetPowerUsage"])
    assert reader.read("GPU-a").power_w is MissingReason.UNSUPPORTED


def test_a_binding_older_than_a_function_is_unsupported():
    class OldBinding(FakeNvml):
        nvmlDeviceGetTemperatureV = property()  # noqa: N815 - raises AttributeError, as a missing name does
        nvmlDeviceGetPowerUsage = property()  # noqa: N815

    reader = NvmlReader(OldBinding(scenario(gpu("GPU-a"))), wall=lambda: 0.0)
    reader.open()
    assert reader.read("GPU-a").temperature_c == 60.0
    assert reader.read("GPU-a").power_w is MissingReason.UNSUPPORTED


@pytest.mark.parametrize("nothing", ["[N/A]", NOT_AVAILABLE_64, 0xFFFFFFFF, None])
def test_not_available_is_no_number(nothing):
    reading = opened(gpu("GPU-a", power_mw=nothing, used=nothing)).read("GPU-a")
    assert reading.power_w is MissingReason.UNSUPPORTED
    assert reading.memory_used_bytes is MissingReason.UNSUPPORTED


def test_a_gpu_off_the_bus_is_lost_and_the_other_is_not():
    state = scenario(gpu("GPU-a"), gpu("GPU-b"))
    reader = NvmlReader(FakeNvml(state), wall=lambda: 0.0)
    reader.open()
    state["gpus"][0]["gone"] = True
    assert reader.read("GPU-a") == DeviceReading.absent("GPU-a", MissingReason.LOST)
    assert reader.read("GPU-b").temperature_c == 60.0
    assert [d.uuid for d in reader.scan()] == ["GPU-b"]
    assert reader.read("GPU-a").lost


def test_one_lost_answer_makes_the_whole_device_lost():
    reading = opened(gpu("GPU-a", errors={"nvmlDeviceGetPowerUsage": GPU_IS_LOST})).read("GPU-a")
    assert reading == DeviceReading.absent("GPU-a", MissingReason.LOST)


def test_a_driver_upgraded_under_us_breaks_the_library():
    state = scenario(gpu("GPU-a"))
    reader = NvmlReader(FakeNvml(state), wall=lambda: 0.0)
    reader.open()
    state["poison"] = VERSION_MISMATCH
    with pytest.raises(LibraryBrokenError, match="18"):
        reader.read("GPU-a")


@pytest.mark.parametrize("code", [9, 12, VERSION_MISMATCH])
def test_no_driver_breaks_the_library(code):
    with pytest.raises(LibraryBrokenError, match=str(code)):
        opened(init_error=code)


def test_opening_again_shuts_down_first():
    state = scenario(gpu("GPU-a"))
    library = FakeNvml(state)
    reader = NvmlReader(library, wall=lambda: 0.0)
    reader.open()
    reader.open()
    assert [c for c in library.calls if c in ("nvmlInit", "nvmlShutdown")] == [
        "nvmlInit",
        "nvmlShutdown",
        "nvmlInit",
    ]
    assert reader.read("GPU-a").temperature_c == 60.0


def test_a_mig_parent_has_no_utilisation_and_its_instances_are_read():
    parent = gpu(
        "GPU-p",
        errors={"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED},
        mig=[instance("MIG-1", 7, used=2 * GIB, total=5 * GIB, reserved=0)],
    )
    reader = opened(parent)
    infos = {d.uuid: d for d in reader.scan()}
    assert (infos["MIG-1"].kind, infos["MIG-1"].parent_uuid) == (DeviceKind.MIG, "GPU-p")
    assert infos["MIG-1"].memory_total_bytes == 5.0 * GIB
    assert reader.read("GPU-p").utilization is MissingReason.UNSUPPORTED
    one = reader.read("MIG-1")
    assert one.memory_used_bytes == 2.0 * GIB
    assert one.temperature_c == 60.0  # the chip is the parent's
    assert one.power_w is MissingReason.UNSUPPORTED
    assert one.utilization is MissingReason.UNSUPPORTED


def test_hopper_tells_sm_activity_from_the_second_look_on():
    reader = opened(gpu("GPU-h", sm=93.0, utilization=100))
    assert reader.read("GPU-h").utilization == 1.0  # nothing to compare with yet: utilization.gpu
    assert reader.read("GPU-h").utilization == 0.93


def test_hopper_mig_instances_tell_their_own_sm_activity():
    parent = gpu("GPU-p", sm=0.0, mig=[instance("MIG-1", 7, sm=25.0), instance("MIG-2", 9, sm=75.0)])
    reader = opened(parent)
    for uuid in ("MIG-1", "MIG-2"):
        reader.read(uuid)
    assert [reader.read(uuid).utilization for uuid in ("MIG-1", "MIG-2")] == [0.25, 0.75]


def test_gpm_that_may_not_be_read_falls_back():
    reader = opened(gpu("GPU-h", sm=93.0, errors={"nvmlGpmSampleGet": NO_PERMISSION}))
    assert [reader.read("GPU-h").utilization for _ in range(2)] == [0.5, 0.5]


def test_xid_and_ecc_come_from_the_event_set_once_each():
    events = [("GPU-a", 0x8, 79), ("GPU-a", 0x2, 0)]
    reader = opened(gpu("GPU-a"), events=events)
    xid, ecc = reader.events()
    assert (xid.uuid, xid.kind, xid.xid, xid.at_s) == ("GPU-a", DeviceEventKind.XID, 79, 1000.0)
    assert ecc.kind is DeviceEventKind.ECC_DOUBLE_BIT
    assert reader.events() == ()


def test_a_gpu_without_events_does_not_silence_the_others():
    quiet = gpu("GPU-a", errors={"nvmlDeviceGetSupportedEventTypes": NOT_SUPPORTED})
    reader = opened(quiet, gpu("GPU-b"), events=[("GPU-b", 0x8, 31)])
    assert [e.xid for e in reader.events()] == [31]


def test_no_events_at_all_is_no_error():
    reader = opened(gpu("GPU-a"), missing=["nvmlEventSetCreate"], events=[("GPU-a", 0x8, 31)])
    assert reader.events() == ()


def test_no_process_list_is_ever_read():
    """Its struct changed between drivers, and wrong PIDs came of it."""
    reader = opened(gpu("GPU-a"))
    reader.read("GPU-a")
    assert not [c for c in reader.library.calls if "Process" in c]


def test_the_fake_has_only_what_the_real_binding_has():
    functions = {n: f for n, f in vars(FakeNvml).items() if n.startswith("nvml") and callable(f)}
    assert functions
    for name, fake in functions.items():
        real = getattr(pynvml, name)
        _self, *ours = inspect.signature(fake).parameters
        theirs = inspect.signature(real).parameters.values()
        needed = [p for p in theirs if p.default is inspect.Parameter.empty]
        assert len(needed) <= len(ours) <= len(theirs), name
    for name in ("NVMLError", "NVML_GPM_METRICS_GET_VERSION", "nvmlMemory_v2", "c_nvmlGpmMetricsGet_t"):
        assert hasattr(pynvml, name)


def test_the_codes_and_bits_are_the_bindings():
    codes = {
        "UNINITIALIZED": nvml_reader._UNINITIALIZED,
        "INVALID_ARGUMENT": nvml_reader._INVALID_ARGUMENT,
        "NOT_SUPPORTED": nvml_reader._NOT_SUPPORTED,
        "NO_PERMISSION": nvml_reader._NO_PERMISSION,
        "NOT_FOUND": nvml_reader._NOT_FOUND,
        "DRIVER_NOT_LOADED": nvml_reader._DRIVER_NOT_LOADED,
        "LIBRARY_NOT_FOUND": nvml_reader._LIBRARY_NOT_FOUND,
        "FUNCTION_NOT_FOUND": nvml_reader._FUNCTION_NOT_FOUND,
        "GPU_IS_LOST": nvml_reader._GPU_IS_LOST,
        "RESET_REQUIRED": nvml_reader._RESET_REQUIRED,
        "LIB_RM_VERSION_MISMATCH": nvml_reader._VERSION_MISMATCH,
        "VGPU_ECC_NOT_SUPPORTED": nvml_reader._VGPU_ECC_NOT_SUPPORTED,
        "ARGUMENT_VERSION_MISMATCH": nvml_reader._ARGUMENT_VERSION_MISMATCH,
        "DEPRECATED": nvml_reader._DEPRECATED,
        "GPU_NOT_FOUND": nvml_reader._GPU_NOT_FOUND,
    }
    assert codes == {name: getattr(pynvml, f"NVML_ERROR_{name}") for name in codes}
    assert pynvml.NVML_GPM_METRIC_SM_UTIL == nvml_reader._GPM_SM_UTILIZATION
    assert pynvml.nvmlEventTypeXidCriticalError == nvml_reader._EVENT_XID
    assert pynvml.nvmlEventTypeDoubleBitEccError == nvml_reader._EVENT_ECC_DOUBLE_BIT
    assert pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN == nvml_reader._THRESHOLD_SLOWDOWN
    assert pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED == nvml_reader._ECC_UNCORRECTED
    assert pynvml.NVML_VOLATILE_ECC == nvml_reader._ECC_VOLATILE
    assert {
        pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
        pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
    } == nvml_reader._THROTTLES
