"""One scheduler process, from its store to its ports and back."""

import asyncio
import json
import logging
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import structlog
from headway_console.app import Console
from headway_tracing.library_logs import adopt_library_logs
from sqlalchemy.exc import SQLAlchemyError

from headway_scheduler.app import Scheduler
from headway_scheduler.bootstrap import create_first_admin, create_missing
from headway_scheduler.collector import calm_collector, collect_garbage
from headway_scheduler.config import Config
from headway_scheduler.errors import HeadwayError
from headway_scheduler.http import HttpServer
from headway_scheduler.native import why_interpreted
from headway_scheduler.server import GrpcServer
from headway_scheduler.store.embedded import EmbeddedPostgres
from headway_scheduler.store.leader_lock import PostgresLeaderLock
from headway_scheduler.store.migrate import upgrade
from headway_scheduler.store.postgres import PostgresStore

__all__ = ["StartError", "configure_logging", "serve"]

log = structlog.get_logger()


def configure_logging(level: str) -> None:
    """JSON lines on standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    adopt_library_logs()


class StartError(Exception):
    """The scheduler could not start; the message names the step."""


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT, then drain: refuse what is new, finish what is in flight, close in reverse order.

    Raises StartError.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with AsyncExitStack() as closers:
        with _step("database"):
            url = config.database_url or _embedded(config.data_dir, closers)
            epoch = secrets.token_hex(4)
            await asyncio.to_thread(upgrade, url)
            store = PostgresStore(url)
            closers.push_async_callback(store.close)
            await create_missing(store, [entry.credential() for entry in config.bootstrap.credentials])
            if config.credentials_required:
                await create_first_admin(store, config.admin_token_file or config.data_dir / "admin.token")
            scheduler = Scheduler(config, store, epoch=epoch, lock=_lock(config, url, epoch))
            await scheduler.start()
        closers.push_async_callback(scheduler.stop)
        console = Console(scheduler) if config.console else None
        http = HttpServer(scheduler) if console is None else HttpServer(scheduler, console.add_to)
        with _step(f"listen_http {config.listen_http}"):
            await http.start(config.listen_http)
        closers.push_async_callback(http.stop)
        if console is not None:
            console.start()
            closers.push_async_callback(console.stop)  # before the server, which waits for its streams
        grpc_server = GrpcServer(scheduler, config)
        with _step(f"listen {config.listen}"):
            await grpc_server.start()
        calm_collector()
        collecting = asyncio.create_task(collect_garbage())
        closers.callback(collecting.cancel)
        ports = {"grpc": grpc_server.port, "http": http.port}
        if config.listen_mtls:
            ports["mtls"] = grpc_server.mtls_port
        interpreted = why_interpreted()
        log.info("listening", **ports, decisions=f"interpreted: {interpreted}" if interpreted else "compiled")
        if config.port_file is not None:
            _write_ports(config.port_file, ports)
        await stop.wait()
        log.info("draining", reservations=len(scheduler.ledger.reservations))
        scheduler.drain()
        await scheduler.hand_over()
        await grpc_server.stop(config.drain_timeout_s)


def _lock(config: Config, url: str, epoch: str) -> PostgresLeaderLock | None:
    return PostgresLeaderLock(url, f"{config.name}.{epoch}", config.lease_s) if config.standby else None


@contextmanager
def _step(name: str) -> Iterator[None]:
    """What outside this program can keep it from starting is said in one line, with the setting it concerns."""
    try:
        yield
    except (HeadwayError, SQLAlchemyError, OSError, RuntimeError) as error:
        raise StartError(f"{name}: {str(error).strip().partition(chr(10))[0]}") from error


def _embedded(data_dir: Path, closers: AsyncExitStack) -> str:
    """Start the embedded Postgres in this thread, which outlives it: the kernel ends it with its starter."""
    postgres = EmbeddedPostgres(data_dir)
    url = postgres.start()
    closers.callback(postgres.stop)
    return url


def _write_ports(path: Path, ports: Mapping[str, int]) -> None:
    """All at once: whoever sees the file sees all of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(ports))
    partial.rename(path)
