"""The services' unary methods as HTTP calls them: one table, whatever the bodies look like."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, cast

import grpc
from aiohttp import web
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from headway.routing.v1 import routing_pb2

from headway_scheduler.app import Scheduler
from headway_scheduler.rpc.http_door import deliver
from headway_scheduler.rpc.services import add_services

__all__ = ["REPORT", "ROUTE", "HttpContext", "HttpMethod", "HttpMethods"]

_ROUTER: Final = routing_pb2.DESCRIPTOR.services_by_name["Router"].full_name
ROUTE: Final = f"/{_ROUTER}/Route"
REPORT: Final = f"/{_ROUTER}/Report"

RpcMethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only in the stubs


class HttpContext:
    """What unary handlers use of gRPC's context."""

    __slots__ = ("_deadline",)

    def __init__(self, remaining_s: float | None) -> None:
        self._deadline = None if remaining_s is None else time.monotonic() + remaining_s

    def time_remaining(self) -> float | None:
        """How long the caller still waits, None if it does not say."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class HttpMethod:
    """A unary method of a service.

    `take_back`: what an answer reserved is let go, where its caller left before it had it. None: it reserves nothing.
    """

    path: str
    request: type[Message]
    handle: Callable[[Any, HttpContext], Awaitable[Any]]  # of any method's messages
    take_back: Callable[[Any], None] | None = None

    async def deliver(self, request: web.Request, response: web.StreamResponse, answer: Message) -> web.StreamResponse:
        """See to it that the answer, which this response says, is had by its caller or taken back."""
        if self.take_back is None:
            return response  # aiohttp writes it
        return await deliver(request, response, partial(self.take_back, answer))


class HttpMethods:
    """Every method of our services, by its path: the unary ones, and those that stream.

    `tenant_of`: the tenant of an end user's key, by its SHA-256.
    """

    def __init__(self, scheduler: Scheduler, tenant_of: Callable[[bytes], str]) -> None:
        self.unary: dict[str, HttpMethod] = {}
        self.streaming: list[str] = []
        router = add_services(scheduler, tenant_of, cast("grpc.aio.Server", self))
        self.unary[ROUTE] = replace(self.unary[ROUTE], take_back=router.take_back)

    # Services are added to this as to a server.

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Not needed: the same handlers are registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, RpcMethodHandler]) -> None:
        """As a server does."""
        described = descriptor_pool.Default().FindServiceByName(service).methods_by_name
        for name, handler in handlers.items():
            path = f"/{service}/{name}"
            if handler.unary_unary is None:
                self.streaming.append(path)
                continue
            request = message_factory.GetMessageClass(described[name].input_type)
            handle: Any = handler.unary_unary  # the stubs know only synchronous ones
            self.unary[path] = HttpMethod(path, request, handle)
