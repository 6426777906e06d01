"""What happens around every handler: who calls, may they, and what an exception answers."""

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AbortError, ServicerContext

from headway_scheduler.domain.desired import Role
from headway_scheduler.errors import HeadwayError
from headway_scheduler.rpc.authentication import Authenticator, Identity, set_identity
from headway_scheduler.rpc.authorization import OPEN, ROLES, authorize
from headway_scheduler.rpc.streams import Streams

__all__ = ["DOMAIN", "CheckedServices", "to_status"]

DOMAIN: Final = "headway"
"""ErrorInfo.domain of every error."""

_DETAILS_KEY: Final = "grpc-status-details-bin"
_DEFAULT_RETRY_S: Final = 1.0
# A status travels in HTTP/2 headers, which gRPC limits to 8 KiB: a field of 5 MB must not turn our answer into its own.
_LONGEST_MESSAGE: Final = 1000
_LONGEST_FACT: Final = 256

_CODES: Final[Mapping[str, grpc.StatusCode]] = {code.name: code for code in grpc.StatusCode}

log = structlog.get_logger(__name__)

Context = ServicerContext[Any, Any]  # a context of any method's messages
Handler = Callable[[Any, Context], Any]  # unary or streaming, of any messages
RpcMethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only in the stubs


def to_status(error: HeadwayError) -> status_pb2.Status:
    """The status that an error answers: exactly one ErrorInfo, and RetryInfo where a retry makes sense."""
    number: int = _CODES[error.status].value[0]
    status = status_pb2.Status(code=number, message=_cut(error.message, _LONGEST_MESSAGE))
    facts = {key: _cut(value, _LONGEST_FACT) for key, value in error.facts.items()}
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts))
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status == "RESOURCE_EXHAUSTED":
        retry_after_s = _DEFAULT_RETRY_S
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, int(retry_after_s * 1e9)))
        _pack(status, retry)
    return status


def _pack(status: status_pb2.Status, detail: Message) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


class CheckedServices(grpc.GenericRpcHandler):
    """All services of a server: each call is authenticated and authorised, and what its handler raises is its status.

    Services are added to this as to a server, and this to the server. An interceptor of gRPC's would do the same and
    cost a call 12 µs more. Methods are looked up by name only: generated code would also register each, and grpc.aio
    then waits anew for every registered one at each call, which costs a call 1.5 µs for each method of all services.

    Handlers find the principal in `authentication.current_principal()`. `roles` is the table of `authorization`,
    extended by whoever serves more methods. `admit_themselves`: paths' beginnings that are left alone, since what is
    refused there is answered in a way of its own. `streams` ends those whose credential counts no more.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        roles: Mapping[str, frozenset[Role]] = ROLES,
        admit_themselves: tuple[str, ...] = (),
        streams: Streams | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._streams = streams
        self._roles = roles
        self._left_alone = (*OPEN, *admit_themselves)
        self._services: list[grpc.GenericRpcHandler] = []
        self._handlers: dict[str, RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """As a server does."""
        self._services.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Not needed: the same handlers were added by name."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "RpcMethodHandler | None":
        """The method's handler, wrapped once for all its calls; None: there is no such method."""
        method = handler_call_details.method
        found = self._handlers.get(method)
        if found is None:
            for each in self._services:
                found = each.service(handler_call_details)
                if found is not None:
                    found = found if method.startswith(self._left_alone) else self._wrap(method, found)
                    self._handlers[method] = found
                    break
        return found

    def _wrap(self, method: str, handler: RpcMethodHandler) -> RpcMethodHandler:
        behavior, make = _parts(handler)
        if inspect.isasyncgenfunction(behavior):
            wrapped = self._around_generator(method, behavior)
        elif handler.request_streaming or handler.response_streaming:
            wrapped = self._around_stream(method, behavior)
        else:
            wrapped = self._around_call(method, behavior)
        return make(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _around_call(self, method: str, behavior: Handler) -> Handler:
        async def handle(request: Any, context: Context) -> Any:  # any method's messages
            try:
                self._admit(method, context)
                return await behavior(request, context)
            except Exception as error:
                await _answer(method, error, context)

        return handle

    def _around_stream(self, method: str, behavior: Handler) -> Handler:
        async def handle(request: Any, context: Context) -> Any:  # any method's messages
            try:
                with self._opened(self._admit(method, context)):
                    return await behavior(request, context)
            except Exception as error:
                await _answer(method, error, context)

        return handle

    def _around_generator(self, method: str, behavior: Handler) -> Handler:
        async def handle(request: Any, context: Context) -> AsyncIterator[Any]:  # any method's messages
            try:
                with self._opened(self._admit(method, context)):
                    async for response in behavior(request, context):
                        yield response
            except Exception as error:
                await _answer(method, error, context)

        return handle

    def _opened(self, identity: Identity) -> AbstractContextManager[object]:
        return nullcontext() if self._streams is None else self._streams.opened(identity)

    def _admit(self, method: str, context: Context) -> Identity:
        identity = self._authenticator.identify_call(context)
        authorize(identity.principal, method, self._roles)
        set_identity(identity)
        return identity


async def _answer(method: str, error: Exception, context: Context) -> NoReturn:
    """End the call with the error's status. Cancellation never gets here: it is no Exception."""
    if isinstance(error, AbortError):
        raise error
    if not isinstance(error, HeadwayError):
        # Frames and type but not the message: it may quote the request, and a prompt never reaches a log.
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("rpc_failed", method=method, error_type=type(error).__name__, traceback=frames)
        error = HeadwayError("internal error; the scheduler's log has the details")
    status = to_status(error)
    details = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(_CODES[error.status], status.message, trailing_metadata=details)
    raise asyncio.CancelledError  # abort always raises; its stub does not say so


def _parts(handler: RpcMethodHandler) -> tuple[Any, Callable[..., RpcMethodHandler]]:
    """The handler's function (the stubs know only synchronous ones), and what makes a handler of its kind."""
    if handler.request_streaming and handler.response_streaming:
        return handler.stream_stream, grpc.stream_stream_rpc_method_handler
    if handler.request_streaming:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler
    return handler.unary_unary, grpc.unary_unary_rpc_method_handler
