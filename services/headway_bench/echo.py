"""The bare minimum that grpc.aio can do with the same messages: it reads them, and answers as long ones as we would.

`python -m headway_bench.echo` prints its port. It decides nothing, checks nobody and remembers nothing.
"""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import uvloop
from grpc.aio import ServicerContext
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

__all__ = ["main"]

Context = ServicerContext[Any, Any]  # of any message of the service


def _answer(request: pb.RouteRequest) -> pb.RouteResponse:
    endpoints = [
        pb.Endpoint(name=f"endpoints/10.0.0.{number}:8000@0", address=f"10.0.0.{number}:8000", node="nodes/bench")
        for number in range(4)
    ]
    response = pb.RouteResponse(
        request_id="scheduler.0123abcd.1234567",
        reservation_id="scheduler.0123abcd.1234567",
        endpoint=endpoints[0],
        fallbacks=endpoints[1:],
        cache_salt="0" * 32,
        model=request.model,
        decision=pb.Decision(
            strategy="strategies/adaptive",
            prompt_tokens=512,
            matched_tokens=128,
            predicted_ttft_ms=23.0,
            task_class=pb.TASK_CLASS_CHAT,
            task_weight=1.5,
            candidates=100,
        ),
    )
    response.reservation_ttl.seconds = 300
    return response


class _Echo(routing_pb2_grpc.RouterServicer):
    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:  # noqa: N802
        return _answer(request)

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:  # noqa: N802
        results = [
            pb.ReportResult(reservation_id=each.reservation_id, status=pb.REPORT_STATUS_APPLIED)
            for each in request.reports
        ]
        return pb.ReportResponse(results=results)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:  # noqa: N802
        return pb.ResumeResponse()

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        return pb.ExplainResponse()

    async def IdentifyKeys(  # noqa: N802
        self, request: pb.IdentifyKeysRequest, context: Context
    ) -> pb.IdentifyKeysResponse:
        return pb.IdentifyKeysResponse()

    async def RouteStream(  # type: ignore[override]  # noqa: N802  the stubs know only generators
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], context: Context
    ) -> None:
        async for message in request_iterator:
            response = pb.RouteStreamResponse()
            for call in message.routes:
                answer = response.answers.add(correlation_id=call.correlation_id)
                answer.response.CopyFrom(_answer(call.request))
            await context.write(response)


_OPTIONS: Final = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]


async def _serve() -> None:
    server = grpc.aio.server(options=_OPTIONS)
    routing_pb2_grpc.add_RouterServicer_to_server(_Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as the scheduler's
    print(port, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
