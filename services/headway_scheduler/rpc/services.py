"""Our own services, put together: one list for every door that serves them."""

from collections.abc import Callable

import grpc
from headway.admin.v1 import admin_pb2_grpc
from headway.fleet.v1 import fleet_pb2_grpc
from headway.routing.v1 import routing_pb2_grpc

from headway_scheduler.app import Scheduler
from headway_scheduler.rpc.fleet import FleetService
from headway_scheduler.rpc.live import admin_service
from headway_scheduler.rpc.router import RouterService
from headway_scheduler.rpc.telemetry import TelemetryService

__all__ = ["add_services"]


def add_services(
    scheduler: Scheduler, tenant_of: Callable[[bytes], str], server: "grpc.aio.Server | grpc.Server"
) -> RouterService:
    """Add Router, Telemetry, Fleet and Admin to what takes services as a server does; returns the Router.

    `tenant_of`: the tenant of an end user's key, by the key's SHA-256; empty: none.
    """
    router = RouterService(scheduler, tenant_of)
    routing_pb2_grpc.add_RouterServicer_to_server(router, server)
    TelemetryService(scheduler).add_to(server)
    fleet_pb2_grpc.add_FleetServicer_to_server(FleetService(scheduler), server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin_service(scheduler), server)
    return router
