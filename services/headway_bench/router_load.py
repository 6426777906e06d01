"""A data plane that does nothing else: it routes, and reports first tokens and ends, as fast as it is answered.

`python -m headway_bench.router_load PORT MODE CONCURRENCY SECONDS PROMPT_BYTES TOKEN RATE KIND` prints a JSON object.
MODE: `unary`, `connect` (the same calls by the Connect protocol), or `stream`.
RATE: routes a second, where they are calls; 0: as many as are answered. KIND of prompts: `text`, or `tokens`: bytes as
ids.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import count, cycle
from typing import Any, Final

import grpc
import uvloop
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

from headway_bench.connect_load import Caller, ConnectCaller
from headway_bench.figures import Json, percentile
from headway_bench.prompts import prompts_of

__all__ = ["main"]

_TTFT_MS: Final = 1.0
_OUTPUT_TOKENS: Final = 100


def _reports(reservation_id: str, prompt_tokens: int) -> Iterator[pb.Report]:
    yield pb.Report(reservation_id=reservation_id, first_token=pb.FirstToken(ttft_ms=_TTFT_MS))
    usage = pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=_OUTPUT_TOKENS)
    finished = pb.Finished(outcome=pb.OUTCOME_SUCCESS, usage=usage, duration_ms=2.0, ttft_ms=_TTFT_MS)
    yield pb.Report(reservation_id=reservation_id, finished=finished)


class _GrpcCaller:
    """Calls by gRPC; all share one channel."""

    def __init__(self, stub: Any, metadata: Any, requests: Iterator[pb.RouteRequest]) -> None:
        self._stub, self._metadata, self._requests = stub, metadata, requests

    async def route(self) -> pb.RouteResponse:
        answer: pb.RouteResponse = await self._stub.Route(next(self._requests), metadata=self._metadata)
        return answer

    async def report(self, request: pb.ReportRequest) -> None:
        await self._stub.Report(request, metadata=self._metadata)


class _Load:
    """`concurrency` requests in flight until the time is over."""

    def __init__(self, concurrency: int, seconds: float) -> None:
        self._concurrency = concurrency
        self._until = time.perf_counter() + seconds
        self._latencies: list[float] = []
        self._failed = 0

    async def calls(self, callers: Sequence[Caller], rate: float) -> None:
        """A Route call, and one Report call with both of its reports, by each caller one after another."""
        await asyncio.gather(*(self._call(caller, number, rate) for number, caller in enumerate(callers)))

    async def _call(self, caller: Caller, number: int, rate: float) -> None:
        interval = self._concurrency / rate if rate else 0.0
        due = time.perf_counter() + interval * number / self._concurrency
        while (now := time.perf_counter()) < self._until:
            if rate:
                if due > now:
                    await asyncio.sleep(due - now)
                due += interval
            began = time.perf_counter()
            try:
                answer = await caller.route()
                self._latencies.append(time.perf_counter() - began)
                reports = _reports(answer.reservation_id, answer.decision.prompt_tokens)
                await caller.report(pb.ReportRequest(reports=reports))
            except (grpc.aio.AioRpcError, ConnectionError):
                self._failed += 1

    async def stream(self, call: Any, requests: Iterator[pb.RouteRequest]) -> None:
        """One stream: what the answers of a message call for becomes the next message."""
        numbers, began = count(1), {}
        message = pb.RouteStreamRequest()
        open_calls = 0
        while True:
            while open_calls < self._concurrency and time.perf_counter() < self._until:
                number = next(numbers)
                began[number] = time.perf_counter()
                message.routes.add(correlation_id=number, request=next(requests))
                open_calls += 1
            if message.routes or message.reports:
                await call.write(message)
                message = pb.RouteStreamRequest()
            if not open_calls:
                break
            found = await call.read()
            if found is grpc.aio.EOF:
                self._failed += open_calls
                break
            now = time.perf_counter()
            for answer in found.answers:
                open_calls -= 1
                self._latencies.append(now - began.pop(answer.correlation_id))
                if answer.HasField("error"):
                    self._failed += 1
                else:
                    response = answer.response
                    message.reports.extend(_reports(response.reservation_id, response.decision.prompt_tokens))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    def figures(self, took: float) -> Json:
        """What came of it."""
        return {
            "requests": len(self._latencies),
            "failed": self._failed,
            "requests_per_s": len(self._latencies) / took,
            "p50_us": percentile(self._latencies, 0.5) * 1e6,
            "p99_us": percentile(self._latencies, 0.99) * 1e6,
        }


def _request(prompt: bytes, kind: str) -> pb.RouteRequest:
    if kind == "tokens":
        return pb.RouteRequest(model="m", tokens=pb.TokenIds(ids=prompt), max_tokens=_OUTPUT_TOKENS)
    return pb.RouteRequest(model="m", text=prompt.decode(), max_tokens=_OUTPUT_TOKENS)


async def _run(
    port: str, mode: str, concurrency: int, seconds: float, prompt_bytes: int, token: str, rate: float, kind: str
) -> Json:
    requests = [_request(prompt, kind) for prompt in prompts_of(prompt_bytes)]
    async with AsyncExitStack() as stack:
        callers: list[Caller] = []
        if mode == "connect":
            bodies = cycle([each.SerializeToString() for each in requests])
            connections = [ConnectCaller(token, bodies) for _ in range(concurrency)]
            for connection in connections:
                await stack.enter_async_context(connection.connected(int(port)))
            callers = [*connections]
        else:
            metadata = (("authorization", f"Bearer {token}"),) if token else None
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
            stub, wanted = routing_pb2_grpc.RouterStub(channel), cycle(requests)
            callers = [_GrpcCaller(stub, metadata, wanted)] * concurrency
        began = time.perf_counter()
        load = _Load(concurrency, seconds)
        if mode == "stream":
            await load.stream(stub.RouteStream(metadata=metadata), wanted)
        else:
            await load.calls(callers, rate)
        return load.figures(time.perf_counter() - began)


def main() -> None:
    """Run as the arguments say."""
    port, mode, concurrency, seconds, prompt_bytes, token, rate, kind = sys.argv[1:]
    found = _run(port, mode, int(concurrency), float(seconds), int(prompt_bytes), token, float(rate), kind)
    print(json.dumps(uvloop.run(found)))


if __name__ == "__main__":
    main()
