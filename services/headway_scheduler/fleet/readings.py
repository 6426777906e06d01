"""Samples that say nothing new but numbers go straight into the columns (ADR 50).

An agent's samples are alike: the same devices and engines, in the same words, second after second. Once one of them was
applied by objects, what follows is numbers to be put in known places.
"""

from collections.abc import Iterable, Mapping
from math import nan
from typing import Final, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from headway_scheduler.compiling import compiled
from headway_scheduler.domain.device import Device, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, EngineSample
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.telemetry import Sample
from headway_scheduler.fleet.columns import Columns, FloatColumn, IntColumn

__all__ = ["DEVICE_NUMBERS", "ENGINE_NUMBERS", "Readings", "Throttles"]

Throttles = Mapping[int, tuple[str, ...]]
"""Throttle reasons of the devices that have any, by their number in a sample."""

DEVICE_NUMBERS: Final = ("memory_used_bytes", "utilization", "temperature_c", "power_w")
"""A device's measurements, in the order of their fields. ECC errors are not among them: they close endpoints."""
ENGINE_NUMBERS: Final = ("running", "waiting", "kv_use", "prefix_queries", "prefix_hits")
_WIDTH: Final = len(ENGINE_NUMBERS)
"""Of a row, a device's or an engine's."""
_LIMITS: Final = 3
_Reading = TypeVar("_Reading", DeviceSample, EngineSample)


class Place(Protocol):
    """What this knows of an endpoint."""

    @property
    def id(self) -> str:
        """`10.0.0.1:8000@0`."""
        ...

    @property
    def slot(self) -> int:
        """Its place in the columns."""
        ...

    @property
    def spec(self) -> EndpointSpec:
        """Its devices."""
        ...


class Readings:
    """The numbers of one node's samples, a row for each device and then for each engine, NaN where one is missing.

    Good for as long as the node, its endpoints and all but the numbers of its samples stay as they are.
    """

    def __init__(self, words: bytes, sample: Sample, devices: Mapping[str, Device], endpoints: Iterable[Place]) -> None:
        """`words`: all that samples say beside their numbers, in a form of the caller's; `sample` is one of them."""
        self.words, self._sample = words, sample
        rows = [(each, DEVICE_NUMBERS) for each in sample.devices] + [(each, ENGINE_NUMBERS) for each in sample.engines]
        found = [
            (row * _WIDTH + column, value)
            for row, (reading, names) in enumerate(rows)
            for column, name in enumerate(names)
            if (value := getattr(reading, name).value) is not None
        ]
        self._cells = np.array([cell for cell, _ in found], np.int64)
        self._values = np.full(len(rows) * _WIDTH, nan)
        self._values[self._cells] = self.numbers = np.array([value for _, value in found])
        """What the sample said, in the order of its fields."""
        device_rows = {each.uuid: row for row, each in enumerate(sample.devices)}
        self._limits = np.full(len(sample.devices) * _LIMITS, nan)
        for uuid, row in device_rows.items():
            if uuid in devices:
                self._limits[row * _LIMITS : (row + 1) * _LIMITS] = _limits(devices[uuid])
        self._rows = {each.id: row for row, each in enumerate(sample.engines, len(sample.devices))}
        placed = list(endpoints)
        self.throttles: Throttles = {
            row: each.throttle_reasons for row, each in enumerate(sample.devices) if each.throttle_reasons
        }
        """Of the newest sample."""
        self._devices = uses = [
            [device_rows[uuid] for uuid in each.spec.device_uuids if uuid in device_rows and uuid in devices]
            for each in placed
        ]
        self.slots = np.array([each.slot for each in placed], np.int64)
        self._engines = np.array([self._rows.get(each.id, -1) for each in placed], np.int64)
        self._uses = np.array([row for rows in uses for row in rows], np.int64)
        self._ends = np.cumsum([len(rows) for rows in uses], dtype=np.int64)

    def tells_of(self, endpoint_id: str) -> bool:
        """Is this engine in the samples?"""
        return endpoint_id in self._rows

    def throttled(self) -> Iterable[frozenset[str]]:
        """Why any of the devices of each endpoint is slowed down, in the endpoints' order."""
        told = self.throttles
        return (frozenset().union(*(told.get(row, ()) for row in rows)) for rows in self._devices)

    def apply(self, numbers: FloatColumn, columns: Columns, now: float) -> None:
        """Another sample said these: write what follows from them into the columns."""
        _apply(
            numbers,
            self._cells,
            self._values,
            self.slots,
            self._engines,
            self._uses,
            self._ends,
            self._limits,
            now,
            columns.inflight,
            columns.sampled_at,
            columns.running,
            columns.waiting,
            columns.kv_use,
            columns.external,
            columns.memory_pressure,
            columns.utilization,
            columns.temperature_c,
            columns.heat,
            columns.power,
        )

    def devices(self) -> dict[str, DeviceSample]:
        """The newest sample of each device, by UUID."""
        return {
            each.uuid: replace(self._newest(row, each, DEVICE_NUMBERS), throttle_reasons=self.throttles.get(row, ()))
            for row, each in enumerate(self._sample.devices)
        }

    def engine(self, endpoint_id: str) -> EngineSample:
        """The newest sample of an engine that they tell of."""
        row = self._rows[endpoint_id]
        return self._newest(row, self._sample.engines[row - len(self._sample.devices)], ENGINE_NUMBERS)

    def prefixes(self, endpoint_id: str) -> tuple[float, float] | None:
        """Tokens that an engine looked up in its cache, and found; None: it does not say."""
        cell = self._rows[endpoint_id] * _WIDTH + ENGINE_NUMBERS.index("prefix_queries")
        queries, hits = self._values.item(cell), self._values.item(cell + 1)
        return None if queries != queries or hits != hits else (queries, hits)

    def _newest(self, row: int, first: _Reading, names: tuple[str, ...]) -> _Reading:
        """What is missing is so for the same reason as at first."""
        values = self._values[row * _WIDTH : row * _WIDTH + len(names)].tolist()
        told = zip(names, values, strict=True)
        return replace(
            first, **{name: Measurement(value) for name, value in told if value == value}
        )  # NaN is not itself


