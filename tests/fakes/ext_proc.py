"""Envoy's end of an ext_proc stream, without Envoy: says what a test tells it to, and keeps what it is answered."""

import asyncio

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = range(5)
POST = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
GET = {":method": "GET", ":path": "/v1/models"}


class Context:
    """What the service sees of a call."""

    def __init__(self, metadata=()):
        self.metadata = tuple(dict(metadata).items())
        self.incoming, self.outgoing = asyncio.Queue(), asyncio.Queue()
        self.aborted = None

    def invocation_metadata(self):
        return self.metadata

    def peer(self):
        return "ipv4:10.9.9.9:1"

    async def read(self):
        return await self.incoming.get()

    async def write(self, message):
        self.outgoing.put_nowait(pb.ProcessingResponse.FromString(message))

    async def abort(self, code, message):
        self.aborted = code
        raise grpc.aio.AbortError(message)


class Process:
    """One stream. `replies` are all that were taken from it, in order."""

    def __init__(self, service, metadata=(), *, request=DUPLEX, response=DUPLEX, told=True):
        self.context = Context(metadata)
        self.modes = pb.ProtocolConfiguration(request_body_mode=request, response_body_mode=response) if told else None
        self.task = asyncio.create_task(service.process(None, self.context))

    def say(self, message):
        if self.modes is not None:
            message.protocol_config.CopyFrom(self.modes)
            self.modes = None
        self.context.incoming.put_nowait(message)

    def headers(self, values, *, end=False, kind="request_headers", subset=None, served=None, attributes=None):
        message = pb.ProcessingRequest()
        part = getattr(message, kind)
        for key, value in values if isinstance(values, list) else values.items():
            part.headers.headers.append(base_pb2.HeaderValue(key=key, raw_value=value.encode()))
        part.end_of_stream = end
        metadata = message.metadata_context.filter_metadata
        if subset is not None:
            metadata["envoy.lb.subset_hint"].update({"x-gateway-destination-endpoint-subset": subset})
        if served is not None:
            metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
        if attributes is not None:
            message.attributes["envoy.filters.http.ext_proc"].update(attributes)
        self.say(message)

    def body(self, data, *, end=True, kind="request_body"):
        message = pb.ProcessingRequest()
        getattr(message, kind).body = data
        getattr(message, kind).end_of_stream = end
        self.say(message)

    def trailers(self, kind="request_trailers"):
        message = pb.ProcessingRequest()
        getattr(message, kind).SetInParent()
        self.say(message)

    def half_close(self):
        self.context.incoming.put_nowait(grpc.aio.EOF)

    async def reply(self, kind):
        """The next reply, which must answer this kind of message."""
        getting = asyncio.ensure_future(self.context.outgoing.get())
        await asyncio.wait((getting, self.task), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            raise AssertionError(f"no reply; {self.task}")
        reply = getting.result()
        assert reply.WhichOneof("response") == kind, reply
        return reply

    def silent(self):
        return self.context.outgoing.empty()

    async def ended(self):
        async with asyncio.timeout(10):
            await self.task

    async def pieces(self, kind="request_body"):
        """A whole streamed body: its pieces and whether its end was said."""
        found, end = [], False
        while not self.silent() and not end:
            piece = (getattr(await self.reply(kind), kind)).response.body_mutation.streamed_response
            found.append(piece.body)
            end = piece.end_of_stream
        return found, end


class Refused:
    """An immediate response as a client sees it."""

    def __init__(self, reply):
        answer = reply.immediate_response
        self.status, self.body, self.details = answer.status.code, answer.body, answer.details
        self.headers = set_headers(answer.headers)


def set_headers(mutation):
    """Headers set, each of which overwrites what was there."""
    found = {}
    for option in mutation.set_headers:
        assert option.append_action == base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        assert option.header.key not in found
        found[option.header.key] = option.header.raw_value.decode()
    return found
