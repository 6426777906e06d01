"""A scheduler on a real port and a real Postgres, with agents and data planes that speak its protocols."""

import asyncio
import contextlib

import grpc
from fakes.waiting import eventually
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from headway.admin.v1 import admin_pb2 as apb
from headway.admin.v1 import admin_pb2_grpc
from headway.fleet.v1 import fleet_pb2_grpc
from headway.routing.v1 import routing_pb2 as rpb
from headway.routing.v1 import routing_pb2_grpc
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway.telemetry.v1 import telemetry_pb2_grpc
from headway_scheduler.app import Scheduler
from headway_scheduler.config import Config
from headway_scheduler.server import GrpcServer
from headway_scheduler.store.leader_lock import PostgresLeaderLock
from headway_scheduler.store.postgres import PostgresStore

BIG = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Served:
    """One running scheduler and a client of it."""

    def __init__(self, scheduler, server, store, channel):
        self.scheduler, self.server, self.store, self.channel = scheduler, server, store, channel
        self.router = routing_pb2_grpc.RouterStub(channel)
        self.telemetry = telemetry_pb2_grpc.TelemetryStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)
        self.fleet = fleet_pb2_grpc.FleetStub(channel)

    @property
    def reservations(self):
        return self.scheduler.ledger.reservations

    async def route(self, request_id="", text="hello", model="m", timeout=15, **fields):
        request = rpb.RouteRequest(request_id=request_id, model=model, **fields)
        if request.WhichOneof("prompt") is None and text is not None:
            request.text = text
        return await self.router.Route(request, timeout=timeout)

    async def report(self, *reports):
        return [r.status for r in (await self.router.Report(rpb.ReportRequest(reports=reports))).results]

    async def finish(self, *answers):
        return await self.report(*[finished(answer.reservation_id) for answer in answers])

    async def agent(self, node="n", *endpoints, wait=True, **fields):
        agent = Agent(self.telemetry, node)
        await agent.hello(*(endpoints or [endpoint(1), endpoint(2)]), **fields)
        if wait:
            await agent.welcomed()
        return agent

    async def stream(self):
        stream = Stream(self.router.RouteStream())
        stream.welcome = await stream.until(lambda: stream.welcomes)
        return stream

    async def bind(self, strategy):
        """What admins do: the default binding's strategy."""
        binding = apb.StrategyBinding(name="strategyBindings/default", strategy=f"strategies/{strategy}")
        await self.admin.UpdateStrategyBinding(
            apb.UpdateStrategyBindingRequest(strategy_binding=binding, update_mask={"paths": ["strategy"]})
        )


@contextlib.asynccontextmanager
async def serving(database_url, **settings):
    """A scheduler until the block ends. Agents send samples at will: `stale_after_s` is long, and no guard dwells."""
    defaults = {
        "name": "s1",
        "listen": "127.0.0.1:0",
        "stale_after_s": 60.0,
        "telemetry_interval_s": 0.2,
        "seed": 1,
        "settle_s": 0.0,
        "guard_dwell_s": 0.0,
    }
    config = Config(**(defaults | settings))
    store = PostgresStore(database_url)
    lock = PostgresLeaderLock(database_url, config.name, config.lease_s) if config.standby else None
    scheduler = Scheduler(config, store, lock=lock)
    await scheduler.start()
    server = GrpcServer(scheduler, config)
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=BIG)
    served = Served(scheduler, server, store, channel)
    try:
        yield served
    finally:
        await channel.close()
        scheduler.drain()
        await served.server.stop(0)  # a test may have put another in its place
        await scheduler.stop()
        await store.close()


def endpoint(number, *, models=("m",), ready=True, **fields):
    return tpb.EngineEndpoint(address=f"10.0.0.{number}:8000", models=models, ready=ready, **fields)


def measured(value):
    return tpb.Measurement(value=value)


