"""An OpenTelemetry collector: takes spans by OTLP over gRPC on a real port, and keeps them."""

import contextlib

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`spans` by name, in the order in which they came."""

    def __init__(self):
        self.spans = {}
        self.services = set()
        self.port = 0

    async def Export(self, request, context):  # noqa: N802
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.name, []).append(span)
        return pb.ExportTraceServiceResponse()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def one(self, name):
        (found,) = self.spans[name]
        return found


def attributes(span):
    """A span's, as plain values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@contextlib.asynccontextmanager
async def collecting():
    """A collector until the block ends."""
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
