"""The Fleet service: the live state, for people and dashboards."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from grpc.aio import ServicerContext
from headway.fleet.v1 import fleet_pb2 as pb
from headway.fleet.v1 import fleet_pb2_grpc

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Role
from headway_scheduler.domain.names import CREDENTIALS, NODES
from headway_scheduler.rpc.authentication import LOCAL, current_identity, current_principal
from headway_scheduler.rpc.convert.fleet import endpoint_to_proto, node_to_proto, observations_to_proto, status_to_proto
from headway_scheduler.rpc.decisions import Decisions
from headway_scheduler.rpc.paging import page_of

__all__ = ["FleetService"]

Context = ServicerContext[Any, Any]  # a context of any of the service's messages
State = pb.NodeState | pb.EndpointState
_SHORTEST_INTERVAL_MS = 100
_NAMES_TENANTS = frozenset({Role.ROUTER, Role.ADMIN, Role.TENANT})


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Reads the scheduler's memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._decisions = Decisions(scheduler.record)
        self._version = version("headway")

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:  # noqa: N802
        """How the scheduler does."""
        return status_to_proto(self._scheduler, self._version, current_principal())

    async def GetObservations(  # noqa: N802
        self, request: pb.GetObservationsRequest, context: Context
    ) -> pb.GetObservationsResponse:
        """What would have been done with the requests that others placed."""
        return observations_to_proto(self._scheduler, current_principal())

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.WhoAmIResponse:  # noqa: N802
        """What the caller's credential is good for."""
        identity = current_identity()
        principal = identity.principal
        response = pb.WhoAmIResponse(
            principal=principal.id if principal is LOCAL else f"{CREDENTIALS}/{principal.id}",
            role=principal.role.value,
            node=f"{NODES}/{principal.node}" if principal.node else "",
            tenants=principal.tenants if principal.role in _NAMES_TENANTS else (),
            shown=identity.shown.value,
        )
        if identity.expires is not None:
            response.expire_time.FromDatetime(identity.expires)
        return response

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:  # noqa: N802
        """Every node, a page at a time."""
        nodes = self._scheduler.fleet.nodes.values()
        page, token = page_of("nodes", nodes, lambda node: node.id, request.page_size, request.page_token)
        now = self._scheduler.clock()
        return pb.ListNodesResponse(
            nodes=[node_to_proto(self._scheduler, node, now) for node in page], next_page_token=token
        )

    async def ListEndpoints(  # noqa: N802
        self, request: pb.ListEndpointsRequest, context: Context
    ) -> pb.ListEndpointsResponse:
        """Every endpoint, or those that serve a model, a page at a time."""
        scheduler, model = self._scheduler, request.model.removeprefix("models/")
        found = (e for e in scheduler.fleet.endpoints.values() if not model or model in e.spec.models)
        page, token = page_of(f"endpoints {model}", found, lambda e: e.id, request.page_size, request.page_token)
        now = scheduler.clock()
        states = [endpoint_to_proto(scheduler, endpoint, now) for endpoint in page]
        return pb.ListEndpointsResponse(endpoints=states, next_page_token=token)

    async def WatchFleet(  # noqa: N802
        self, request: pb.WatchFleetRequest, context: Context
    ) -> AsyncIterator[pb.WatchFleetResponse]:
        """All of it, then what changed."""
        config = self._scheduler.config
        interval_ms = request.interval_ms or int(config.telemetry_interval_s * 1e3)
        seen: dict[str, State] = {}
        while True:
            response = self._changes(seen)
            if response.nodes or response.endpoints or response.removed:
                yield response
            await asyncio.sleep(max(_SHORTEST_INTERVAL_MS, interval_ms) / 1e3)

    async def ListDecisions(  # noqa: N802
        self, request: pb.ListDecisionsRequest, context: Context
    ) -> pb.ListDecisionsResponse:
        """The newest decisions and refusals, a page at a time."""
        return self._decisions.list_page(request, current_principal())

    async def GetDecision(  # noqa: N802
        self, request: pb.GetDecisionRequest, context: Context
    ) -> pb.GetDecisionResponse:
        """One of them, with every candidate."""
        return self._decisions.get(request, current_principal())

    async def WatchDecisions(  # noqa: N802
        self, request: pb.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchDecisionsResponse]:
        """Decisions as they are made."""
        async for response in self._decisions.watch(request, current_principal()):
            yield response

    def _changes(self, seen: dict[str, State]) -> pb.WatchFleetResponse:
        scheduler, now = self._scheduler, self._scheduler.clock()
        nodes = [node_to_proto(scheduler, node, now) for node in scheduler.fleet.nodes.values()]
        endpoints = [endpoint_to_proto(scheduler, each, now) for each in scheduler.fleet.endpoints.values()]
        present: dict[str, State] = {state.name: _ageless(state) for state in nodes}
        present.update((state.name, _ageless(state)) for state in endpoints)
        response = pb.WatchFleetResponse(
            nodes=[state for state in nodes if seen.get(state.name) != present[state.name]],
            endpoints=[state for state in endpoints if seen.get(state.name) != present[state.name]],
            removed=sorted(seen.keys() - present.keys()),
        )
        seen.clear()
        seen.update(present)
        return response


def _ageless(state: State) -> State:
    """A copy without what only time changes: the age of its sample, how long an ejection still lasts."""
    copy = type(state)()
    copy.MergeFrom(state)  # type: ignore[arg-type]  # of the same type, as the line above says
    copy.ClearField("sample_age_ms")
    if isinstance(copy, pb.EndpointState):
        copy.ClearField("handicap")
        if copy.HasField("ejection"):
            copy.ejection.ClearField("remaining_s")
    return copy
