"""The services for Envoy, put together, and what runs beside their calls."""

import asyncio
import contextlib
from typing import Final

import grpc
from envoy.service.accesslog.v3 import als_pb2_grpc
from envoy.service.auth.v3 import external_auth_pb2_grpc
from envoy.service.discovery.v3 import ads_pb2_grpc

from headway_scheduler.app import Scheduler
from headway_scheduler.envoy.access_log import AccessLogService
from headway_scheduler.envoy.discovery import DiscoveryService
from headway_scheduler.envoy.ext_authz import ExtAuthzService
from headway_scheduler.envoy.ext_proc import EXT_PROC, ExtProcService
from headway_scheduler.envoy.feed import ClusterFeed
from headway_scheduler.envoy.light import EXT_AUTHZ, LightPicker
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.calls import UnaryCalls
from headway_scheduler.rpc.streams import Streams

__all__ = ["ADMIT_THEMSELVES", "EXT_PROC", "EnvoyServices"]

ADMIT_THEMSELVES: Final = (f"/{EXT_PROC}/", f"/{EXT_AUTHZ}/")
"""Services that check who calls themselves: Envoy's client must be told what they refuse."""


class EnvoyServices:
    """All of them, for one scheduler."""

    def __init__(self, scheduler: Scheduler, authenticator: Authenticator, streams: Streams) -> None:
        self._feed = ClusterFeed(scheduler)
        self._discovery = DiscoveryService(scheduler, self._feed)
        self._ext_proc = ExtProcService(scheduler, authenticator, streams, scheduler.config.max_message_bytes)
        calls = UnaryCalls(scheduler)
        self._ext_authz = ExtAuthzService(LightPicker(scheduler, calls), authenticator)
        self._access_log = AccessLogService(scheduler, calls)
        self._following: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve them there."""
        server.add_generic_rpc_handlers((self._ext_proc.handler(),))
        ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(self._discovery, server)
        external_auth_pb2_grpc.add_AuthorizationServicer_to_server(self._ext_authz, server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self._access_log, server)

    def start(self) -> None:
        """Follow the fleet."""
        self._following = asyncio.create_task(self._feed.run())

    async def stop(self) -> None:
        """Follow it no more."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
