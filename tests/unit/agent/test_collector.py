"""One round of collecting, and what is noticed between two."""

from dataclasses import replace

import aiohttp
import pytest
from fakes.agent import FakeReader, FakeSource, device, engine, reading, state
from fakes.engine import running_engine
from headway_agent.collector import Collector
from headway_agent.config import ProbeSettings
from headway_agent.devices.base import (
    DeviceEvent,
    DeviceEventKind,
    DeviceKind,
    DeviceReading,
    DeviceSnapshot,
    LoadBoard,
    MissingReason,
)
from headway_agent.engines.base import EngineReading
from headway_agent.engines.probe import Prober


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(sources=(), pairs=(), **changes):
    readers = {e.address: r for e, r in pairs}
    return Collector(
        sources=list(sources),
        engines=[e for e, _ in pairs],
        reader_for=lambda settings: readers.get(settings.address) or FakeReader(state()),
        wall=lambda: 1000.0,
        clock=changes.pop("clock", Clock()),
        loads=changes.pop("loads", LoadBoard()),
        **changes,
    )


async def test_a_sample_holds_every_device_and_engine_and_is_numbered():
    sources = [FakeSource(device("GPU-a")), FakeSource(device("GPU-b"))]
    collector = make(sources, [(engine("h:1"), FakeReader(state(running=3.0))), (engine("h:2"), FakeReader(state()))])
    first, second = await collector.collect(1.0), await collector.collect(1.0)
    assert [first.sample.sequence, second.sample.sequence] == [1, 2]
    assert first.sample.taken_s == 1000.0
    assert [r.uuid for r in first.sample.devices] == ["GPU-a", "GPU-b"]
    assert [key for key, _ in first.sample.engines] == [("h:1", 0), ("h:2", 0)]
    assert first.sample.engines[0][1].running == 3.0


async def test_the_first_round_changes_everything_and_the_second_nothing():
    collector = make([FakeSource(device("GPU-a"))], [(engine("h:1"), FakeReader(state()))])
    first, second = await collector.collect(1.0), await collector.collect(1.0)
    assert first.devices_changed
    assert [c.endpoint.key for c in first.changes] == [("h:1", 0)]
    assert (second.devices_changed, second.changes, second.events) == (False, (), ())


async def test_a_slow_engine_costs_no_more_than_its_budget_and_is_stale():
    slow, quick = FakeReader(state()), FakeReader(state(running=1.0))
    slow.slow = True
    collector = make([], [(engine("h:1"), slow), (engine("h:2"), quick)])
    collected = await collector.collect(0.1)
    assert dict(collected.sample.engines) == {
        ("h:1", 0): EngineReading.failed(),
        ("h:2", 0): EngineReading(ready=True, running=1.0),
    }
    assert slow.timeouts == [pytest.approx(0.08)]


@pytest.mark.parametrize(
    "after",
    [
        state(ready=False),
        replace(state(), facts=replace(state().facts, models=("n",))),
        replace(state(), facts=replace(state().facts, boot_id="2")),
    ],
)
async def test_an_endpoint_that_goes_down_changes_models_or_restarts_is_told(after):
    reader = FakeReader(state())
    collector = make([], [(engine("h:1"), reader), (engine("h:2"), FakeReader(state()))])
    await collector.collect(1.0)
    reader.state = after
    (change,) = (await collector.collect(1.0)).changes
    assert (change.endpoint.facts, change.endpoint.ready) == (after.facts, after.reading.ready)
    assert not change.removed


async def test_a_device_that_falls_away_and_comes_back_is_an_event_each():
    source = FakeSource(device("GPU-a"))
    collector = make([source])
    await collector.collect(1.0)
    kinds = []
    for now in (
        DeviceReading.absent("GPU-a", MissingReason.LOST),
        DeviceReading.absent("GPU-a", MissingReason.LOST),
        DeviceReading.absent("GPU-a", MissingReason.STALE),
        reading("GPU-a"),
        reading("GPU-a"),
    ):
        source.snapshot = replace(source.snapshot, readings=(now,))
        kinds.append([e.kind for e in (await collector.collect(1.0)).events])
    assert kinds == [[DeviceEventKind.LOST], [], [], [DeviceEventKind.RECOVERED], []]


async def test_events_of_a_source_pass_through():
    source = FakeSource(device("GPU-a"))
    event = DeviceEvent("GPU-a", DeviceEventKind.XID, 1.0, 79)
    source.snapshot = replace(source.snapshot, events=(event,))
    collector = make([source])
    assert (await collector.collect(1.0)).events == (event,)
    assert (await collector.collect(1.0)).events == ()


async def test_another_list_of_devices_is_noticed():
    source = FakeSource(device("GPU-a"))
    collector = make([source])
    await collector.collect(1.0)
    source.snapshot = DeviceSnapshot((device("GPU-a"), device("GPU-b")), source.snapshot.readings)
    assert (await collector.collect(1.0)).devices_changed


@pytest.mark.parametrize(
    ("settings", "uuids"),
    [
        ({"device_indexes": [1]}, ("GPU-b",)),
        ({"device_indexes": [0, 1, 9]}, ("GPU-a", "GPU-b")),
        ({"device_uuids": ["GPU-elsewhere"]}, ("GPU-elsewhere",)),
        ({}, ()),
    ],
)
async def test_an_engines_devices(settings, uuids):
    infos = [
        device("GPU-a", index=0),
        device("GPU-b", index=1),
        device("CPU-x", kind=DeviceKind.CPU, index=0),
    ]
    collector = make([FakeSource(*infos)], [(engine("h:1", **settings), FakeReader(state()))])
    assert (await collector.collect(1.0)).inventory.endpoints[0].device_uuids == uuids


async def test_the_hosts_only_device_is_the_engines():
    collector = make([FakeSource(device("CPU-x", kind=DeviceKind.CPU))], [(engine("h:1"), FakeReader(state()))])
    assert (await collector.collect(1.0)).inventory.endpoints[0].device_uuids == ("CPU-x",)


async def test_the_load_of_engines_is_noted_for_their_devices():
    loads = LoadBoard()
    silent = FakeReader(state())
    busy = FakeReader(state(running=64.0, kv_use=0.5))
    collector = make(
        [FakeSource(device("GPU-a", index=0), device("GPU-b", index=1))],
        [(engine("h:1", device_indexes=[0]), busy), (engine("h:2", device_indexes=[1]), silent)],
        loads=loads,
    )
    await collector.collect(1.0)
    assert {uuid: (load.utilization, load.kv_use) for uuid, load in loads.by_device.items()} == {"GPU-a": (0.5, 0.5)}


async def test_sources_are_started_and_closed():
    source = FakeSource()
    collector = make([source])
    await collector.start()
    await collector.close()
    assert (source.started, source.closed) == (True, True)


async def test_probed_engines_appear_and_are_forgotten_after_a_while():
    clock = Clock()
    async with running_engine() as found, aiohttp.ClientSession() as session:
        port = int(found.address.rpartition(":")[2])
        prober = Prober(ProbeSettings(ports=[port], interval_s=10), session)
        collector = make([], [], prober=prober, clock=clock)
        clock.now = 100.0
        first = await collector.collect(5.0)
        assert [(c.endpoint.key, c.removed) for c in first.changes] == [((found.address, 0), False)]
        found.pages["/v1/models"] = 500
        changes = []
        for _ in range(6):
            clock.now += 11
            changes += (await collector.collect(5.0)).changes
        assert [(c.endpoint.key, c.removed) for c in changes] == [((found.address, 0), True)]
        assert collector.inventory.endpoints == ()
