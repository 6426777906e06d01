"""A small scriptable Router: real gRPC, round robin, and a table of reservations a test can read.

It keeps the contract of `headway.routing.v1` that a data plane can see: welcome first, answers matched by
correlation id in any order, only reports that were not simply APPLIED answered, an empty message answered by
an empty message, reservations kept when their stream is lost and taken back by resumes.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc


def status_of(
    code: grpc.StatusCode, reason: str, message: str, retry_after_s: float | None = None, **facts: str
) -> status_pb2.Status:
    """Build a status with exactly one ErrorInfo, and RetryInfo if told."""
    details = [any_pb2.Any()]
    details[0].Pack(error_details_pb2.ErrorInfo(domain="headway", reason=reason, metadata=facts))
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(any_pb2.Any())
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code.value[0], message=message, details=details)


@dataclass
class Held:
    """A reservation as the fake keeps it."""

    id: str
    request_id: str
    tenant: str
    endpoint: str
    events: list[pb.Report] = field(default_factory=list)
    outcome: int | None = None
    finished: pb.Finished | None = None
    owner: object = None


@dataclass
class Scene:
    """What the fake shall do; change it at any time."""

    refusal: status_pb2.Status | None = None
    stream_refusal: status_pb2.Status | None = None
    hold: bool = False
    hung: bool = False
    deaf_reports: bool = False
    draining: bool = False
    cache_salt: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    answer_headers: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    fallbacks: int = 2
    first: str = ""
    endpoint_gone: bool = False


class FakeRouter(routing_pb2_grpc.RouterServicer):
    """Serve with `start`, die with `kill`, come back with `start` again (a new epoch, nothing remembered)."""

    def __init__(self, addresses: list[str], *, models: tuple[str, ...] = ("m",), tenants: tuple[str, ...] = ("*",)):
        self.scene = Scene()
        self.endpoints = [
            pb.Endpoint(name=f"endpoints/{a}@0", address=a, node=f"nodes/n{i}") for i, a in enumerate(addresses)
        ]
        self.models = models
        self.tenants = tenants
        self.requests: list[pb.RouteRequest] = []
        self.resumes: list[pb.ResumedReservation] = []
        self.cancels: list[int] = []
        self.messages: list[pb.RouteStreamRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.reservations: dict[str, Held] = {}
        self.history: list[Held] = []
        self.epoch = 0
        self.port = 0
        self.view_inflight: dict[str, int] = {}
        self._rotation = itertools.count()
        self.credentials: grpc.ServerCredentials | None = None
        self._server: grpc.aio.Server | None = None
        self._open: dict[object, dict[int, str]] = {}
        self._changed = asyncio.Condition()
        self._outputs: dict[object, asyncio.Queue[pb.RouteStreamResponse]] = {}

    # life

    async def start(self) -> str:
        """Serve on the port it had, or a new one; return the target."""
        self.epoch += 1
        self.reservations = {}
        self._open, self._outputs = {}, {}
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1 << 26)])
        routing_pb2_grpc.add_RouterServicer_to_server(self, self._server)
        if self.credentials is None:
            self.port = self._server.add_insecure_port(self.target)
        else:
            self.port = self._server.add_secure_port(self.target, self.credentials)
        await self._server.start()
        return self.target

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def kill(self) -> None:
        """Break every stream at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        """Wait until `condition()` holds; it is looked at after everything that happens here."""
        async with asyncio.timeout(timeout_s):
            async with self._changed:
                await self._changed.wait_for(condition)

    async def release_holds(self) -> None:
        """Answer everything that is held."""
        self.scene.hold = False
        await self._notify()

    async def drain(self) -> None:
        """Tell every stream that this scheduler goes away, and refuse new routes."""
        self.scene.refusal = status_of(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", "going away")
        for output in self._outputs.values():
            output.put_nowait(pb.RouteStreamResponse(draining=True))

    @property
    def streams(self) -> int:
        return len(self._open)

    @property
    def owners(self) -> set[object]:
        """The streams that are open."""
        return set(self._open)

    @property
    def live(self) -> dict[str, Held]:
        return {key: held for key, held in self.reservations.items() if held.outcome is None}

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(pb.Outcome.Name(h.outcome) for h in self.history if h.outcome is not None)

    # unary

    async def Route(self, request: pb.RouteRequest, context: Any) -> pb.RouteResponse:  # noqa: N802
        await self._wait_while_hung()
        result = self.scene.refusal or self._reserve(request, None)
        if not isinstance(result, pb.RouteResponse):
            await context.abort_with_status(rpc_status.to_status(result))
        await self._notify()
        return result

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:  # noqa: N802
        results = [self._apply(report) for report in request.reports]
        await self._notify()
        return pb.ReportResponse(results=results)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:  # noqa: N802
        results = [self._resume(entry, None) for entry in request.reservations]
        await self._notify()
        return pb.ResumeResponse(results=results)

    # stream

    async def RouteStream(  # noqa: N802
        self, requests: AsyncIterator[pb.RouteStreamRequest], context: Any
    ) -> AsyncIterator[pb.RouteStreamResponse]:
        await self._wait_while_hung()
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if self.scene.stream_refusal is not None:
            await context.abort_with_status(rpc_status.to_status(self.scene.stream_refusal))
        owner = object()
        self._open[owner] = {}
        output = self._outputs[owner] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, owner, output))
        pull: asyncio.Task[pb.RouteStreamResponse] | None = None
        try:
            yield pb.RouteStreamResponse(welcome=self._welcome(), fail_open_view=self.view())
            await self._notify()
            while True:
                pull = asyncio.create_task(output.get())
                await asyncio.wait({pull, reader}, return_when=asyncio.FIRST_COMPLETED)
                if not pull.done():
                    return
                await self._wait_while_hung()
                yield pull.result()
        finally:
            reader.cancel()
            if pull is not None:
                pull.cancel()
            self._open.pop(owner, None)
            self._outputs.pop(owner, None)
            await self._notify()

    async def _read(
        self, requests: AsyncIterator[pb.RouteStreamRequest], owner: object, output: "asyncio.Queue[Any]"
    ) -> None:
        holds: set[asyncio.Task[None]] = set()
        try:
            async for message in requests:
                await self._wait_while_hung()
                self.messages.append(message)
                reply = pb.RouteStreamResponse()
                for entry in message.resumes:
                    reply.resume_results.append(self._resume(entry, owner))
                for report in message.reports:
                    result = self._apply(report)
                    if result.status != pb.REPORT_STATUS_APPLIED:
                        reply.report_results.append(result)
                for call in message.routes:
                    task = asyncio.create_task(self._answer(call, owner, output))
                    holds.add(task)
                    task.add_done_callback(holds.discard)
                for correlation_id in message.cancels:
                    self._cancel(correlation_id, owner)
                if reply.ByteSize() or not message.ByteSize():
                    output.put_nowait(reply)
                await self._notify()
        finally:
            for task in list(holds):
                task.cancel()

    async def _answer(self, call: pb.RouteCall, owner: object, output: "asyncio.Queue[Any]") -> None:
        self.requests.append(call.request)
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(
                lambda: (not self.scene.hold and not self.scene.hung) or call.correlation_id in self.cancels
            )
        if call.correlation_id in self.cancels:
            return
        if self.scene.refusal is not None:
            answer = pb.RouteAnswer(correlation_id=call.correlation_id, error=self.scene.refusal)
        else:
            result = self._reserve(call.request, owner)
            answer = pb.RouteAnswer(correlation_id=call.correlation_id)
            if isinstance(result, pb.RouteResponse):
                self._open.get(owner, {})[call.correlation_id] = result.reservation_id
                answer.response.CopyFrom(result)
            else:
                answer.error.CopyFrom(result)
        output.put_nowait(pb.RouteStreamResponse(answers=[answer]))
        await self._notify()

    # state

    def view(self) -> pb.FailOpenView:
        return pb.FailOpenView(
            endpoints=[
                pb.FailOpenView.Entry(
                    endpoint=endpoint,
                    models=self.models,
                    tenants=self.tenants,
                    inflight=self.view_inflight.get(endpoint.address, 0),
                )
                for endpoint in self.endpoints
            ]
        )

    async def push_view(self) -> None:
        for output in self._outputs.values():
            output.put_nowait(pb.RouteStreamResponse(fail_open_view=self.view()))

    def _welcome(self) -> pb.StreamWelcome:
        return pb.StreamWelcome(scheduler="fake", epoch=str(self.epoch), resume_grace=duration_pb2.Duration(seconds=10))

    def _reserve(self, request: pb.RouteRequest, owner: object) -> pb.RouteResponse | status_pb2.Status:
        excluded = set(request.excluded_endpoints)
        offered = [e for e in self.endpoints if e.name not in excluded and e.address not in excluded]
        if not offered:
            return status_of(grpc.StatusCode.UNAVAILABLE, "NO_ENDPOINTS", "all are excluded")
        turn = next(self._rotation) % len(offered)
        offered = offered[turn:] + offered[:turn]
        offered.sort(key=lambda e: e.address != self.scene.first)
        held = next(
            (h for h in self.reservations.values() if h.request_id == request.request_id and h.outcome is None),
            None,
        )
        if held is None:
            key = f"fake-{self.port}.{self.epoch}.{len(self.history)}"
            held = Held(key, request.request_id, request.tenant, offered[0].name)
            self.reservations[key] = held
            self.history.append(held)
        held.owner = owner
        chosen = next(e for e in self.endpoints if e.name == held.endpoint)
        return pb.RouteResponse(
            request_id=request.request_id,
            endpoint=chosen,
            fallbacks=[e for e in offered if e.name != chosen.name][: self.scene.fallbacks],
            reservation_id=held.id,
            reservation_ttl=duration_pb2.Duration(seconds=300),
            decision=pb.Decision(strategy="strategies/round_robin", candidates=len(offered), prompt_tokens=7),
            headers=self.scene.headers,
            answer_headers=self.scene.answer_headers,
            cache_salt=self.scene.cache_salt,
            model=self.scene.aliases.get(request.model, request.model),
        )

    def _apply(self, report: pb.Report) -> pb.ReportResult:
        result = pb.ReportResult(reservation_id=report.reservation_id, status=pb.REPORT_STATUS_APPLIED)
        held = self.reservations.get(report.reservation_id)
        if held is None:
            result.status = pb.REPORT_STATUS_UNKNOWN
            return result
        if held.outcome is not None:
            result.status = pb.REPORT_STATUS_DUPLICATE
            return result
        held.events.append(report)
        if report.HasField("served_by"):
            named = report.served_by.endpoint
            held.endpoint = next(e.name for e in self.endpoints if named in (e.name, e.address))
        if report.HasField("finished"):
            held.outcome = report.finished.outcome
            held.finished = report.finished
        return result

    def _resume(self, entry: pb.ResumedReservation, owner: object) -> pb.ResumeResult:
        self.resumes.append(entry)
        result = pb.ResumeResult(reservation_id=entry.reservation_id, status=pb.RESUME_STATUS_RESUMED)
        held = self.reservations.get(entry.reservation_id)
        if self.scene.endpoint_gone:
            result.status = pb.RESUME_STATUS_ENDPOINT_GONE
        elif held is not None and held.outcome is None:
            held.owner = owner
        else:
            key = f"fake-{self.port}.{self.epoch}.{len(self.history)}"
            held = Held(key, entry.request_id, entry.tenant, entry.endpoint, owner=owner)
            self.reservations[key] = held
            self.history.append(held)
            result.status, result.new_reservation_id = pb.RESUME_STATUS_RECREATED, key
        return result

    def _cancel(self, correlation_id: int, owner: object) -> None:
        self.cancels.append(correlation_id)
        held = self.reservations.get(self._open.get(owner, {}).get(correlation_id, ""))
        if held is not None and held.outcome is None:
            held.outcome = pb.OUTCOME_CANCELLED

    async def _wait_while_hung(self) -> None:
        if self.scene.hung:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.scene.hung)

    async def wake(self) -> None:
        """Go on after a hang."""
        self.scene.hung = False
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
