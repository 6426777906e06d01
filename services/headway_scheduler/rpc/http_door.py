"""What every call by HTTP has in common, whatever its bodies look like: who calls, what he sent, did he get it."""

import asyncio
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Principal
from headway_scheduler.errors import HeadwayError, InvalidField, NoCredential, NotPermitted
from headway_scheduler.rpc.authentication import Authenticator, Shown, set_identity
from headway_scheduler.rpc.authorization import authorize
from headway_scheduler.rpc.failures import Failures
from headway_scheduler.rpc.origins import check_host, check_origin
from headway_scheduler.tls import names_in

__all__ = ["ENCODINGS", "HttpDoor", "UnknownEncoding", "deliver"]

ENCODINGS: Final = ("gzip", "deflate", "identity")
"""How bodies may be encoded."""

_UNASKED: Final = (Shown.NONE, Shown.CERTIFICATE)
"""By what a caller may be known without having said so itself."""
_BODY_S: Final = 30.0
"""How long a body may take to come in."""
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
_MOST_MEMBERS: Final = 16
"""Of an encoded body: what comes after one is copied, and nobody needs many."""
_SMALL: Final = 1 << 16
"""Bodies encoded in so many bytes are decoded at once, longer ones by a thread."""


class UnknownEncoding(InvalidField):
    """The body's encoding is none of ENCODINGS."""

    def __init__(self, encoding: str) -> None:
        super().__init__("content-encoding", f"{encoding!r} is none of {', '.join(ENCODINGS)}")


class HttpDoor:
    """The HTTP port's callers and their bodies. Credentials, roles and limits are those of gRPC."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self.authenticator = Authenticator(
            lambda: scheduler.desired,
            required=config.credentials_required,
            clock=lambda: datetime.now(UTC),
            failures=Failures(config.authentication_failures_per_minute, time.monotonic, scheduler.authentication),
        )
        self._certificate_required = config.certificate_required
        self._private = config.http_is_private
        self._on_loopback = config.http_on_loopback
        self._longest_body = config.max_message_bytes

    def admit(self, request: web.Request, method: str, *, relayed: bool = False) -> Principal:
        """Who calls, if he may call `method`, a gRPC path. Handlers find him in `authentication.current_principal()`.

        `relayed`: its Host and Origin are those of another request, which a data plane asks about. Else what
        another site's page may have made a browser send is refused: no page knows a token, a certificate is shown
        unasked.
        Raises NoCredential, TooManyFailures, NotPermitted, ForeignOrigin.
        """
        if not self._private:
            raise NotPermitted("beyond loopback, calls over HTTP need http_tls or insecure=true")
        certificate = request.get_extra_info("peercert")
        try:
            if self._certificate_required and not certificate:
                raise NoCredential("a client certificate is required")
            proof = request.headers.get("Authorization") or names_in(certificate) or None
            identity = self.authenticator.identify(proof)
        except NoCredential as error:
            raise self._refusal(error, request) from None
        if not relayed:
            if identity.shown is Shown.NONE and self._on_loopback:
                check_host(request)
            if identity.shown in _UNASKED:
                check_origin(request)
        authorize(identity.principal, method)
        set_identity(identity)
        return identity.principal

    def _refusal(self, error: NoCredential, request: web.Request) -> HeadwayError:
        return self.authenticator.refusal(error, request.remote or "")

    async def read(self, request: web.Request) -> bytes:
        """All of the body, decoded.

        Raises InvalidField where it does not come in or is not what it says, UnknownEncoding, and
        HTTPRequestEntityTooLarge while it still comes in.
        """
        try:
            raw = await self._raw(request)
        except web.RequestPayloadError:
            raise InvalidField("body", "broke off") from None
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding == "identity" or not raw:
            return raw
        if encoding not in ENCODINGS:
            raise UnknownEncoding(encoding)
        return _decoded(raw, self._longest_body) if len(raw) <= _SMALL else await self._decoded_aside(raw)

    async def _raw(self, request: web.Request) -> bytes:
        length = request.content_length or 0
        if length > self._longest_body:
            raise web.HTTPRequestEntityTooLarge(self._longest_body, length)
        if request.content.is_eof() and length:  # all of it came with the head, as most do: nothing to wait for
            return request.content.read_nowait()
        try:
            async with asyncio.timeout(_BODY_S):
                return await request.read()
        except TimeoutError:
            raise InvalidField("body", f"did not come within {_BODY_S:g} s") from None

    async def _decoded_aside(self, raw: bytes) -> bytes:
        return await asyncio.to_thread(_decoded, raw, self._longest_body)


def _decoded(raw: bytes, longest: int) -> bytes:
    """All members of it, as gzip may have several.

    Raises InvalidField, and HTTPRequestEntityTooLarge before there is more of it than that in memory.
    """
    parts: list[bytes] = []
    length = 0
    while raw:
        if len(parts) == _MOST_MEMBERS:
            raise InvalidField("body", f"has more than {_MOST_MEMBERS} parts")
        decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            parts.append(decoder.decompress(raw, longest + 1 - length))
        except zlib.error:
            raise InvalidField("body", "is not encoded as it says") from None
        length += len(parts[-1])
        if length > longest:
            raise web.HTTPRequestEntityTooLarge(longest, length)
        if not decoder.eof:
            raise InvalidField("body", "broke off")
        raw = decoder.unused_data
    return b"".join(parts)


async def deliver(
    request: web.Request, response: web.StreamResponse, take_back: Callable[[], None]
) -> web.StreamResponse:
    """Write the answer now; where its caller left before, take back what it answers."""
    try:
        await response.prepare(request)
        await response.write_eof()
    except BaseException as error:
        take_back()
        if not isinstance(error, ConnectionError):  # of which aiohttp finds out by itself
            raise
    return response
