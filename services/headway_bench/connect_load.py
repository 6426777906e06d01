"""A caller by the Connect protocol that costs next to nothing itself: what is measured is the server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from headway.routing.v1 import routing_pb2 as pb

__all__ = ["Caller", "ConnectCaller"]

_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"content-length: "


class Caller(Protocol):
    """Routes, and reports."""

    async def route(self) -> pb.RouteResponse:
        """Route the next request. Raises ConnectionError, or what gRPC does, where it is not answered."""
        ...

    async def report(self, request: pb.ReportRequest) -> None:
        """Tell what became of it."""
        ...


class ConnectCaller(asyncio.Protocol):
    """One connection, kept alive, with one call at a time. `bodies`: RouteRequests, serialised."""

    def __init__(self, token: str, bodies: Iterator[bytes]) -> None:
        lines = ["Host: bench", "Content-Type: application/proto", "Connect-Protocol-Version: 1"]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        self._headers = "".join(f"{line}\r\n" for line in lines)
        self._bodies = bodies
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[bytes] | None = None

    @contextlib.asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator[None]:
        """Connected to this port of 127.0.0.1."""
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", port)
        try:
            yield
        finally:
            self._transport.close()

    async def route(self) -> pb.RouteResponse:
        """Route the next request. Raises ConnectionError where it is not answered with success."""
        return pb.RouteResponse.FromString(await self._call("Route", next(self._bodies)))

    async def report(self, request: pb.ReportRequest) -> None:
        """Tell what became of it."""
        pb.ReportResponse.FromString(await self._call("Report", request.SerializeToString()))

    async def _call(self, method: str, body: bytes) -> bytes:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the connection is closed")
        head = (
            f"POST /headway.routing.v1.Router/{method} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        )
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(head.encode() + body)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        """Asyncio calls it."""
        self._received += data
        head, end, body = self._received.partition(_END_OF_HEAD)
        if not end or self._answered is None:
            return
        _, _, length = head.lower().partition(_LENGTH)
        if len(body) < int(length.partition(b"\r\n")[0]):
            return
        self._received = b""
        if self._answered.done():
            return
        if head.startswith(b"HTTP/1.1 200 "):
            self._answered.set_result(body)
        else:
            self._answered.set_exception(ConnectionError(head.partition(b"\r\n")[0].decode()))

    def connection_lost(self, error: Exception | None) -> None:
        """Asyncio calls it."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("the connection was lost"))
