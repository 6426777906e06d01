"""What a node is and has: the values that travel from the collector to the streams."""

from dataclasses import dataclass

from headway_agent.config import EngineSettings
from headway_agent.devices.base import DeviceEvent, DeviceInfo, DeviceReading
from headway_agent.engines.base import EngineFacts, EngineReading

EndpointKey = tuple[str, int]
"""Address and data-parallel rank: what names an endpoint."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who this agent is."""

    node: str
    agent_version: str
    boot_id: str
    """Changes with every start of the host."""
    instance_id: str
    """Changes with every start of the agent."""
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine rank: what the configuration says, what the engine says, and the devices it uses."""

    settings: EngineSettings
    facts: EngineFacts
    device_uuids: tuple[str, ...]
    ready: bool

    @property
    def key(self) -> EndpointKey:
        """The endpoint's name in the fleet."""
        return endpoint_key(self.settings)


def endpoint_key(settings: EngineSettings) -> EndpointKey:
    """The name in the fleet of a configured engine rank."""
    return settings.address, settings.dp_rank or 0


@dataclass(frozen=True, slots=True)
class EndpointChange:
    """An endpoint appeared, changed or went away."""

    endpoint: Endpoint
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at everything. `sequence` grows by one; `taken_s` is seconds since the epoch."""

    sequence: int
    taken_s: float
    devices: tuple[DeviceReading, ...]
    engines: tuple[tuple[EndpointKey, EngineReading], ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The full state that a Hello carries."""

    devices: tuple[DeviceInfo, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Collected:
    """What one round brought."""

    sample: Sample
    inventory: Inventory
    events: tuple[DeviceEvent, ...] = ()
    changes: tuple[EndpointChange, ...] = ()
    devices_changed: bool = False
    """The list of devices is another: only a new Hello can say so."""
