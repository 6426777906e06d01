"""Calls to a scheduler: credentials, deadline, retries of writes, and errors as `CliError`."""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from headway.admin.v1 import admin_pb2
from headway.admin.v1.admin_pb2_grpc import AdminStub
from headway.fleet.v1.fleet_pb2_grpc import FleetStub
from headway.routing.v1.routing_pb2_grpc import RouterStub

from headway_cli.errors import CliError, Unreachable, from_rpc
from headway_cli.kinds import Kind

__all__ = ["Client"]

Request = Any  # a request of any of the services: those of one verb have the same fields, and no common type
Response = Any

_PAGE_SIZE: Final = 1000
_WRITE_ATTEMPTS: Final = 3
_RETRY_S: Final = 0.2
_EDIT_ATTEMPTS: Final = 5


class Client:
    """One scheduler. Every method raises CliError."""

    def __init__(self, channel: grpc.Channel, *, scheduler: str, token: str, timeout_s: float) -> None:
        self.admin = AdminStub(channel)
        self.router = RouterStub(channel)
        self.fleet = FleetStub(channel)
        self._scheduler = scheduler
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._timeout_s = timeout_s

    def call(self, method: Callable[..., Response], request: Request, *, timeout_s: float = 0.0) -> Response:
        """One call, tried once."""
        try:
            return method(request, timeout=max(timeout_s, self._timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error, self._scheduler) from None

    def stream(self, method: Callable[..., Response], request: Request) -> Iterator[Response]:
        """What a stream brings, for as long as it is read."""
        try:
            yield from method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error, self._scheduler) from None

    def write(self, method: Callable[..., Response], request: Request) -> Response:
        """One write. A lost connection is tried again under the same request id, so that it is done once."""
        request.request_id = f"cli-{secrets.token_hex(12)}"
        for attempt in range(_WRITE_ATTEMPTS):
            try:
                return self.call(method, request)
            except Unreachable:
                if attempt == _WRITE_ATTEMPTS - 1:
                    raise
                time.sleep(_RETRY_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def pages(self, method: Callable[..., Response], request: Request, field: str) -> Iterator[Any]:  # of messages
        """Every item of a list, page by page."""
        request.page_size = _PAGE_SIZE
        while True:
            response = self.call(method, request)
            yield from getattr(response, field)
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    # The seven kinds, by the naming convention that admin.proto keeps

    def get(self, kind: Kind, name: str) -> Any:  # a message of this kind
        """The resource of this full name."""
        response = self.call(self._method("Get", kind), _request("Get", kind)(name=name))
        return getattr(response, kind.noun)

    def list_all(self, kind: Kind) -> list[Any]:  # messages of this kind
        """All resources of the kind."""
        method = getattr(self.admin, f"List{kind.plural}")
        request = getattr(admin_pb2, f"List{kind.plural}Request")(**kind.list_arguments)
        return list(self.pages(method, request, kind.list_field))

    def create(self, kind: Kind, message: Message, *, validate_only: bool = False) -> Response:
        """Create it; the whole response, since a credential's holds the token."""
        request = _request("Create", kind)(**{kind.noun: message}, validate_only=validate_only)
        return self.write(self._method("Create", kind), request)

    def update(self, kind: Kind, message: Message, fields: list[str], *, validate_only: bool = False) -> Any:
        """Set these fields. The message's etag is checked if it has one."""
        request = _request("Update", kind)(
            **{kind.noun: message}, update_mask=FieldMask(paths=fields), validate_only=validate_only
        )
        return getattr(self.write(self._method("Update", kind), request), kind.noun)

    def edit(
        self,
        kind: Kind,
        name: str,
        change: Callable[[Any], list[str]],
        *,
        etag: str = "",
        validate_only: bool = False,
    ) -> Any:
        """Read it, let `change` alter the message and say which fields, and write those.

        Somebody else's write in between starts it over, unless the caller named the etag it expects.
        """
        for attempt in range(_EDIT_ATTEMPTS):
            message = self.get(kind, name)
            message.etag = etag or message.etag
            fields = change(message)
            try:
                return self.update(kind, message, fields, validate_only=validate_only)
            except CliError as error:
                if error.reason != "STALE_ETAG" or etag or attempt == _EDIT_ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def delete(self, kind: Kind, name: str, *, etag: str = "", force: bool = False) -> None:
        """Delete it."""
        request = _request("Delete", kind)(name=name, etag=etag)
        if force:
            request.force = True
        self.write(self._method("Delete", kind), request)

    def _method(self, verb: str, kind: Kind) -> Callable[..., Response]:
        method: Callable[..., Response] = getattr(self.admin, f"{verb}{kind.name}")
        return method


def _request(verb: str, kind: Kind) -> Callable[..., Request]:
    request: Callable[..., Request] = getattr(admin_pb2, f"{verb}{kind.name}Request")
    return request
