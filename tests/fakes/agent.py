"""What a collector reads, scripted: a device source and an engine reader that say what a test tells them."""

import asyncio
import contextlib
from dataclasses import replace

from headway_agent.config import EngineSettings
from headway_agent.devices.base import DeviceInfo, DeviceKind, DeviceReading, DeviceSnapshot
from headway_agent.engines.base import EngineFacts, EngineReading, EngineState
from headway_agent.inventory import Collected, Endpoint, EndpointChange, Inventory, Sample


def device(uuid, **changes):
    return replace(DeviceInfo(uuid, DeviceKind.GPU, "Fake GPU", memory_total_bytes=40.0), **changes)


def reading(uuid, **changes):
    return replace(DeviceReading(uuid, 10.0, 0.5, 60.0, 250.0, 0.0), **changes)


def engine(address="10.0.0.1:8000", **settings):
    return EngineSettings(address=address, **settings)


def state(ready=True, **reading):
    return EngineState(EngineFacts(models=("m",)), EngineReading(ready=ready, **reading))


def endpoint(address="10.0.0.1:8000", **changes):
    return replace(Endpoint(engine(address), EngineFacts(models=("m",)), ("GPU-a",), ready=True), **changes)


def collected(sequence, events=(), changes=(), devices_changed=False, inventory=None):
    """One round, as a collector would hand it to the outboxes."""
    return Collected(
        Sample(
            sequence,
            1000.0 + sequence,
            (reading("GPU-a"),),
            ((("10.0.0.1:8000", 0), EngineReading(ready=True)),),
        ),
        inventory or Inventory((device("GPU-a"),), (endpoint(),)),
        tuple(events),
        tuple(changes),
        devices_changed,
    )


def change(address="10.0.0.1:8000"):
    return EndpointChange(endpoint(address))


class FakeSource:
    """A device source with a snapshot to be set."""

    def __init__(self, *infos):
        self.snapshot = DeviceSnapshot(infos, tuple(reading(i.uuid) for i in infos))
        self.started = self.closed = False

    async def start(self):
        self.started = True

    async def read(self, budget_s):
        now, self.snapshot = self.snapshot, replace(self.snapshot, events=())
        return now

    async def close(self):
        self.closed = True


class FakeReader:
    """An engine reader with a state to be set; `slow` makes it use up its time, as a real one that fails."""

    def __init__(self, state):
        self.state = state
        self.slow = False
        self.timeouts = []

    async def read(self, timeout_s):
        self.timeouts.append(timeout_s)
        if self.slow:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
            return EngineState(self.state.facts, EngineReading.failed())
        return self.state
