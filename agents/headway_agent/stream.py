"""One stream to one scheduler: Hello, then samples and events, for as long as the agent lives.

A stream that ends is opened again after a jittered, growing pause; one that the scheduler refuses (the
node's name is taken, the token is wrong) after a long one, for only a person can help.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
import structlog
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway.telemetry.v1.telemetry_pb2_grpc import TelemetryStub

from headway_agent import convert
from headway_agent.config import AgentConfig, TlsSettings
from headway_agent.inventory import Inventory, NodeIdentity, Sample
from headway_agent.outbox import Outbox, Outgoing

log = structlog.get_logger(__name__)

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    # Our own loop decides when to connect again.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_REFUSALS = {
    grpc.StatusCode.ALREADY_EXISTS: "another agent uses this node's name; give each host its own",
    grpc.StatusCode.PERMISSION_DENIED: "the token is not for an agent of this node's name",
    grpc.StatusCode.UNAUTHENTICATED: "the token is missing or unknown",
    grpc.StatusCode.INVALID_ARGUMENT: "the scheduler cannot use what this agent says of itself",
    grpc.StatusCode.UNIMPLEMENTED: "this address is no Headway scheduler, or an older one",
}


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next try, in seconds."""

    base_s: float = 0.5
    max_s: float = 2.0
    """Below the time that a restarted scheduler waits for its agents (its `settle_s`, 5 s)."""
    refused_s: float = 60.0
    steady_s: float = 10.0
    """A stream that lasted so long was a good one: count from the beginning again."""

    def pause_s(self, failures: int, refused: bool, random: Callable[[], float]) -> float:
        """Half of the nominal pause to all of it: agents of a dead scheduler must not return together."""
        nominal = self.refused_s if refused else min(self.max_s, self.base_s * 2.0 ** min(failures - 1, 16))
        return nominal * (0.5 + 0.5 * random())


@dataclass(slots=True)
class Pace:
    """How often to sample: the fastest that a connected scheduler asks for, else as configured."""

    default_s: float
    _asked: dict[str, float] = field(default_factory=dict)

    def ask(self, scheduler: str, interval_s: float) -> None:
        """A scheduler names its interval; one that is not positive names none. Bounded to 0.05 to 60 s."""
        if interval_s > 0:
            self._asked[scheduler] = min(60.0, max(0.05, interval_s))

    def forget(self, scheduler: str) -> None:
        """Its stream is gone."""
        self._asked.pop(scheduler, None)

    @property
    def interval_s(self) -> float:
        """Seconds from one sample to the next."""
        return min(self._asked.values(), default=self.default_s)


@dataclass(frozen=True, slots=True)
class Dialer:
    """How to reach schedulers: TLS and the token."""

    tls: TlsSettings | None
    token: Callable[[], str]

    @classmethod
    def of(cls, config: AgentConfig) -> "Dialer":
        """As configured. The token's file is read at each connect."""
        return cls(config.tls, lambda: config.token_file.read_text().strip() if config.token_file else config.token)

    def channel(self, address: str) -> grpc.aio.Channel:
        """A new channel. Raises OSError when a certificate cannot be read."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=_KEEPALIVE)
        read = [p.read_bytes() if p else None for p in (self.tls.ca_file, self.tls.key_file, self.tls.cert_file)]
        options: list[tuple[str, object]] = [*_KEEPALIVE]
        if self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*read), options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The credential. Raises OSError when the token's file cannot be read."""
        token = self.token()
        return (("authorization", f"Bearer {token}"),) if token else ()


class StreamEndedError(Exception):
    """The stream is over; `code` is the scheduler's status, or None when we gave up on it."""

    def __init__(self, why: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(why)
        self.code = code


Call = grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]


