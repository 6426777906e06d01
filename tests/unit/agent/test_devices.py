"""CPU and simulated devices."""

import re
from typing import get_args

import pytest
from headway_agent.config import AgentConfig, CpuDevice, DeviceSettings, NvmlDevices, SimulatedDevices
from headway_agent.devices.base import (
    DeviceContext,
    DeviceEventKind,
    DeviceKind,
    EngineLoad,
    LoadBoard,
    MissingReason,
)
from headway_agent.devices.catalog import device_source
from headway_agent.devices.cpu import CpuSource, host_id, product_name
from headway_agent.devices.nvml import NvmlSource
from headway_agent.devices.simulated import SimulatedSource, curve_at


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def context():
    return DeviceContext("node-1", Clock(), lambda: 1700000000.0, LoadBoard())


async def simulated(context, **settings):
    source = SimulatedSource(SimulatedDevices(kind="simulated", **settings), context)
    await source.start()
    return source


def test_the_catalogue_makes_a_source_of_every_kind(context):
    made = {
        kind: device_source(kind(kind=kind.model_fields["kind"].annotation.__args__[0]), context)
        for kind in get_args(DeviceSettings)
    }
    assert {kind: type(source) for kind, source in made.items()} == {
        NvmlDevices: NvmlSource,
        CpuDevice: CpuSource,
        SimulatedDevices: SimulatedSource,
    }


async def test_the_host_is_one_cpu_device(context):
    source = CpuSource(context)
    await source.start()
    snapshot = await source.read(1.0)
    (device,), (reading,) = snapshot.devices, snapshot.readings
    assert device.kind is DeviceKind.CPU
    assert device.uuid == reading.uuid
    assert re.fullmatch(r"CPU-[0-9a-f-]{36}", device.uuid)
    assert 0 < reading.memory_used_bytes < device.memory_total_bytes
    assert 0 <= reading.utilization <= 1
    assert reading.power_w is MissingReason.UNSUPPORTED
    assert (await source.read(1.0)).devices == snapshot.devices


def test_hosts_of_one_image_differ_and_a_host_stays_itself(tmp_path):
    machine = tmp_path / "machine-id"
    machine.write_text("abc\n")
    assert host_id("a", machine) == host_id("a", machine)
    assert len({host_id("a", machine), host_id("b", machine), host_id("a", tmp_path / "none")}) == 3


def test_a_processor_without_a_name(tmp_path):
    assert product_name(tmp_path / "none").startswith("CPU x")


async def test_simulated_gpus_keep_their_uuids_over_restarts_and_differ_by_node(context):
    first, second = await simulated(context, count=2), await simulated(context, count=2)
    uuids = [d.uuid for d in (await first.read(1.0)).devices]
    assert len(set(uuids)) == 2
    assert [d.uuid for d in (await second.read(1.0)).devices] == uuids
    other = await simulated(DeviceContext("node-2", Clock(), lambda: 0.0, LoadBoard()), count=2)
    assert not set(uuids) & {d.uuid for d in (await other.read(1.0)).devices}


async def test_a_simulated_gpu_follows_its_curves(context):
    curves = {
        "memory": [(0, 0.5), (10, 1.0)],
        "utilization": [(0, 0.0), (10, 1.0)],
        "power_w": [(0, 100), (10, 300)],
    }
    source = await simulated(context, memory_gib=40, curves=curves)
    context.clock.now += 5
    (reading,) = (await source.read(1.0)).readings
    assert (reading.memory_used_bytes, reading.utilization, reading.power_w) == (
        0.75 * 40 * 2**30,
        0.5,
        200.0,
    )
    assert reading.temperature_c == 32 + (82 - 32) * 0.5


async def test_a_simulated_gpu_follows_its_engine(context):
    source = await simulated(context)
    (device,) = (await source.read(1.0)).devices
    context.loads.by_device = {device.uuid: EngineLoad(utilization=1.0, kv_use=0.5)}
    (reading,) = (await source.read(1.0)).readings
    assert (reading.utilization, reading.power_w) == (1.0, 400.0)


async def test_scripted_faults(context):
    faults = [
        {"kind": "hot", "at_s": 10, "for_s": 5},
        {"kind": "stale", "at_s": 20, "for_s": 5, "device": 1},
        {"kind": "xid", "at_s": 30, "xid": 48, "device": 1},
        {"kind": "lost", "at_s": 40},
    ]
    source = await simulated(context, count=2, faults=faults)

    async def at(second):
        context.clock.now = 50.0 + second
        return await source.read(1.0)

    healthy = (await at(0)).readings
    assert all(r.measured and not r.throttle_reasons for r in healthy)
    hot, cool = (await at(12)).readings
    assert (hot.temperature_c, hot.throttle_reasons, cool) == (95.0, ("hw_thermal",), healthy[1])
    assert [r.utilization for r in (await at(21)).readings] == [0.0, MissingReason.STALE]
    (event,) = (await at(31)).events
    assert (event.kind, event.xid, event.uuid) == (DeviceEventKind.XID, 48, healthy[1].uuid)
    assert (await at(32)).events == ()
    assert [r.lost for r in (await at(1000)).readings] == [True, False]


@pytest.mark.parametrize(("t", "value"), [(-1, 1.0), (0, 1.0), (1, 2.0), (2, 3.0), (3, 2.0), (99, 1.0)])
def test_a_curve(t, value):
    assert curve_at([(0, 1.0), (2, 3.0), (4, 1.0)], t) == value


def test_every_kind_can_be_configured_at_once():
    config = AgentConfig(devices=[{"kind": k} for k in ("nvml", "cpu", "simulated")])
    assert [d.kind for d in config.devices] == ["nvml", "cpu", "simulated"]
