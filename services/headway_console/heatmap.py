"""Every device as a cell: what it is, how it does, and the same as short lists for a page that follows it."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash
from headway_scheduler.domain.device import Device, DeviceEventKind, DeviceKind, DeviceSample
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.measurement import Measurement, MissingReason
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.members import Node

__all__ = ["METRICS", "STATES", "Cell", "NodeCells", "layout_of", "level", "read_all", "read_node", "told"]

METRICS: Final = {"pressure": "Memory pressure", "use": "Utilisation", "heat": "Temperature", "power": "Power"}
STATES: Final = {
    "ok": "ok",
    "lost": "lost",
    "failed": "failed",
    "throttled": "throttled",
    "stale": "silent",
    "cordoned": "cordoned",
    "draining": "draining",
}
_HOT: Final = frozenset({"hw_slowdown", "hw_thermal", "power_brake"})
_COOL_C: Final = 30.0
_STEP_C: Final = 6.0
_DIGITS: Final = re.compile(r"([0-9]{1,18})")
_AT_ONCE: Final = 32
"""Nodes read in one turn of the event loop."""


class Cell(msgspec.Struct, frozen=True, gc=False):
    """One device now. Shares are 0 to 1; None: unknown."""

    uuid: str
    name: str
    kind: DeviceKind
    product: str
    parent: str
    state: str
    detail: str
    pressure: float | None
    use: float | None
    heat_c: float | None
    power: float | None
    power_w: float | None
    memory_used: float | None
    memory_total: float | None

    def value(self, metric: str) -> int:
        """What the map shows: per cent, or degrees; -1: unknown."""
        share = {"pressure": self.pressure, "use": self.use, "power": self.power}.get(metric)
        if metric == "heat":
            return -1 if self.heat_c is None else round(self.heat_c)
        return -1 if share is None else round(min(9.99, max(0.0, share)) * 100)

    def text(self, metric: str) -> str:
        """The same in words."""
        value = self.value(metric)
        return "unknown" if value < 0 else f"{value} {'°C' if metric == 'heat' else '%'}"


@dataclass(frozen=True, slots=True)
class NodeCells:
    """A node and its devices."""

    id: str
    state: str
    cells: tuple[Cell, ...]


def level(metric: str, value: int) -> int:
    """0 to 9, as the style sheet colours it; -1: unknown. Ten per cent a level, or 6 °C from 30 on."""
    if value < 0:
        return -1
    return max(0, min(9, int((value - _COOL_C) / _STEP_C) if metric == "heat" else value // 10))


async def read_all(fleet: Fleet) -> list[NodeCells]:
    """All nodes in the order of their names; decisions pass meanwhile."""
    found = []
    for number, node in enumerate(sorted(fleet.nodes.values(), key=lambda node: _natural(node.id))):
        if number % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        found.append(read_node(fleet, node))
    return found


def read_node(fleet: Fleet, node: Node) -> NodeCells:
    """One node now."""
    columns, pressures = fleet.columns, dict[str, float]()
    for endpoint in node.endpoints.values():
        pressure = columns.memory_pressure.item(endpoint.slot)
        if pressure == pressure:  # NaN is not itself
            for uuid in endpoint.spec.device_uuids:
                pressures[uuid] = max(pressure, pressures.get(uuid, 0.0))
    cells = (_cell(node, device, pressures.get(device.uuid)) for device in node.hello.devices)
    return NodeCells(node.id, _node_state(node), tuple(cells))


def layout_of(nodes: Iterable[NodeCells]) -> str:
    """Changes when devices come or go, so that a page knows when its cells are not these."""
    digest = xxhash.xxh3_64()
    for node in nodes:
        digest.update("\0".join((node.id, *(cell.uuid for cell in node.cells), "")).encode())
    return digest.hexdigest()


def told(nodes: Sequence[NodeCells]) -> dict[str, object]:
    """What a page that shows the cells needs to colour them anew: a list a metric, and the states."""
    cells = [cell for node in nodes for cell in node.cells]
    values = {metric: [cell.value(metric) for cell in cells] for metric in METRICS}
    return {"layout": layout_of(nodes), "states": [cell.state for cell in cells], **values}


def _cell(node: Node, device: Device, engine_pressure: float | None) -> Cell:
    sample = node.samples.get(device.uuid, _NOTHING)
    total, limit = device.memory_total_bytes.value, device.power_limit_w.value
    state, detail = _state(node, device, sample)
    pressure = _share(sample.memory_used_bytes, total) if engine_pressure is None else engine_pressure
    return Cell(
        uuid=device.uuid,
        name=f"{device.kind.value.upper()} {device.index}",
        kind=device.kind,
        product=device.product,
        parent=device.parent_uuid,
        state=state,
        detail=detail,
        pressure=None if state == "lost" else pressure,
        use=sample.utilization.value,
        heat_c=sample.temperature_c.value,
        power=_share(sample.power_w, limit),
        power_w=sample.power_w.value,
        memory_used=sample.memory_used_bytes.value,
        memory_total=total,
    )


_NOTHING: Final = DeviceSample("")


def _state(node: Node, device: Device, sample: DeviceSample) -> tuple[str, str]:
    failure = node.failures.get(device.uuid) or node.failures.get(device.parent_uuid)
    lost = failure is not None and failure.kind is DeviceEventKind.LOST
    if lost or sample.memory_used_bytes.missing is MissingReason.LOST:
        return "lost", "fell off the bus: the driver does not see it any more"
    if failure is not None:
        return "failed", f"XID {failure.xid}" if failure.xid else failure.kind.value.replace("_", " ")
    if node.stale or not node.connected:
        return "stale", "its agent is not heard"
    if not _HOT.isdisjoint(sample.throttle_reasons):
        return "throttled", ", ".join(sample.throttle_reasons)
    if node.state is not SchedulingState.ACTIVE:
        return node.state.value, ""
    return "ok", ""


def _node_state(node: Node) -> str:
    if node.stale or not node.connected:
        return "stale"
    return "ok" if node.state is SchedulingState.ACTIVE else node.state.value


def _share(value: Measurement, total: float | None) -> float | None:
    return None if value.value is None or not total else value.value / total


def _natural(name: str) -> list[tuple[int, str]]:
    """node-2 before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name) if part]
