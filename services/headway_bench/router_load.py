"""A data plane that does nothing else: it routes, and reports first tokens and ends.

`python -m headway_bench.router_load PORT MODE CONCURRENCY SECONDS PROMPT_BYTES TOKEN RATE KIND [ECHO_PORT]` prints a
JSON object. MODE: `unary`, `connect` (the same calls by the Connect protocol), or `stream`. RATE 0: CONCURRENCY
requests at a time, as fast as they are answered; else so many a second, sent when they are due, whatever is answered
by then. KIND of prompts: `text`, or `tokens`: bytes as ids. ECHO_PORT: a bare echo, which is asked beside it, a few
times a second: what it takes there is this machine's and this process's own.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count, cycle
from typing import Any, Final

import grpc
import uvloop
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

from headway_bench.connect_load import Caller, ConnectCaller
from headway_bench.figures import Json, percentile
from headway_bench.processes import calm_collector
from headway_bench.prompts import prompts_of
from headway_bench.wire import number_field, submessage

__all__ = ["main"]

_TTFT_MS: Final = 1.0
_OUTPUT_TOKENS: Final = 100
_LINGER_S: Final = 0.005
_ECHOES_PER_S: Final = 100.0
_ROUTE_STREAM: Final = "/headway.routing.v1.Router/RouteStream"
_ROUTES: Final = pb.RouteStreamRequest.ROUTES_FIELD_NUMBER
_REPORTS: Final = pb.RouteStreamRequest.REPORTS_FIELD_NUMBER
_NUMBER: Final = pb.RouteCall.CORRELATION_ID_FIELD_NUMBER
_REQUEST: Final = pb.RouteCall.REQUEST_FIELD_NUMBER


def _reports(reservation_id: str, prompt_tokens: int) -> Iterator[pb.Report]:
    yield pb.Report(reservation_id=reservation_id, first_token=pb.FirstToken(ttft_ms=_TTFT_MS))
    usage = pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=_OUTPUT_TOKENS)
    finished = pb.Finished(outcome=pb.OUTCOME_SUCCESS, usage=usage, duration_ms=2.0, ttft_ms=_TTFT_MS)
    yield pb.Report(reservation_id=reservation_id, finished=finished)


class _GrpcCaller:
    """Calls by gRPC; all share one channel."""

    def __init__(self, channel: Any, metadata: Any, requests: Iterator[pb.RouteRequest]) -> None:
        self._stub, self._metadata, self._requests = routing_pb2_grpc.RouterStub(channel), metadata, requests

    async def route(self) -> pb.RouteResponse:
        answer: pb.RouteResponse = await self._stub.Route(next(self._requests), metadata=self._metadata)
        return answer

    async def report(self, request: pb.ReportRequest) -> None:
        await self._stub.Report(request, metadata=self._metadata)


class _Load:
    """Requests until the time is over."""

    def __init__(
        self, channel: Any, metadata: Any, seconds: float, requests: Sequence[pb.RouteRequest], *, views: bool = True
    ) -> None:
        self._channel, self._stub, self._metadata = channel, routing_pb2_grpc.RouterStub(channel), metadata
        self._all, self._requests = requests, cycle(requests)
        self._seconds, self._views = seconds, views
        self._start()
        self._latencies: list[float] = []
        self._late: list[float] = []
        self._failed = self._messages = 0

    def _start(self) -> None:
        self._began = time.perf_counter()
        self._until = self._began + self._seconds

    async def unary(self, concurrency: int) -> None:
        """Callers by gRPC, each with one request at a time."""
        await self._calls([self._grpc()] * concurrency)

    async def connect(self, concurrency: int, port: int, token: str) -> None:
        """Callers by the Connect protocol, each with a connection and one request at a time."""
        bodies = cycle([each.SerializeToString() for each in self._all])
        async with contextlib.AsyncExitStack() as connections:
            callers = [ConnectCaller(token, bodies) for _ in range(concurrency)]
            for caller in callers:
                await connections.enter_async_context(caller.connected(port))
            self._start()
            await self._calls(callers)

    async def _calls(self, callers: Sequence[Caller]) -> None:
        await asyncio.gather(*map(self._calls_of, callers))

    async def _calls_of(self, caller: Caller) -> None:
        while time.perf_counter() < self._until:
            await self._call(caller, time.perf_counter())

    def _grpc(self) -> Caller:
        return _GrpcCaller(self._channel, self._metadata, self._requests)

    async def paced_unary(self, rate: float) -> None:
        """Requests when they are due."""
        await self._channel.channel_ready()
        caller = self._grpc()
        self._start()
        async with asyncio.TaskGroup() as calls:
            async for many in self._due(rate):
                for _ in range(many):
                    calls.create_task(self._call(caller, time.perf_counter()))

    async def _call(self, caller: Caller, began: float) -> None:
        """A Route call, and one Report call with both of its reports."""
        try:
            answer = await caller.route()
            self._latencies.append(time.perf_counter() - began)
            reports = _reports(answer.reservation_id, answer.decision.prompt_tokens)
            await caller.report(pb.ReportRequest(reports=reports))
        except (grpc.aio.AioRpcError, ConnectionError):
            self._failed += 1

    async def _due(self, rate: float) -> AsyncIterator[int]:
        """How many are to be sent now, again and again; remembers how late that is."""
        due = time.perf_counter()
        while due < self._until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now, many = time.perf_counter(), 0
            while due <= now and due < self._until:
                self._late.append(now - due)
                due, many = due + 1 / rate, many + 1
            if many:
                yield many

    async def paced_stream(self, rate: float) -> None:
        """One stream: requests when they are due, reports when they are answered."""
        call = self._channel.stream_stream(_ROUTE_STREAM, response_deserializer=pb.RouteStreamResponse.FromString)(
            metadata=self._metadata
        )
        stream = _PacedStream(call, self._all)
        await stream.open(self._views)
        self._start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.write())
            tasks.create_task(stream.read())
            async for many in self._due(rate):
                stream.route(many)
            stream.end()
        self._latencies, self._failed, self._messages = stream.latencies, stream.failed, stream.messages

    async def stream(self, concurrency: int) -> None:
        """One stream: what the answers of a message call for becomes the next message."""
        call = self._stub.RouteStream(metadata=self._metadata)
        numbers, began = count(1), {}
        message = pb.RouteStreamRequest()
        open_calls = 0
        while True:
            while open_calls < concurrency and time.perf_counter() < self._until:
                number = next(numbers)
                began[number] = time.perf_counter()
                message.routes.add(correlation_id=number, request=next(self._requests))
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

    def figures(self) -> Json:
        """What came of it until now."""
        took = time.perf_counter() - self._began
        found = {
            "requests": len(self._latencies),
            "failed": self._failed,
            "requests_per_s": len(self._latencies) / took,
            "p50_us": percentile(self._latencies, 0.5) * 1e6,
            "p99_us": percentile(self._latencies, 0.99) * 1e6,
        }
        if self._late:
            found["late_p99_us"] = percentile(self._late, 0.99) * 1e6
        if self._messages:
            found["routes_a_message"] = len(self._latencies) / self._messages
        return found


class _PacedStream:
    """A RouteStream as the client library keeps it, but cheap.

    What comes while a message is written, and answered, becomes the next message; reports wait a little for requests.
    """

    def __init__(self, call: Any, requests: Sequence[pb.RouteRequest]) -> None:
        self.latencies: list[float] = []
        self.failed = self.messages = 0
        self._call = call
        self._requests = cycle([submessage(_REQUEST, each.SerializeToString()) for each in requests])
        self._numbers = count(1)
        self._began: dict[int, float] = {}
        self._routes: list[bytes] = []
        self._reports: list[bytes] = []
        self._news, self._asked, self._heard = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ended = False

    def route(self, many: int) -> None:
        """Ask for so many endpoints, from now on."""
        now = time.perf_counter()
        for number in (next(self._numbers) for _ in range(many)):
            self._began[number] = now
            self._routes.append(submessage(_ROUTES, number_field(_NUMBER, number) + next(self._requests)))
        self._news.set()
        self._asked.set()

    def end(self) -> None:
        """Nothing more is asked for; what is, is still answered and reported."""
        self._ended = True
        self._news.set()

    async def open(self, views: bool) -> None:
        """Be welcomed, and told which endpoints there are, where there are `views`, as any data plane soon is."""
        await self._call.write(b"")
        while (found := await self._call.read()) is not grpc.aio.EOF:
            if found.HasField("fail_open_view") or not views:
                return

    async def write(self) -> None:
        """Write until everything is answered and reported."""
        while not self._ended or self._began or self._routes or self._reports:
            if not self._routes and not self._reports and not self._ended:
                await self._news.wait()
            if not self._routes:
                await _within(_LINGER_S, self._asked)
            self._news.clear()
            self._asked.clear()
            routes, self._routes, reports, self._reports = self._routes, [], self._reports, []
            if routes or reports:
                self.messages += 1
                self._heard.clear()
                await self._call.write(b"".join(reports + routes))
            if routes:
                await _within(_LINGER_S, self._heard)
        await self._call.done_writing()

    async def read(self) -> None:
        """Take answers until the stream ends."""
        while (found := await self._call.read()) is not grpc.aio.EOF:
            now = time.perf_counter()
            self._heard.set()
            for answer in found.answers:
                self.latencies.append(now - self._began.pop(answer.correlation_id))
                if answer.HasField("error"):
                    self.failed += 1
                else:
                    response = answer.response
                    reports = _reports(response.reservation_id, response.decision.prompt_tokens)
                    self._reports.extend(submessage(_REPORTS, each.SerializeToString()) for each in reports)
            self._news.set()
        self.failed += len(self._began)
        self._began.clear()
        self._news.set()


async def _within(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _request(prompt: bytes, kind: str) -> pb.RouteRequest:
    if kind == "tokens":
        return pb.RouteRequest(model="m", tokens=pb.TokenIds(ids=prompt), max_tokens=_OUTPUT_TOKENS)
    return pb.RouteRequest(model="m", text=prompt.decode(), max_tokens=_OUTPUT_TOKENS)


async def _run(
    port: str,
    mode: str,
    concurrency: int,
    seconds: float,
    prompt_bytes: int,
    token: str,
    rate: float,
    kind: str,
    echo_port: str,
) -> Json:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    requests = [_request(prompt, kind) for prompt in prompts_of(prompt_bytes)]
    calm_collector()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{echo_port}") as echo_channel,
    ):
        began, before = time.perf_counter(), time.process_time()
        load = _Load(channel, metadata, seconds, requests)
        echo = _Load(echo_channel, metadata, seconds, requests, views=False)
        if rate:
            paced = _Load.paced_stream if mode == "stream" else _Load.paced_unary
            await asyncio.gather(paced(load, rate), *([paced(echo, _ECHOES_PER_S)] if echo_port else []))
        elif mode == "connect":
            await load.connect(concurrency, int(port), token)
        else:
            await (load.stream if mode == "stream" else load.unary)(concurrency)
        cores = (time.process_time() - before) / (time.perf_counter() - began)
        found = load.figures() | {"cpu_cores": cores}
        if echo_port:
            found["echo"] = echo.figures()
        return found


def main() -> None:
    """Run as the arguments say."""
    port, mode, concurrency, seconds, prompt_bytes, token, rate, kind, *echo = sys.argv[1:]
    echo_port = echo[0] if echo else ""
    found = _run(port, mode, int(concurrency), float(seconds), int(prompt_bytes), token, float(rate), kind, echo_port)
    print(json.dumps(uvloop.run(found)))


if __name__ == "__main__":
    main()
