"""The endpoint picker: Envoy's external processing service (envoy.service.ext_proc.v3.ExternalProcessor)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import ServicerContext

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal
from headway_scheduler.envoy import replies
from headway_scheduler.envoy.exchange import Exchange
from headway_scheduler.envoy.fixed_bodies import FixedBodies
from headway_scheduler.envoy.observer import ObservedExchange
from headway_scheduler.envoy.plane import Plane, plane_of
from headway_scheduler.errors import HeadwayError
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.authorization import authorize
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.streams import Streams

__all__ = ["EXT_PROC", "ExtProcService"]

EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_METHOD: Final = f"/{EXT_PROC}/Process"
_CODES: Final = {code.name: code for code in grpc.StatusCode}

Context = ServicerContext[Any, Any]  # ProcessingRequest in, serialised ProcessingResponse out


class ExtProcService:
    """Serves every stream of every Envoy. It admits its callers itself: what it refuses, the client must be told."""

    def __init__(self, scheduler: Scheduler, authenticator: Authenticator, streams: Streams, longest_body: int) -> None:
        self._scheduler, self._authenticator, self._streams = scheduler, authenticator, streams
        self._longest = longest_body
        self._fixed_bodies = FixedBodies(scheduler)

    def handler(self) -> grpc.GenericRpcHandler:
        """What the gRPC server adds. Replies come ready for the wire."""
        process: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=pb.ProcessingRequest.FromString,
        )
        return grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process})

    async def process(self, _: AsyncIterator[pb.ProcessingRequest], context: Context) -> None:
        """Serve one request's stream, of a router only."""
        try:
            identity = self._authenticator.identify_call(context)
            authorize(identity.principal, _METHOD)
            exchange = self._exchange(identity.principal, plane_of(context.invocation_metadata() or ()), context)
        except HeadwayError as error:
            await context.write(replies.immediate(api_error(error)))
            return
        try:
            with self._streams.opened(identity, lambda: exchange.began):
                await exchange.run()
        except asyncio.InvalidStateError:
            return  # Envoy was gone before it had our answer
        except HeadwayError as error:  # the stream may not go on, or not begin
            await context.abort(_CODES[error.status], error.message)
        except Exception as error:
            fault = unexpected(error, method=_METHOD)
            await context.abort(grpc.StatusCode.INTERNAL, fault.message)

    def _exchange(self, principal: Principal, plane: Plane, context: Context) -> Exchange | ObservedExchange:
        if plane.observe:
            return ObservedExchange(
                self._scheduler,
                principal,
                plane,
                context,
                longest_body=self._longest,
                tenant_of=self._authenticator.user_tenant,
            )
        return Exchange(
            self._scheduler,
            principal,
            plane,
            context,
            longest_body=self._longest,
            fixed_bodies=self._fixed_bodies,
            tenant_of=self._authenticator.user_tenant,
        )
