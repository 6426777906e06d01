"""The real Envoy before engines, with a scheduler as its endpoint picker."""

import contextlib
import io
import json
from dataclasses import dataclass, field

import aiohttp
import pytest
from fakes.envoy import (
    bootstrap,
    ext_proc_filter,
    grpc_cluster,
    http_listener,
    override_host,
    retry_policy,
    route_to,
    running_envoy,
    static_cluster,
)
from fakes.openai_engine import OpenAIEngine
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.telemetry.v1 import telemetry_pb2 as tpb

DUPLEX = {"request": "FULL_DUPLEX_STREAMED", "response": "FULL_DUPLEX_STREAMED"}
BUFFERED = {"request": "BUFFERED", "response": "STREAMED", "message_timeout": "5s"}
LIMITS = [{"max_connections": 20000, "max_pending_requests": 20000, "max_requests": 20000, "max_retries": 1000}]
BREAKERS = {"circuit_breakers": {"thresholds": LIMITS}}


@dataclass
class Plane:
    """One Envoy, its engines, and the scheduler that picks among them."""

    served: object
    engines: list[OpenAIEngine]
    envoy: object
    http: aiohttp.ClientSession
    agent: object
    closers: list = field(default_factory=list)

    @property
    def url(self):
        return f"{self.envoy.url}/v1/chat/completions"

    @property
    def ledger(self):
        return self.served.scheduler.ledger

    def post(self, body=None, headers=None, path="/v1/chat/completions", **options):
        data = io.BytesIO(json.dumps(chat() if body is None else body).encode())
        headers = [("content-type", "application/json"), *(headers or [])]
        return self.http.post(f"{self.envoy.url}{path}", data=data, headers=headers, **options)

    async def settled(self):
        """Nothing is in flight: no reservation, no hold, every count zero."""
        scheduler = self.served.scheduler
        await eventually(lambda: not scheduler.ledger.reservations and not len(scheduler.dispatcher.holds))
        for name, total in scheduler.ledger.recompute().items():
            assert not total.any(), name
            assert not getattr(scheduler.fleet.columns, name).any(), name


def chat(text="hello", **fields):
    return {"messages": [{"role": "user", "content": text}], "model": "m", **fields}


def engine_endpoint(engine, models=("m",), **fields):
    return tpb.EngineEndpoint(address=engine.address, models=models, ready=True, **fields)


def picker_config(target, engines, picker=DUPLEX, metadata=(), **fields):
    """Envoy with the picker at `target` before these engines' addresses."""
    cluster = static_cluster("engines", engines, load_balancing_policy=override_host(), **BREAKERS)
    routes = [route_to("engines", retry_policy=retry_policy())]
    picker = ext_proc_filter("headway", metadata=metadata, **picker)
    return bootstrap(
        [http_listener(routes, [picker], **fields)], [cluster, grpc_cluster("headway", target, **BREAKERS)]
    )


@pytest.fixture
def planes(database_url, tmp_path):
    """Make a plane: `async with planes(picker=BUFFERED) as plane`."""

    @contextlib.asynccontextmanager
    async def make(picker=DUPLEX, *, count=2, settings=None, metadata=(), endpoint=None, agent=True, **fields):
        async with contextlib.AsyncExitStack() as stack:
            engines = [await OpenAIEngine().start() for _ in range(count)]
            for engine in engines:
                stack.push_async_callback(engine.stop)
            served = await stack.enter_async_context(serving(database_url, **(settings or {})))
            endpoints = [engine_endpoint(engine, **(endpoint or {})) for engine in engines]
            agent = await served.agent("n", *endpoints) if agent else None
            target = f"127.0.0.1:{served.server.port}"
            addresses = [engine.address for engine in engines]
            config = picker_config(target, addresses, picker, metadata, **fields)
            envoy = await stack.enter_async_context(running_envoy(config, tmp_path / "envoy"))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            yield Plane(served, engines, envoy, http, agent)

    return make
