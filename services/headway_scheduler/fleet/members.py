"""Nodes and endpoints: what their agents said of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from headway_scheduler.domain.decision import Placement
from headway_scheduler.domain.device import Device, DeviceEvent, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, EngineSample, SchedulingState
from headway_scheduler.domain.telemetry import Hello
from headway_scheduler.fleet.readings import Readings

__all__ = ["Endpoint", "Node"]

_RANK_HEADER: Final = "x-data-parallel-rank"
_RANKS_BY_HEADER: Final = frozenset({"vllm", "sglang", "emulator"})
"""THE list of engines known to give a request to the data-parallel rank that this header names."""


@dataclass(slots=True)
class Node:
    """A host with an agent, and what the agent said last. Times are the scheduler's clock, in seconds.

    `connection` counts the agent's streams: only the newest one speaks for the node. `readings`: what samples that say
    nothing else are applied by.
    """

    id: str
    hello: Hello
    connection: int = 0
    connected: bool = False
    stale: bool = False
    heard_at: float = 0.0
    sequence: int = 0
    clock_skew_s: float = 0.0
    state: SchedulingState = SchedulingState.ACTIVE
    readings: Readings | None = None
    failures: dict[str, DeviceEvent] = field(default_factory=dict)
    endpoints: dict[str, "Endpoint"] = field(default_factory=dict)
    devices: dict[str, Device] = field(init=False)
    """What its Hello named, by UUID."""
    _samples: dict[str, DeviceSample] = field(default_factory=dict)
    _unread: Readings | None = None
    """Newer numbers than those in `_samples`."""

    def __post_init__(self) -> None:
        self.greet(self.hello)

    @property
    def samples(self) -> dict[str, DeviceSample]:
        """Of its devices the newest sample of each, by UUID."""
        if self._unread is not None:
            self._samples.update(self._unread.devices())
            self._unread = None
        return self._samples

    def greet(self, hello: Hello) -> None:
        """Its agent said Hello."""
        self.hello = hello
        self.devices = {device.uuid: device for device in hello.devices}

    def said(self, readings: Readings) -> None:
        """These hold numbers now that nobody has read."""
        self._unread = readings
        for endpoint in self.endpoints.values():
            if readings.tells_of(endpoint.id):
                endpoint.unread = readings


@dataclass(slots=True)
class Endpoint:
    """One engine rank that an agent announced.

    `faults`: which hard guards its devices close, each with what closed it. `throttles`: why any of them is slowed
    down, in NVML's words. `boot_id`: the engine's, as last known. `unread`: newer numbers than those of the sample.
    """

    id: str
    slot: int
    spec: EndpointSpec
    node: Node
    state: SchedulingState = SchedulingState.ACTIVE
    ready: bool = True
    unread: Readings | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    throttles: frozenset[str] = frozenset()
    boot_id: str = ""
    contested: bool = False
    """It is in dedicated groups of several tenants, and so nobody's."""
    placement: Placement = field(init=False)
    """As answers name it."""
    shares_address: bool = False
    """It is one of several ranks behind one server."""
    _sample: EngineSample | None = None

    def __post_init__(self) -> None:
        self.place(shares_address=False)

    @property
    def sample(self) -> EngineSample | None:
        """The newest of its engine."""
        if self.unread is not None:
            self._sample, self.unread = self.unread.engine(self.id), None
        return self._sample

    @property
    def prefixes(self) -> tuple[float, float] | None:
        """Prompt tokens that its engine looked up in its cache so far, and found; None: it does not say."""
        if self.unread is not None:
            return self.unread.prefixes(self.id)
        sample = self._sample
        if sample is None or sample.prefix_queries.value is None or sample.prefix_hits.value is None:
            return None
        return sample.prefix_queries.value, sample.prefix_hits.value

    def tell(self, sample: EngineSample) -> None:
        """Its engine said this."""
        self._sample, self.unread, self.ready = sample, None, sample.ready

    def place(self, *, shares_address: bool) -> None:
        """Where it is. Of several ranks at one address a header tells which is meant, where the engine knows it."""
        self.shares_address = shares_address
        named = shares_address and self.spec.engine in _RANKS_BY_HEADER
        headers = {_RANK_HEADER: str(self.spec.dp_rank)} if named else {}
        self.placement = Placement(self.spec, self.node.id, headers)

    def respecify(self, spec: EndpointSpec) -> None:
        """Its agent says something else of it now."""
        self.spec, self.ready = spec, spec.ready
        self.place(shares_address=self.shares_address)

    @property
    def node_id(self) -> str:
        """Its node's."""
        return self.node.id

    @property
    def labels(self) -> dict[str, str]:
        """Its own labels over its node's."""
        return {**self.node.hello.labels, **self.spec.labels}

    def readings(self) -> Iterator[tuple[Device, DeviceSample]]:
        """Its devices, each with its newest sample."""
        for uuid in self.spec.device_uuids:
            device, sample = self.node.devices.get(uuid), self.node.samples.get(uuid)
            if device is not None and sample is not None:
                yield device, sample

    def hottest(self) -> str:
        """The device that is nearest to its slowdown temperature, for people."""
        known = [
            (sample.temperature_c.value / device.temperature_slowdown_c.value, sample.temperature_c.value, device)
            for device, sample in self.readings()
            if sample.temperature_c.value is not None and device.temperature_slowdown_c.value
        ]
        if not known:
            return ""
        _, value, device = max(known, key=lambda each: each[0])
        return f"{device.uuid} {value:.0f} °C of {device.temperature_slowdown_c.value:.0f}"