@dataclass(slots=True)
class SchedulerStream:
    """Keeps one scheduler told. Start `run` as a task; `stop` ends it kindly."""

    scheduler: str
    identity: NodeIdentity
    dialer: Dialer
    pace: Pace
    outbox: Outbox
    clock: Callable[[], float]
    wall: Callable[[], float]
    random: Callable[[], float]
    backoff: Backoff = field(default_factory=Backoff)
    welcome_timeout_s: float = 10.0
    draining: bool = False
    connected: bool = False
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Connect, talk, and again, until stopped."""
        failures = 0
        while not self._stopping.is_set():
            began = self.clock()
            ended = await self._session()
            # A token of before the last rotation, on a stream that lived: the next one shows what the file has now.
            renewable = self.connected and ended.code is grpc.StatusCode.UNAUTHENTICATED
            self.connected = False
            self.pace.forget(self.scheduler)
            if self._stopping.is_set():
                return
            failures = 1 if self.clock() - began > self.backoff.steady_s else failures + 1
            refused = ended.code in _REFUSALS and not renewable
            pause_s = self.backoff.pause_s(failures, refused, self.random)
            self._log_end(ended, pause_s, refused=refused)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    def stop(self) -> None:
        """Say goodbye: half-close, let the scheduler end the stream."""
        self._stopping.set()
        self.outbox.close()

    async def _session(self) -> StreamEndedError:
        """One stream, from connect to its end; says how it ended."""
        try:
            async with self.dialer.channel(self.scheduler) as channel:
                call: Call = TelemetryStub(channel).Connect(metadata=self.dialer.metadata())
                try:
                    await self._talk(call)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            return StreamEndedError(error.details() or "no details", error.code())
        except StreamEndedError as error:
            return error
        except OSError as error:
            return StreamEndedError(f"cannot read a credential: {error}")

    async def _talk(self, call: Call) -> NoReturn:
        """Hello, Welcome, then both directions. Raises StreamEndedError or gRPC's own error at its end."""
        self.outbox.begin()
        writer = asyncio.create_task(self._write_hello(call))
        try:
            self._welcome(await self._first(call))
            await writer
            writer = asyncio.create_task(self._write(call))
            while (response := await call.read()) is not grpc.aio.EOF:
                assert isinstance(response, pb.ConnectResponse)  # noqa: S101 - read() gives EOF or a message
                self._obey(response)
            raise StreamEndedError(await call.details() or "the scheduler closed the stream", await call.code())
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _first(self, call: Call) -> pb.ConnectResponse:
        try:
            first = await asyncio.wait_for(call.read(), self.welcome_timeout_s)
        except TimeoutError:
            raise StreamEndedError(f"no Welcome in {self.welcome_timeout_s} s") from None
        if first is grpc.aio.EOF:
            raise StreamEndedError(await call.details() or "closed before Welcome", await call.code())
        assert isinstance(first, pb.ConnectResponse)  # noqa: S101 - read() gives EOF or a message
        return first

    def _welcome(self, first: pb.ConnectResponse) -> None:
        if first.WhichOneof("message") != "welcome":
            raise StreamEndedError("the first message was not Welcome")
        self.pace.ask(self.scheduler, convert.seconds(first.welcome.interval))
        self.connected = True
        log.info(
            "scheduler_connected",
            address=self.scheduler,
            scheduler=first.welcome.scheduler,
            epoch=first.welcome.epoch,
            interval_s=self.pace.interval_s,
        )

    async def _write_hello(self, call: Call) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._send_next(call)

    async def _write(self, call: Call) -> None:
        """Send as fast as the scheduler reads; whatever ends the stream is seen by the reading side."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while await self._send_next(call):
                pass
            await call.done_writing()

    async def _send_next(self, call: Call) -> bool:
        outgoing = await self.outbox.take()
        if outgoing is not None:
            await call.write(self._message(outgoing))
        return outgoing is not None

    def _message(self, outgoing: Outgoing) -> pb.ConnectRequest:
        match outgoing:
            case Inventory():
                return convert.hello(self.identity, outgoing, self.wall())
            case Sample():
                return convert.sample(outgoing)
            case tuple():
                return convert.kv_events(outgoing)
            case _:
                return convert.event(outgoing)

    def _obey(self, response: pb.ConnectResponse) -> None:
        match response.WhichOneof("message"):
            case "ack":
                self.outbox.confirm(response.ack.sequence)
            case "resync":
                log.info("resync_requested", address=self.scheduler)
                self.outbox.request_hello()
            case "interval":
                self.pace.ask(self.scheduler, convert.seconds(response.interval))
                log.info("interval_changed", address=self.scheduler, interval_s=self.pace.interval_s)
            case "drain":
                self.draining = response.drain.draining
                log.info("drain_requested" if self.draining else "drain_ended", address=self.scheduler)
            case "welcome":
                self.pace.ask(self.scheduler, convert.seconds(response.welcome.interval))
            case _:
                log.debug("message_not_understood", address=self.scheduler)

    def _log_end(self, ended: StreamEndedError, pause_s: float, *, refused: bool) -> None:
        facts = {"address": self.scheduler, "why": str(ended), "retry_in_s": round(pause_s, 2)}
        code = ended.code.name if ended.code else ""
        if refused and ended.code is not None:
            log.error("scheduler_refused", code=code, hint=_REFUSALS[ended.code], **facts)
        else:
            log.warning("scheduler_stream_ended", code=code, **facts)
