"""The child process that reads NVML: a real one, with a fake library inside."""

import json
import os
import sys
from pathlib import Path

import pytest
from fakes.nvml import UNKNOWN, VERSION_MISMATCH, gpu, instance, scenario
from fakes.waiting import eventually
from headway_agent.devices.base import DeviceReading, MissingReason
from headway_agent.devices.nvml import NvmlSource, NvmlTimes

TESTS = Path(__file__).parents[2]
QUICK = NvmlTimes(
    open_s=20.0,
    request_s=0.5,
    max_age_s=0.4,
    rescan_s=0.05,
    reopen_lost_s=0.05,
    retry_s=0.05,
    retry_max_s=0.2,
)


class Clock:
    """Real time, with jumps."""

    def __init__(self):
        import time

        self._time, self.ahead = time, 0.0

    def __call__(self):
        return self._time.monotonic() + self.ahead


class Host:
    """A host whose GPUs a test can change."""

    def __init__(self, path):
        self.path = path

    def has(self, *gpus, **changes):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(scenario(*gpus, **changes)))
        new.rename(self.path)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "nvml.json")


@pytest.fixture
async def source(host):
    env = {**os.environ, "FAKE_NVML": str(host.path), "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    source = NvmlSource(Clock(), "fakes.nvml", QUICK, env)
    await source.start()
    yield source
    await source.close()


async def reading(source, uuid):
    snapshot = await source.read(0.3)
    return next((r for r in snapshot.readings if r.uuid == uuid), None)


async def measured(source, uuid):
    async def is_measured():
        found = await reading(source, uuid)
        return found if found and found.measured else None

    return await eventually(is_measured)


async def missing(source, uuid, reason):
    async def is_missing():
        return await reading(source, uuid) == DeviceReading.absent(uuid, reason)

    await eventually(is_missing)


async def test_reads_in_a_child_and_ends_it(host, source):
    host.has(gpu("GPU-a"), gpu("GPU-b"))
    assert (await measured(source, "GPU-b")).power_w == 250.0
    process = source._child.process
    await source.close()
    assert process.returncode == 0


async def test_a_hanging_gpu_is_stale_and_the_others_are_read_on(host, source):
    host.has(gpu("GPU-a"), gpu("GPU-b"))
    await measured(source, "GPU-a")
    first = source._child.process.pid
    host.has(gpu("GPU-a", hang=["nvmlDeviceGetPowerUsage"]), gpu("GPU-b", temperature=71))
    await missing(source, "GPU-a", MissingReason.STALE)

    async def other_is_fresh():
        found = await reading(source, "GPU-b")
        return found.temperature_c == 71.0

    await eventually(other_is_fresh)
    assert source._child.process.pid != first
    host.has(gpu("GPU-a"), gpu("GPU-b"))
    await measured(source, "GPU-a")


async def test_a_child_that_outlives_its_kill_is_not_joined_by_a_second(host, source):
    """It hangs in the kernel: SIGKILL waits there too."""
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")
    process = source._child.process
    source._child.killed = True
    await missing(source, "GPU-a", MissingReason.STALE)
    assert source._child.process is process
    process.kill()
    await measured(source, "GPU-a")
    assert source._child.process is not process


async def test_a_killed_child_is_replaced(host, source):
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")
    first = source._child.process
    first.kill()
    await first.wait()
    host.has(gpu("GPU-a", temperature=33))

    async def is_new():
        return (await reading(source, "GPU-a")).temperature_c == 33.0

    await eventually(is_new)
    assert source._child.process.pid != first.pid


async def test_a_driver_upgraded_under_the_agent_needs_a_new_process(host, source):
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")
    first = source._child.process.pid
    host.has(gpu("GPU-a"), poison=VERSION_MISMATCH)
    await missing(source, "GPU-a", MissingReason.STALE)
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")
    assert source._child.process.pid != first


async def test_a_container_that_lost_nvml_initialises_it_again(host, source):
    """UNKNOWN to everything: it looks healthy and tells nothing."""
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")
    host.has(gpu("GPU-a"), poison=UNKNOWN)
    await missing(source, "GPU-a", MissingReason.STALE)
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")


async def test_a_lost_gpu_stays_listed_as_lost_and_comes_back(host, source):
    host.has(gpu("GPU-a"), gpu("GPU-b"))
    await measured(source, "GPU-a")
    host.has(gpu("GPU-a", gone=True), gpu("GPU-b"))
    await missing(source, "GPU-a", MissingReason.LOST)
    assert {d.uuid for d in (await source.read(0.3)).devices} == {"GPU-a", "GPU-b"}
    assert (await measured(source, "GPU-b")).power_w == 250.0
    host.has(gpu("GPU-a"), gpu("GPU-b"))
    await measured(source, "GPU-a")


async def test_mig_instances_come_and_go(host, source):
    host.has(gpu("GPU-p", mig=[instance("MIG-1", 1)]))
    await measured(source, "MIG-1")
    host.has(gpu("GPU-p", mig=[instance("MIG-2", 2)]))
    await measured(source, "MIG-2")

    async def first_is_gone():
        return await reading(source, "MIG-1") is None

    await eventually(first_is_gone)


async def test_a_host_without_a_driver_has_no_devices_until_it_gets_one(host, source):
    host.has(init_error=9)
    snapshot = await source.read(5.0)
    assert snapshot.devices == ()
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")


async def test_values_that_stop_moving_on_a_busy_gpu_are_stale(host, source):
    host.has(gpu("GPU-busy"), gpu("GPU-idle", utilization=0))
    await measured(source, "GPU-busy")
    source.clock.ahead += QUICK.frozen_s + 1

    async def frozen():
        snapshot = await source.read(0.3)
        return {r.uuid: r.measured for r in snapshot.readings} == {"GPU-busy": False, "GPU-idle": True}

    await eventually(frozen)
    host.has(gpu("GPU-busy", power_mw=250_001), gpu("GPU-idle", utilization=0))
    await measured(source, "GPU-busy")


async def test_events_reach_the_agent(host, source):
    host.has(gpu("GPU-a"))
    await measured(source, "GPU-a")
    host.has(gpu("GPU-a"), events=[("GPU-a", 0x8, 48)])

    async def told():
        return [e.xid for e in (await source.read(0.3)).events]

    assert await eventually(told) == [48]


async def test_a_library_that_cannot_be_imported_is_no_crash(host):
    source = NvmlSource(Clock(), "no_such_library", QUICK)
    assert (await source.read(5.0)).devices == ()
    await source.close()
