"""The Telemetry service: one stream from each agent."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext
from headway.telemetry.v1 import telemetry_pb2 as pb

from headway_scheduler.app import Scheduler
from headway_scheduler.certificates import expires_at
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.telemetry import Hello
from headway_scheduler.errors import DuplicateNode, HeadwayError, InvalidField
from headway_scheduler.fleet.members import Node
from headway_scheduler.rpc.authentication import current_principal
from headway_scheduler.rpc.authorization import authorize_node
from headway_scheduler.rpc.convert.scanning import SampleScanner, Scanned
from headway_scheduler.rpc.convert.telemetry import (
    device_event_from_proto,
    hello_from_proto,
    kv_events_from_proto,
    sample_from_proto,
    spec_from_proto,
)
from headway_scheduler.rpc.streams import FIRST_WORD_S

__all__ = ["ACK_EVERY_S", "Acks", "TelemetryService"]

log = structlog.get_logger()

ACK_EVERY_S: Final = 10.0
"""How often a sample is acknowledged that nobody waits for."""

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Telemetry"].full_name

Context = ServicerContext[Any, Any]  # a context of any of the service's messages


@dataclass(slots=True)
class Acks:
    """When one agent is told which sample was applied last: a message costs as much as the sample it answers.

    At once for a stream's first sample, and for the one after a device's event, which the agent keeps until then; else
    seldom. Each acknowledges all samples before it.
    """

    awaited: bool = True
    """The agent waits for one."""
    due_at: float = 0.0

    def due(self, now: float) -> bool:
        """A sample was applied: is it to be acknowledged?"""
        if not self.awaited and now < self.due_at:
            return False
        self.awaited, self.due_at = False, now + ACK_EVERY_S
        return True


class TelemetryService:
    """Feeds the fleet. A wrong message is answered by ending the stream with the field's name; nothing else changes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._scanner = SampleScanner()

    def add_to(self, server: "grpc.aio.Server | grpc.Server") -> None:
        """As generated code would, but messages come as bytes: of most no objects need be made."""
        connect: grpc.RpcMethodHandler[bytes, pb.ConnectResponse] = grpc.stream_stream_rpc_method_handler(
            self.Connect, response_serializer=pb.ConnectResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Connect": connect}),))
        server.add_registered_method_handlers(_SERVICE, {"Connect": connect})

    async def Connect(self, _: AsyncIterator[bytes], context: Context) -> None:  # noqa: N802  as in the protos
        """Hello first, then samples and events until the agent goes. Reads by the context: an iterator costs more."""
        session = _Session(self._scheduler, self._scanner, context)
        try:
            raw = await _first(context)
            while raw is not grpc.aio.EOF:
                await session.hear(raw)
                raw = await context.read()
        except HeadwayError as error:
            log.warning("agent_refused", node=session.node_id, reason=error.reason, problem=error.message)
            raise
        finally:
            session.end()


class _Session:
    """One stream of an agent."""

    def __init__(self, scheduler: Scheduler, scanner: SampleScanner, context: Context) -> None:
        self._scheduler, self._scanner, self._context = scheduler, scanner, context
        self._node: Node | None = None
        self._connection = 0
        self._draining = self._resync_asked = False
        self._acks = Acks()
        self._words = b""
        """Of the newest sample."""

    @property
    def node_id(self) -> str:
        """Whom it speaks for; empty: it has not said Hello."""
        return "" if self._node is None else self._node.id

    def end(self) -> None:
        """The agent went."""
        if self._node is not None:
            self._scheduler.fleet.disconnect(self._node, self._connection)
            log.info("agent_disconnected", node=self._node.id)

    async def hear(self, raw: bytes) -> None:
        """One message. Raises InvalidField, DuplicateNode."""
        scanned = self._scanner.scan(raw)
        sampled = scanned is not None and self._repeated(scanned)
        if not sampled:
            sampled = await self._understand(_message(raw), scanned)
        node = self._node
        if node is None:
            return
        if sampled and self._acks.due(node.heard_at):
            await self._context.write(pb.ConnectResponse(ack=pb.Ack(sequence=node.sequence)))
        if self._draining != (node.state is SchedulingState.DRAINING):
            self._draining = not self._draining
            await self._context.write(pb.ConnectResponse(drain=pb.Drain(draining=self._draining)))

    def _repeated(self, scanned: Scanned) -> bool:
        """Was it a sample with other numbers than the one before, and nothing else? Then it is applied."""
        fleet, node = self._scheduler.fleet, self._node
        if node is None or node.connection != self._connection or fleet.nodes.get(node.id) is not node:
            return False
        sequence, numbers, words, throttles = scanned
        return fleet.apply_numbers(node, sequence, words, numbers, throttles, self._scheduler.clock())

    async def _understand(self, message: pb.ConnectRequest, scanned: Scanned | None) -> bool:
        """Any message; True: it was a sample of a node that this stream speaks for."""
        node, kind = self._node, message.WhichOneof("message")
        if kind == "hello":
            await self._greet(message.hello)
        elif node is None:
            raise InvalidField("hello", "must be the first message")
        elif self._scheduler.fleet.nodes.get(node.id) is not node:
            # It was forgotten meanwhile; what is under way until the Hello counts for nothing.
            if not self._resync_asked:
                self._resync_asked = True
                await self._context.write(pb.ConnectResponse(resync=pb.Resync()))
        elif node.connection != self._connection:
            raise DuplicateNode(node.id)  # a newer stream speaks for it
        elif kind == "sample":
            self._sample(node, message.sample, scanned)
            return True
        else:
            self._event(node, message)
            self._acks.awaited = self._acks.awaited or kind == "device_event"
        return False

    async def _greet(self, message: pb.Hello) -> None:
        if self._node is not None and self._node.id != message.node:
            raise InvalidField("hello.node", f"this stream speaks for {self._node.id!r}")
        node = self._node = await self._hello(message)
        self._note_certificate(node)
        self._connection, self._resync_asked, self._acks = node.connection, False, Acks()
        await self._context.write(pb.ConnectResponse(welcome=self._welcome()))

    async def _hello(self, message: pb.Hello) -> Node:
        scheduler = self._scheduler
        authorize_node(current_principal(), message.node)
        hello = hello_from_proto(message)
        node = await self._connected(hello)
        node.clock_skew_s = 0.0 if hello.clock_s is None else hello.clock_s - time.time()
        if abs(node.clock_skew_s) > scheduler.fleet.config.clock_skew_warning_s:
            # Only a warning: all times are taken by the scheduler's own clock.
            log.warning("agent_clock_off", node=node.id, skew_s=round(node.clock_skew_s, 3))
        log.info(
            "agent_connected", node=node.id, devices=len(hello.devices), endpoints=[spec.id for spec in hello.endpoints]
        )
        return node

    def _note_certificate(self, node: Node) -> None:
        shown = next(iter(self._context.auth_context().get("x509_pem_cert", ())), None)
        expires = None if shown is None else expires_at(shown)
        if expires is None:
            self._scheduler.agent_certificates.pop(node.id, None)
        else:
            self._scheduler.agent_certificates[node.id] = expires

    async def _connected(self, hello: Hello) -> Node:
        """The node, of this agent from now on.

        A restarted agent may come back before its old stream is known to be dead: it gets the time in which that one
        would have to send a sample. A second agent of the same name is refused after it. Raises DuplicateNode.
        """
        fleet, clock = self._scheduler.fleet, self._scheduler.clock
        try:
            return fleet.connect(hello, clock())
        except DuplicateNode:
            await asyncio.sleep(fleet.config.stale_after_s)
            return fleet.connect(hello, clock())

    def _welcome(self) -> pb.Welcome:
        config = self._scheduler.config
        welcome = pb.Welcome(scheduler=config.name, epoch=self._scheduler.epoch)
        welcome.interval.FromMilliseconds(int(config.telemetry_interval_s * 1e3))
        return welcome

    def _sample(self, node: Node, message: pb.Sample, scanned: Scanned | None) -> None:
        fleet, sample = self._scheduler.fleet, sample_from_proto(message)
        if not fleet.apply_sample(node, sample, self._scheduler.clock()):
            return
        before, self._words = self._words, b"" if scanned is None else scanned.words
        if scanned is not None and scanned.words == before:
            fleet.expect_numbers(node, sample, scanned.words, scanned.numbers)

    def _event(self, node: Node, message: pb.ConnectRequest) -> None:
        fleet, kind = self._scheduler.fleet, message.WhichOneof("message")
        node.heard_at = self._scheduler.clock()
        if kind == "device_event":
            event = device_event_from_proto(message.device_event)
            log.warning("device_event", node=node.id, device=event.uuid, kind=event.kind.value, xid=event.xid)
            fleet.apply_device_event(node, event)
        elif kind == "endpoint_change":
            spec = spec_from_proto(message.endpoint_change.endpoint, "endpoint_change.endpoint")
            if message.endpoint_change.removed:
                if spec.id in node.endpoints:
                    fleet.remove_endpoint(spec.id)
            else:
                fleet.put_endpoint(node, spec, self._scheduler.clock())
            log.info("endpoint_changed", endpoint=spec.id, removed=message.endpoint_change.removed, ready=spec.ready)
        elif kind == "kv_events":
            self._kv_events(node, message.kv_events, "kv_events")
        elif kind == "kv_event_batches":
            for number, batch in enumerate(message.kv_event_batches.batches):
                self._kv_events(node, batch, f"kv_event_batches.batches[{number}]")
        else:
            raise InvalidField("message", "is required")

    def _kv_events(self, node: Node, message: pb.KvEventBatch, field: str) -> None:
        events = kv_events_from_proto(message, field)
        endpoint = node.endpoints.get(events.endpoint)
        if endpoint is not None:
            self._scheduler.core.apply_kv_events(endpoint, events)


def _message(raw: bytes) -> pb.ConnectRequest:
    try:
        return pb.ConnectRequest.FromString(raw)
    except DecodeError:
        raise InvalidField("message", f"is no {pb.ConnectRequest.DESCRIPTOR.full_name}") from None


async def _first(context: Context) -> Any:  # a message, or gRPC's EOF
    """What the agent says first. Raises InvalidField where nothing comes within `FIRST_WORD_S`."""
    try:
        return await asyncio.wait_for(context.read(), FIRST_WORD_S)
    except TimeoutError:
        raise InvalidField("hello", f"did not come within {FIRST_WORD_S:g} s") from None
