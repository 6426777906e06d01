"""The map: every device once, in a steady order, with its state."""

import json

import pytest
from fakes.console import fill, rigged
from fakes.rig import desired_state, device_sample, gpu
from headway_console import heatmap
from headway_scheduler.domain.device import DeviceEvent, DeviceEventKind, DeviceKind, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, SchedulingState
from headway_scheduler.domain.measurement import Measurement, MissingReason
from headway_scheduler.domain.telemetry import Hello, Sample
from hypothesis import given
from hypothesis import strategies as st


async def fleet_of(*devices, samples=(), endpoints=()):
    scheduler = await rigged(desired_state())
    hello = Hello("n", "i", "b", devices=devices, endpoints=endpoints)
    node = scheduler.fleet.connect(hello, 0.0)
    scheduler.fleet.apply_sample(node, Sample(1, tuple(samples), ()), 0.0)
    return scheduler.fleet, node


@given(st.sampled_from(list(heatmap.METRICS)), st.integers(-1, 2000))
def test_levels_are_ten_and_rise_with_the_value(metric, value):
    found = heatmap.level(metric, value)
    assert -1 <= found <= 9
    assert (found == -1) == (value < 0)
    assert heatmap.level(metric, value + 1) >= found


@pytest.mark.parametrize(("engines", "shown"), [(0.25, 25), (0.0, 0), (float("nan"), 90)])
async def test_pressure_is_the_engines_where_it_says_and_the_memorys_else(engines, shown):
    spec = EndpointSpec("h:1", models=("m",), device_uuids=("a",))
    fleet, node = await fleet_of(
        gpu("a"), gpu("b"), gpu("c"), samples=[device_sample("a", 90), device_sample("b", 40)], endpoints=(spec,)
    )
    fleet.columns.memory_pressure[fleet.endpoints["h:1@0"].slot] = engines
    a, b, c = heatmap.read_node(fleet, node).cells
    assert (a.value("pressure"), b.value("pressure"), c.value("pressure")) == (shown, 40, -1)
    assert (c.text("pressure"), b.text("pressure"), c.text("heat")) == ("unknown", "40 %", "unknown")


async def test_a_lost_gpu_takes_its_instances_with_it():
    fleet, node = await fleet_of(gpu("a"), gpu("m", kind=DeviceKind.MIG, parent_uuid="a"), gpu("b"))
    fleet.apply_device_event(node, DeviceEvent("a", DeviceEventKind.LOST))
    assert [cell.state for cell in heatmap.read_node(fleet, node).cells] == ["lost", "lost", "ok"]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda node: setattr(node, "stale", True), "stale"),
        (lambda node: setattr(node, "connected", False), "stale"),
        (lambda node: setattr(node, "state", SchedulingState.DRAINING), "draining"),
        (lambda node: setattr(node, "state", SchedulingState.CORDONED), "cordoned"),
        (lambda node: node.failures.update(a=DeviceEvent("a", DeviceEventKind.XID, 79)), "failed"),
        (lambda node: node.samples.update(a=device_sample("a", 1, throttle_reasons=("hw_thermal",))), "throttled"),
        (lambda node: node.samples.update(a=device_sample("a", 1, throttle_reasons=("sw_power_cap",))), "ok"),
        (
            lambda node: node.samples.update(a=DeviceSample("a", Measurement(None, MissingReason.LOST))),
            "lost",
        ),
    ],
)
async def test_states(change, state):
    fleet, node = await fleet_of(gpu("a"), samples=[device_sample("a", 1)])
    change(node)
    (cell,) = heatmap.read_node(fleet, node).cells
    assert cell.state == state
    assert cell.state in heatmap.STATES


async def test_all_are_told_once_in_the_order_of_names():
    scheduler = await rigged(desired_state())
    for name in ("node-10", "node-2", "alpha"):
        scheduler.fleet.connect(Hello(name, "i", "b", devices=(gpu(f"{name}-0"), gpu(f"{name}-1"))), 0.0)
    nodes = await heatmap.read_all(scheduler.fleet)
    assert [node.id for node in nodes] == ["alpha", "node-2", "node-10"]
    told = heatmap.told(nodes)
    assert {len(told[name]) for name in (*heatmap.METRICS, "states")} == {6}
    json.dumps(told)


async def test_the_layout_changes_with_the_devices_and_with_nothing_else():
    scheduler = await rigged(desired_state())
    fill(scheduler.fleet, 3, 0.0)
    before = heatmap.layout_of(await heatmap.read_all(scheduler.fleet))
    node = scheduler.fleet.nodes["gpu-001"]
    node.samples.clear()
    assert heatmap.layout_of(await heatmap.read_all(scheduler.fleet)) == before
    scheduler.fleet.forget_node("gpu-001")
    assert heatmap.layout_of(await heatmap.read_all(scheduler.fleet)) != before


async def test_a_large_fleet_lets_decisions_pass():
    import asyncio

    scheduler = await rigged(desired_state())
    fill(scheduler.fleet, 100, 0.0, devices=1)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await heatmap.read_all(scheduler.fleet)
    counting.cancel()
    assert turns >= 3