def _limits(device: Device) -> list[float]:
    """Of memory, temperature and power; NaN where there is none."""
    known = (device.memory_total_bytes, device.temperature_slowdown_c, device.power_limit_w)
    return [each.value or nan for each in known]


@compiled("float64(float64, float64)")
def _higher(one: float, other: float) -> float:
    """NaN is unknown, and lower than anything."""
    return other if one != one or other > one else one


_FLOATS: Final = ", ".join(["float64[::1]"] * 10)


@compiled(
    "void(float64[::1], int64[::1], float64[::1], int64[::1], int64[::1], int64[::1], int64[::1], float64[::1],"
    f" float64, int64[::1], {_FLOATS})"
)
def _apply(
    numbers: FloatColumn,
    cells: IntColumn,
    values: FloatColumn,
    slots: IntColumn,
    engines: IntColumn,
    uses: IntColumn,
    ends: IntColumn,
    limits: FloatColumn,
    now: float,
    inflight: IntColumn,
    sampled_at: FloatColumn,
    running: FloatColumn,
    waiting: FloatColumn,
    kv_use: FloatColumn,
    external: FloatColumn,
    memory_pressure: FloatColumn,
    utilization: FloatColumn,
    temperature_c: FloatColumn,
    heat: FloatColumn,
    power: FloatColumn,
) -> None:
    """As Fleet._apply_engine and _apply_devices do for one endpoint, for all of a node."""
    for number in range(len(numbers)):
        values[cells[number]] = numbers[number]
    use = 0
    for each in range(len(slots)):
        slot = slots[each]
        if engines[each] >= 0:
            cell = engines[each] * _WIDTH
            sampled_at[slot] = now
            running[slot], waiting[slot], kv_use[slot] = values[cell], values[cell + 1], values[cell + 2]
            seen = 0.0
            if running[slot] == running[slot]:  # NaN is not itself
                seen = running[slot]
                if waiting[slot] == waiting[slot]:
                    seen += waiting[slot]
            external[slot] = max(0.0, seen - inflight[slot])
        fullest, busiest, warmest, hottest, hungriest = np.nan, np.nan, np.nan, np.nan, np.nan
        while use < ends[each]:
            cell, limit = uses[use] * _WIDTH, uses[use] * _LIMITS
            fullest = _higher(fullest, values[cell] / limits[limit])
            busiest = _higher(busiest, values[cell + 1])
            warmest = _higher(warmest, values[cell + 2])
            hottest = _higher(hottest, values[cell + 2] / limits[limit + 1])
            hungriest = _higher(hungriest, values[cell + 3] / limits[limit + 2])
            use += 1
        memory_pressure[slot] = kv_use[slot] if kv_use[slot] == kv_use[slot] else fullest
        utilization[slot], temperature_c[slot] = busiest, warmest
        heat[slot], power[slot] = hottest, hungriest
