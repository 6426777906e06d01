"""Gathers one sample: devices and engines, all at once, each within the same budget."""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from headway_agent.config import EngineSettings
from headway_agent.devices.base import (
    DeviceEvent,
    DeviceEventKind,
    DeviceInfo,
    DeviceKind,
    DeviceReading,
    DeviceSnapshot,
    DeviceSource,
    EngineLoad,
    LoadBoard,
    MissingReason,
)
from headway_agent.engines.base import EngineReader, EngineState
from headway_agent.engines.probe import Prober
from headway_agent.inventory import (
    Collected,
    Endpoint,
    EndpointChange,
    EndpointKey,
    Inventory,
    Sample,
    endpoint_key,
)

log = structlog.get_logger(__name__)

_BUDGET_SHARE = 0.8
"""Of the interval: a round must end before the next begins."""
_SEQS_FULL = 256.0
"""Requests at which a device whose engine does not tell its limit counts as fully used."""
_FORGET_ROUNDS = 5
"""A probed engine that has not answered for so many probes is gone."""


@dataclass(frozen=True, slots=True)
class _Engine:
    settings: EngineSettings
    reader: EngineReader


@dataclass(slots=True)
class _Found:
    """An engine that probing found."""

    engine: _Engine
    missed: int = 0


@dataclass(slots=True)
class Collector:
    """Owns the sources and readers, numbers the samples, and notices what changed between two rounds."""

    sources: Sequence[DeviceSource]
    engines: Sequence[EngineSettings]
    reader_for: Callable[[EngineSettings], EngineReader]
    wall: Callable[[], float]
    clock: Callable[[], float]
    loads: LoadBoard
    prober: Prober | None = None
    inventory: Inventory = field(default_factory=Inventory)
    _configured: list[_Engine] = field(init=False)
    _found: dict[EndpointKey, _Found] = field(default_factory=dict)
    _probed_at: float = -math.inf
    _sequence: int = 0
    _lost: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Make a reader for each configured engine."""
        self._configured = [_Engine(e, self.reader_for(e)) for e in self.engines]

    async def start(self) -> None:
        """Start every device source."""
        for source in self.sources:
            await source.start()

    async def close(self) -> None:
        """Close every device source, in reverse order."""
        for source in reversed(self.sources):
            await source.close()

    async def collect(self, interval_s: float) -> Collected:
        """One round. What does not answer in time is stale in the sample; it never delays the next round."""
        budget_s = interval_s * _BUDGET_SHARE
        gone = await self._probe(budget_s)
        engines = [*self._configured, *(f.engine for f in self._found.values())]
        snapshots, states = await asyncio.gather(
            asyncio.gather(*(source.read(budget_s) for source in self.sources)),
            asyncio.gather(*(engine.reader.read(budget_s) for engine in engines)),
        )
        snapshot = _merge(snapshots)
        endpoints = tuple(
            _endpoint(engine.settings, state, snapshot.devices) for engine, state in zip(engines, states, strict=True)
        )
        self._note_loads(endpoints, states)
        return self._collected(snapshot, endpoints, states, gone)

    def _collected(
        self,
        snapshot: DeviceSnapshot,
        endpoints: tuple[Endpoint, ...],
        states: Sequence[EngineState],
        gone: set[EndpointKey],
    ) -> Collected:
        before, self.inventory = self.inventory, Inventory(snapshot.devices, endpoints)
        self._sequence += 1
        readings = tuple((e.key, s.reading) for e, s in zip(endpoints, states, strict=True))
        return Collected(
            sample=Sample(self._sequence, self.wall(), snapshot.readings, readings),
            inventory=self.inventory,
            events=(*snapshot.events, *self._lost_and_found(snapshot.readings)),
            changes=_changes(before.endpoints, endpoints, gone),
            devices_changed=before.devices != snapshot.devices,
        )

    def _lost_and_found(self, readings: Iterable[DeviceReading]) -> list[DeviceEvent]:
        """An event for each device that fell away or came back since the last round."""
        events = []
        for reading in readings:
            if reading.lost and reading.uuid not in self._lost:
                self._lost.add(reading.uuid)
                events.append(DeviceEvent(reading.uuid, DeviceEventKind.LOST, self.wall()))
                log.warning("device_lost", device=reading.uuid)
            elif reading.measured and reading.uuid in self._lost:
                self._lost.discard(reading.uuid)
                events.append(DeviceEvent(reading.uuid, DeviceEventKind.RECOVERED, self.wall()))
                log.info("device_recovered", device=reading.uuid)
        return events

    async def _probe(self, budget_s: float) -> set[EndpointKey]:
        """Look for engines when it is time; says which are gone."""
        if self.prober is None or self.clock() - self._probed_at < self.prober.settings.interval_s:
            return set()
        self._probed_at = self.clock()
        found = await self.prober.find({e.settings.base_url for e in self._configured}, budget_s)
        answered = {endpoint_key(settings) for settings in found}
        for settings in found:
            known = self._found.get(endpoint_key(settings))
            if known is None:
                self._found[endpoint_key(settings)] = _Found(_Engine(settings, self.reader_for(settings)))
                log.info("engine_found", endpoint=settings.address, engine=settings.engine)
        gone = set()
        for key, engine in list(self._found.items()):
            engine.missed = 0 if key in answered else engine.missed + 1
            if engine.missed >= _FORGET_ROUNDS:
                del self._found[key]
                gone.add(key)
        return gone

    def _note_loads(self, endpoints: Iterable[Endpoint], states: Iterable[EngineState]) -> None:
        """Tell simulated devices how busy their engines are; a silent engine leaves them alone."""
        loads: dict[str, EngineLoad] = {}
        for endpoint, state in zip(endpoints, states, strict=True):
            load = _load(state)
            for uuid in endpoint.device_uuids if load else ():
                assert load is not None  # noqa: S101 - the loop is empty without it
                old = loads.get(uuid, EngineLoad(0.0, 0.0))
                loads[uuid] = EngineLoad(min(1.0, old.utilization + load.utilization), max(old.kv_use, load.kv_use))
        self.loads.by_device = loads


def _load(state: EngineState) -> EngineLoad | None:
    running, kv_use, seqs = state.reading.running, state.reading.kv_use, state.facts.max_num_seqs
    if isinstance(running, MissingReason):
        return None
    full = _SEQS_FULL if isinstance(seqs, MissingReason) else seqs
    # One request already keeps most of a GPU's multiprocessors busy: the square root rises early.
    busy = min(1.0, math.sqrt(running / full)) if full > 0 else 0.0
    return EngineLoad(busy, 0.0 if isinstance(kv_use, MissingReason) else kv_use)


def _merge(snapshots: Iterable[DeviceSnapshot]) -> DeviceSnapshot:
    parts = list(snapshots)
    return DeviceSnapshot(
        tuple(d for part in parts for d in part.devices),
        tuple(r for part in parts for r in part.readings),
        tuple(e for part in parts for e in part.events),
    )


def _endpoint(settings: EngineSettings, state: EngineState, devices: Sequence[DeviceInfo]) -> Endpoint:
    return Endpoint(settings, state.facts, _devices_of(settings, devices), state.reading.ready)


def _devices_of(settings: EngineSettings, devices: Sequence[DeviceInfo]) -> tuple[str, ...]:
    """The UUIDs an engine uses: named, by index among the GPUs, or the host's only device."""
    if settings.device_uuids or settings.device_indexes:
        by_index = {d.index: d.uuid for d in devices if d.kind is DeviceKind.GPU}
        indexed = (by_index[i] for i in settings.device_indexes if i in by_index)
        return (*settings.device_uuids, *indexed)
    return (devices[0].uuid,) if len(devices) == 1 else ()


def _changes(
    before: Sequence[Endpoint], after: Sequence[Endpoint], gone: set[EndpointKey]
) -> tuple[EndpointChange, ...]:
    old = {e.key: e for e in before}
    changed = [EndpointChange(e) for e in after if old.get(e.key) != e]
    removed = [EndpointChange(old[key], removed=True) for key in gone if key in old]
    for change in (*changed, *removed):
        _log_change(old.get(change.endpoint.key), change)
    return (*changed, *removed)


def _log_change(old: Endpoint | None, change: EndpointChange) -> None:
    new = change.endpoint
    address, rank = new.key
    facts = {"endpoint": address, "dp_rank": rank, "ready": new.ready, "models": new.facts.models}
    if change.removed:
        log.info("endpoint_removed", **facts)
    elif old is None:
        log.info("endpoint_appeared", **facts)
    elif old.ready != new.ready:
        log.info("endpoint_up" if new.ready else "endpoint_down", **facts)
    elif old.facts.boot_id != new.facts.boot_id:
        log.info("endpoint_restarted", **facts)
    else:
        log.info("endpoint_changed", **facts)
