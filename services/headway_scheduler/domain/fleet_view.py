"""Nodes and endpoints as an admin sees them: the live side, without desired state."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["EndpointView", "NodeView"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node that has an agent now, or had one since the scheduler started. Counts are of its own parts."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    connected: bool = False
    agent_version: str = ""
    devices: int = 0
    endpoints: int = 0
    inflight: int = 0
    clock_skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndpointView:
    """An endpoint of a node. `id` is `10.0.0.1:8000@0`; `inflight` counts what others than Headway sent there, too."""

    id: str
    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    healthy: bool = False
    inflight: int = 0
