"""A fake scheduler's Telemetry service: records what agents send, and misbehaves on demand."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import grpc
from google.protobuf.duration_pb2 import Duration
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway.telemetry.v1.telemetry_pb2_grpc import TelemetryServicer, add_TelemetryServicer_to_server


@dataclass
class Stream:
    """One agent's stream, as the scheduler saw it."""

    metadata: dict
    messages: list = field(default_factory=list)
    answers: asyncio.Queue = field(default_factory=asyncio.Queue)
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    half_closed: bool = False

    def of(self, kind):
        return [getattr(m, kind) for m in self.messages if m.WhichOneof("message") == kind]

    @property
    def kinds(self):
        return [m.WhichOneof("message") for m in self.messages]

    def send(self, **message):
        self.answers.put_nowait(pb.ConnectResponse(**message))

    def close(self):
        self.answers.put_nowait(None)


class FakeScheduler(TelemetryServicer):
    """`refuse` is (code, details) for every stream; `mute` sends no Welcome; `deaf` reads only the Hello."""

    def __init__(self, name="s1", interval_s=0.05):
        self.name, self.interval_s = name, interval_s
        self.refuse = None
        self.mute = self.deaf = self.acks = False
        self.streams = []
        self.address = ""

    @property
    def stream(self):
        return self.streams[-1]

    async def Connect(self, requests, context):  # noqa: N802 - gRPC's name
        stream = Stream(dict(context.invocation_metadata()))
        self.streams.append(stream)
        if self.refuse:
            await context.abort(*self.refuse)
        hello = await anext(aiter(requests), None)
        if hello is None:
            return
        stream.messages.append(hello)
        if not self.mute:
            interval = Duration(nanos=int(self.interval_s * 1e9))
            stream.send(welcome=pb.Welcome(scheduler=self.name, epoch="1", interval=interval))
        if not self.deaf:
            stream.reading.set()
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            while (answer := await stream.answers.get()) is not None:
                yield answer
        finally:
            reader.cancel()

    async def _read(self, stream, requests):
        await stream.reading.wait()
        async for message in requests:
            stream.messages.append(message)
            if self.acks and message.WhichOneof("message") == "sample":
                stream.send(ack=pb.Ack(sequence=message.sample.sequence))
        stream.half_closed = True
        stream.close()


@contextlib.asynccontextmanager
async def running_scheduler(port=0, credentials=None, scheduler=None):
    """A fake scheduler, listening on 127.0.0.1 until the block ends."""
    scheduler = scheduler or FakeScheduler()
    server = grpc.aio.server()
    add_TelemetryServicer_to_server(scheduler, server)
    address = f"127.0.0.1:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    scheduler.address = f"127.0.0.1:{bound}"
    await server.start()
    try:
        yield scheduler
    finally:
        await server.stop(None)
