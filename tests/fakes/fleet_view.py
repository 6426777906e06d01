"""A fleet that says what it is told to say."""

from collections.abc import Sequence

from headway_scheduler.domain.fleet_view import EndpointView, NodeView
from headway_scheduler.errors import InUse, UnknownResource


class FakeFleetView:
    """Nodes and endpoints by name; `forgotten` and `lifted` list what was done to them."""

    def __init__(self, nodes: Sequence[NodeView] = (), endpoints: Sequence[EndpointView] = ()) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._endpoints = list(endpoints)
        self.forgotten: list[str] = []
        self.lifted: list[str] = []

    def nodes(self) -> Sequence[NodeView]:
        return list(self._nodes.values())

    def endpoints(self) -> Sequence[EndpointView]:
        return self._endpoints

    def check_exclusive(self, resource: object) -> None:
        """Everything is free."""

    def check_disruption(self, name: str) -> None:
        """Nothing is needed."""

    def lift_ejection(self, endpoint: str) -> None:
        self.lifted.append(endpoint)

    def forget_node(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is None:
            raise UnknownResource(f"nodes/{name}")
        if node.connected:
            raise InUse(f"nodes/{name}", "its agent")
        del self._nodes[name]
        self.forgotten.append(name)
