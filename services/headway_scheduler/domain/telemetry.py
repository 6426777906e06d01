"""What one agent streams, in domain terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from headway_scheduler.domain.device import Device, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, EngineSample

__all__ = ["Hello", "KvEvents", "Sample"]


@dataclass(frozen=True, slots=True)
class Hello:
    """The full state of one node, at the start of every stream. `clock_s` is the agent's Unix time."""

    node: str
    instance_id: str
    boot_id: str = ""
    agent_version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    endpoints: tuple[EndpointSpec, ...] = ()
    clock_s: float | None = None


class Sample(msgspec.Struct, frozen=True):
    """One numbered reading of everything on a node."""

    sequence: int
    devices: tuple[DeviceSample, ...] = ()
    engines: tuple[EngineSample, ...] = ()


@dataclass(frozen=True, slots=True)
class KvEvents:
    """What an endpoint's KV cache gained and lost in one tier, as index blocks. `complete`: nothing else is in it."""

    endpoint: str
    sequence: int
    scheme: str
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cleared: bool = False
    tier: str = "gpu"
    complete: bool = True
