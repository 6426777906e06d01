"""The Telemetry service: one stream from each agent."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from grpc.aio import ServicerContext
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway.telemetry.v1 import telemetry_pb2_grpc

from headway_scheduler.app import Scheduler
from headway_scheduler.certificates import expires_at
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.telemetry import Hello
from headway_scheduler.errors import DuplicateNode, HeadwayError, InvalidField
from headway_scheduler.fleet.fleet import Node
from headway_scheduler.rpc.authentication import current_principal
from headway_scheduler.rpc.authorization import authorize_node
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


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    """Feeds the fleet. A wrong message is answered by ending the stream with the field's name; nothing else changes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def Connect(  # type: ignore[override]  # noqa: N802  the stubs know only generators
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Context
    ) -> None:
        """Hello first, then samples and events until the agent goes. Reads by the context: an iterator costs more."""
        fleet = self._scheduler.fleet
        node: Node | None = None
        connection, draining, resync_asked, acks = 0, False, False, Acks()
        try:
            message = await _first(context)
            while message is not grpc.aio.EOF:
                kind = message.WhichOneof("message")
                if kind == "hello":
                    if node is not None and node.id != message.hello.node:
                        raise InvalidField("hello.node", f"this stream speaks for {node.id!r}")
                    node = await self._hello(message.hello)
                    self._note_certificate(node, context)
                    connection, resync_asked, acks = node.connection, False, Acks()
                    await context.write(pb.ConnectResponse(welcome=self._welcome()))
                elif node is None:
                    raise InvalidField("hello", "must be the first message")
                elif fleet.nodes.get(node.id) is not node:
                    # It was forgotten meanwhile; what is under way until the Hello counts for nothing.
                    if not resync_asked:
                        resync_asked = True
                        await context.write(pb.ConnectResponse(resync=pb.Resync()))
                    message = await context.read()
                    continue
                elif node.connection != connection:
                    raise DuplicateNode(node.id)  # a newer stream speaks for it
                elif kind == "sample":
                    self._sample(node, message.sample)
                    if acks.due(node.heard_at):
                        await context.write(pb.ConnectResponse(ack=pb.Ack(sequence=node.sequence)))
                else:
                    self._event(node, message)
                    acks.awaited = acks.awaited or kind == "device_event"
                if draining != (node.state is SchedulingState.DRAINING):
                    draining = not draining
                    await context.write(pb.ConnectResponse(drain=pb.Drain(draining=draining)))
                message = await context.read()
        except HeadwayError as error:
            log.warning("agent_refused", node=node.id if node else "", reason=error.reason, problem=error.message)
            raise
        finally:
            if node is not None:
                fleet.disconnect(node, connection)
                log.info("agent_disconnected", node=node.id)

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

    def _note_certificate(self, node: Node, context: Context) -> None:
        shown = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
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

    def _sample(self, node: Node, message: pb.Sample) -> None:
        scheduler = self._scheduler
        scheduler.fleet.apply_sample(node, sample_from_proto(message), scheduler.clock())

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


async def _first(context: Context) -> Any:  # a message, or gRPC's EOF
    """What the agent says first. Raises InvalidField where nothing comes within `FIRST_WORD_S`."""
    try:
        return await asyncio.wait_for(context.read(), FIRST_WORD_S)
    except TimeoutError:
        raise InvalidField("hello", f"did not come within {FIRST_WORD_S:g} s") from None
