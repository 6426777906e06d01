"""Admin on a real grpc.aio server and a real Postgres, and what its errors say."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc
from fakes.fleet_view import FakeFleetView
from google.rpc import error_details_pb2, status_pb2
from headway.admin.v1.admin_pb2_grpc import AdminStub, add_AdminServicer_to_server
from headway_scheduler.domain.desired import DesiredState, StrategyConfig
from headway_scheduler.errors import InvalidField
from headway_scheduler.rpc.admin import AdminService
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.interceptors import CheckedServices
from headway_scheduler.store.postgres import PostgresStore


@dataclass
class Clock:
    """A clock that the test moves."""

    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@dataclass
class AdminServer:
    """A running server: call it through `admin`, look behind it through the rest."""

    admin: AdminStub
    channel: grpc.aio.Channel
    store: PostgresStore
    fleet: FakeFleetView
    clock: Clock
    state: DesiredState = field(default_factory=DesiredState)
    refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refresh(self) -> None:
        async with self.refreshing:  # as the scheduler does: what was loaded earlier must not be applied later
            self.state = await self.store.load()


def check_strategy(config: StrategyConfig) -> None:
    """Stands in for the registry of algorithms."""
    for key in config.parameters:
        if key != "alpha":
            raise InvalidField(f"strategy.parameters.{key}", "is not a parameter of this algorithm")


@asynccontextmanager
async def admin_server(
    database_url: str, *, required: bool = False, register: Callable[[grpc.aio.Server], None] | None = None
) -> AsyncIterator[AdminServer]:
    """Serve Admin on a port of 127.0.0.1. `register` adds more services."""
    store = PostgresStore(database_url, timeout_s=10.0)
    made: list[AdminServer] = []
    clock = Clock()
    fleet = FakeFleetView()
    authenticator = Authenticator(lambda: made[0].state, required=required, clock=clock)
    services = CheckedServices(authenticator)
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", 16 * 2**20)],  # our own limits answer first
    )
    service = AdminService(
        store=store,
        state=lambda: made[0].state,
        refresh=lambda: made[0].refresh(),
        check_strategy=check_strategy,
        fleet=fleet,
    )
    add_AdminServicer_to_server(service, services)
    if register:
        register(services)
    server.add_generic_rpc_handlers((services,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    made.append(AdminServer(AdminStub(channel), channel, store, fleet, clock))
    await made[0].refresh()
    try:
        yield made[0]
    finally:
        await channel.close()
        await server.stop(None)
        await store.close()


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status that an error carries."""
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    return status


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """THE ErrorInfo of an error: there must be exactly one."""
    infos = []
    for detail in status_of(error).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            infos.append(info)
    (info,) = infos
    assert info.domain == "headway"
    return info


def retry_delay_s(error: grpc.aio.AioRpcError) -> float | None:
    """How long the error asks to wait, None if it does not say."""
    for detail in status_of(error).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return retry.retry_delay.ToTimedelta().total_seconds()
    return None
