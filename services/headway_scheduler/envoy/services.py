"""The services for Envoy, put together: who may call them, and what runs beside their calls."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

import grpc
from envoy.service.discovery.v3 import ads_pb2_grpc

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Role
from headway_scheduler.envoy.addresses import EngineAddresses
from headway_scheduler.envoy.discovery import DISCOVERY, DiscoveryService
from headway_scheduler.envoy.feed import ClusterFeed

__all__ = ["ENVOY_ROLES", "EnvoyServices"]

_ROUTERS: Final = frozenset({Role.ROUTER, Role.ADMIN})

ENVOY_ROLES: Final[Mapping[str, frozenset[Role]]] = {f"/{DISCOVERY}/StreamAggregatedResources": _ROUTERS}
"""Who may call which method, as rpc.authorization.ROLES says of the others: an Envoy has a router's credential."""


class EnvoyServices:
    """All of them, for one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.addresses = EngineAddresses()
        self._feed = ClusterFeed(scheduler, self.addresses)
        self._discovery = DiscoveryService(scheduler, self._feed)
        self._following: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve them there."""
        ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(self._discovery, server)

    def start(self) -> None:
        """Follow the fleet."""
        self._following = asyncio.create_task(self._feed.run())

    async def stop(self) -> None:
        """Follow it no more."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
