"""The gRPC server: every service, health, reflection, credentials and limits."""

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from typing import Final, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from headway.admin.v1 import admin_pb2
from headway.fleet.v1 import fleet_pb2
from headway.routing.v1 import routing_pb2
from headway.telemetry.v1 import telemetry_pb2

from headway_scheduler.app import Scheduler
from headway_scheduler.config import Config
from headway_scheduler.envoy.services import ADMIT_THEMSELVES, EXT_PROC, EnvoyServices
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.failures import Failures
from headway_scheduler.rpc.interceptors import CheckedServices
from headway_scheduler.rpc.services import add_services
from headway_scheduler.rpc.streams import SWEEP_S, Streams
from headway_scheduler.tls import CertificateFiles, server_credentials

__all__ = ["GrpcServer"]

_SERVICES: Final = (
    routing_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    telemetry_pb2.DESCRIPTOR.services_by_name["Telemetry"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name,
    EXT_PROC,
)

_LEADERS: Final = frozenset({_SERVICES[0], EXT_PROC})
"""Services that only the leader serves."""

_LAST_WORDS_S: Final = 0.5
"""What calls in progress get once nothing is in flight any more: agents' streams never end by themselves."""


def _now() -> datetime:
    return datetime.now(UTC)


class GrpcServer:
    """Serves one scheduler. `port` is the port it listens on, once started."""

    def __init__(self, scheduler: Scheduler, config: Config) -> None:
        self.port = 0
        self._config = config
        self._scheduler = scheduler
        self.mtls_port = 0
        failures = Failures(config.authentication_failures_per_minute, time.monotonic, scheduler.authentication)
        authenticator = Authenticator(
            lambda: scheduler.desired,
            required=config.credentials_required,
            clock=_now,
            certificates=config.tls_client_ca is not None,
            failures=failures,
        )
        self.streams = Streams(authenticator, _now, time.monotonic, config.max_streams_per_credential)
        self._sweeping: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_metadata_size", 16 * 1024),
                # Two schedulers on one port would share its calls without knowing of each other.
                ("grpc.so_reuseport", 0),
                # By its own default gRPC cancels calls at random once 1,000 wait: a flood would end honest ones.
                ("grpc.server.max_pending_requests", 20_000),
                ("grpc.server.max_pending_requests_hard_limit", 30_000),
                # Who connects and says nothing, or never finishes its handshake, is not waited for.
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ],
        )
        checked = CheckedServices(authenticator, admit_themselves=ADMIT_THEMSELVES, streams=self.streams)
        services = cast("grpc.aio.Server", checked)
        self._health = HealthServicer()
        self._saying: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)  # type: ignore[no-untyped-call]
        add_services(scheduler, authenticator.tenant_of, services)
        self._envoy = EnvoyServices(scheduler, authenticator, self.streams)
        self._envoy.add_to(services)
        served = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(served, services)  # type: ignore[no-untyped-call]
        self._server.add_generic_rpc_handlers((checked,))

    async def start(self) -> None:
        """Listen. Raises RuntimeError if the address is taken, OSError if the certificate cannot be used."""
        config = self._config
        if config.tls_certificate is not None and config.tls_key is not None:
            client_ca = config.tls_client_ca
            first = CertificateFiles(
                config.tls_certificate, config.tls_key, client_ca if config.certificate_required else None
            )
            self.port = self._server.add_secure_port(config.listen, server_credentials(first))
            if config.listen_mtls:
                second = CertificateFiles(config.tls_certificate, config.tls_key, client_ca)
                self.mtls_port = self._server.add_secure_port(config.listen_mtls, server_credentials(second))
        else:
            self.port = self._server.add_insecure_port(config.listen)
        self._envoy.start()
        await self._server.start()
        self._sweeping = asyncio.create_task(self._sweep())
        await self._say_health()
        self._scheduler.on_standing.append(self._say_health_soon)

    async def stop(self, grace_s: float) -> None:
        """Say that it goes away, take reports until nothing is in flight, at most `grace_s` long, and close.

        Whoever calls it has drained the scheduler: nothing new is taken meanwhile.
        """
        with contextlib.suppress(ValueError):  # it may be stopped twice
            self._scheduler.on_standing.remove(self._say_health_soon)
        await self._say_health()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle(), grace_s)
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._server.stop(min(_LAST_WORDS_S, grace_s))
        await self._envoy.stop()

    async def _sweep(self) -> None:
        """End streams whose credential counts no more."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.streams.sweep()
            except Exception as error:  # one fault must not leave every stream unwatched
                unexpected(error, method="sweep")

    async def _idle(self) -> None:
        """Wait until the last reservation has ended."""
        ledger, idle = self._scheduler.ledger, asyncio.Event()

        def look(*_: object) -> None:
            if not ledger.reservations:
                idle.set()

        ledger.on_end.append(look)
        look()
        try:
            await idle.wait()
        finally:
            ledger.on_end.remove(look)

    async def _say_health(self) -> None:
        """A standby serves all but what only the leader answers; one that goes away serves nothing."""
        scheduler, answers = self._scheduler, health_pb2.HealthCheckResponse
        for service in ("", *_SERVICES):
            serving = not scheduler.draining and (service not in _LEADERS or scheduler.leadership.leads())
            await self._health.set(service, answers.SERVING if serving else answers.NOT_SERVING)

    def _say_health_soon(self) -> None:
        self._saying = asyncio.create_task(self._say_health())
