"""The live side of nodes and endpoints, as the Admin service sees it."""

from collections.abc import Sequence

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.fleet_view import EndpointView, NodeView
from headway_scheduler.domain.names import NODES
from headway_scheduler.errors import InUse, UnknownResource

__all__ = ["LiveFleet"]


class LiveFleet:
    """Reads the scheduler's memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._fleet, self._clock = scheduler.fleet, scheduler.clock

    def nodes(self) -> Sequence[NodeView]:
        """Every node known, connected or not."""
        inflight = self._fleet.columns.inflight
        return [
            NodeView(
                name=node.id,
                labels=node.hello.labels,
                connected=node.connected,
                agent_version=node.hello.agent_version,
                devices=len(node.hello.devices),
                endpoints=len(node.endpoints),
                inflight=sum(int(inflight[endpoint.slot]) for endpoint in node.endpoints.values()),
                clock_skew_s=node.clock_skew_s,
            )
            for node in self._fleet.nodes.values()
        ]

    def endpoints(self) -> Sequence[EndpointView]:
        """Every endpoint known."""
        columns = self._fleet.columns
        return [
            EndpointView(
                id=endpoint.id,
                node=endpoint.node.id,
                labels=endpoint.labels,
                models=endpoint.spec.models,
                healthy=bool(columns.open[endpoint.slot]),
                inflight=int(columns.inflight[endpoint.slot]),
            )
            for endpoint in self._fleet.endpoints.values()
        ]

    def lift_ejection(self, endpoint: str) -> None:
        """Let an endpoint back in that is ejected; nothing else changes."""
        found = self._fleet.endpoints.get(endpoint)
        if found is not None:
            self._fleet.lift_ejection(found, self._clock())

    def forget_node(self, name: str) -> None:
        """Drop a node that is not connected. Raises InUse if it is, UnknownResource if there is none."""
        node = self._fleet.nodes.get(name)
        if node is None:
            raise UnknownResource(f"{NODES}/{name}")
        if node.connected:
            raise InUse(f"{NODES}/{name}", "its agent, which is connected")
        self._fleet.forget_node(name)