def _watched(reading):
    """A task whose failure is known, so that nobody is told of it when the task is forgotten."""
    task = asyncio.create_task(reading)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class Agent:
    """One agent's stream: says what a test tells it to."""

    def __init__(self, stub, node):
        self.call, self.node, self.sequence, self.received = stub.Connect(), node, 0, []
        self.reader = _watched(self._read())

    async def _read(self):
        async for message in self.call:
            self.received.append(message)

    async def send(self, **message):
        await self.call.write(tpb.ConnectRequest(**message))

    async def hello(self, *endpoints, instance="i1", **fields):
        await self.send(hello=tpb.Hello(node=self.node, instance_id=instance, endpoints=endpoints, **fields))

    async def sample(self, *engines, **fields):
        """Send one and wait until it is applied: after an event a sample is acknowledged at once."""
        self.sequence += 1
        await self.send(device_event=tpb.DeviceEvent(uuid="none", kind=tpb.DEVICE_EVENT_KIND_RECOVERED))
        await self.send(sample=tpb.Sample(sequence=self.sequence, engines=engines, **fields))
        number = self.sequence
        await eventually(lambda: any(m.ack.sequence >= number for m in self.received))

    async def kv_use(self, **use):
        """`kv_use(e1=0.9)`: how full the engines' KV caches are."""
        engines = [
            tpb.EngineSample(address=f"10.0.0.{name[1:]}:8000", kv_use=measured(value), ready=True)
            for name, value in use.items()
        ]
        await self.sample(*engines)

    async def welcomed(self):
        await eventually(lambda: any(m.HasField("welcome") for m in self.received) or self.reader.done())
        if self.reader.done():
            await self.reader

    async def error(self):
        """How the stream ended."""
        return await refused(self.reader)

    async def leave(self):
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.reader


class Stream:
    """A data plane's RouteStream: collects what the scheduler says."""

    def __init__(self, call):
        self.call = call
        self.welcomes, self.answers, self.report_results, self.resume_results = [], {}, [], []
        self.messages = self.views = 0
        self.view = None
        self.draining = False
        self.reader = _watched(self._read())

    async def _read(self):
        async for message in self.call:
            self.messages += 1
            if message.HasField("welcome"):
                self.welcomes.append(message.welcome)
            if message.HasField("fail_open_view"):
                self.views += 1
                self.view = [entry.endpoint.address for entry in message.fail_open_view.endpoints]
            for answer in message.answers:
                assert answer.correlation_id not in self.answers, "answered twice"
                self.answers[answer.correlation_id] = answer
            self.report_results.extend(message.report_results)
            self.resume_results.extend(message.resume_results)
            self.draining = self.draining or message.draining

    async def send(self, **fields):
        await self.call.write(rpb.RouteStreamRequest(**fields))

    async def route(self, *numbers, **fields):
        request = {"model": "m", "text": "hello"} | fields
        await self.send(routes=[rpb.RouteCall(correlation_id=n, request=rpb.RouteRequest(**request)) for n in numbers])

    async def until(self, condition):
        await eventually(lambda: condition() or self.reader.done())
        assert condition(), "the stream ended before"

    async def answered(self, *numbers):
        await self.until(lambda: set(numbers) <= set(self.answers))
        return [self.answers[n] for n in numbers]

    async def lose(self):
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.reader


def finished(reservation_id, outcome=rpb.OUTCOME_SUCCESS, **fields):
    return rpb.Report(reservation_id=reservation_id, finished=rpb.Finished(outcome=outcome, **fields))


def served_by(reservation_id, name):
    return rpb.Report(reservation_id=reservation_id, served_by=rpb.ServedBy(endpoint=name))


def first_token(reservation_id):
    return rpb.Report(reservation_id=reservation_id, first_token=rpb.FirstToken(ttft_ms=100.0))


class Refusal:
    """A status with exactly one ErrorInfo, and RetryInfo or not."""

    def __init__(self, status):
        infos = [d for d in status.details if d.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
        assert len(infos) == 1, status
        info = error_details_pb2.ErrorInfo()
        infos[0].Unpack(info)
        self.code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        self.reason, self.facts, self.message = info.reason, dict(info.metadata), status.message
        self.field = self.facts.get("field", "")
        self.retry_s = None
        for detail in status.details:
            retry = error_details_pb2.RetryInfo()
            if detail.Is(retry.DESCRIPTOR):
                detail.Unpack(retry)
                self.retry_s = retry.retry_delay.ToNanoseconds() / 1e9
        assert (self.retry_s is not None and self.retry_s > 0) == (
            self.code is grpc.StatusCode.RESOURCE_EXHAUSTED or self.reason == "STORE_DOWN"
        ), status


async def refused(call):
    """The refusal that a call ends with."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)
        assert status is not None, error
        return Refusal(status)
    raise AssertionError(f"not refused: {answer}")


def refusal_of(status: status_pb2.Status):
    return Refusal(status)
