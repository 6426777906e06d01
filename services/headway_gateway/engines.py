"""Talking to the engines."""

import asyncio
from dataclasses import dataclass

import aiohttp
from headway.routing.v1 import routing_pb2 as pb
from headway_client import Reservation

from headway_gateway.config import GatewaySettings

__all__ = ["Answer", "EngineError", "Engines", "failure_of"]

_KEEPALIVE_S = 4.0
"""Below uvicorn's 5 s, so that no request is sent on a connection which the engine is closing."""


class EngineError(Exception):
    """An engine could not be reached, answered 5xx, or broke off."""

    def __init__(
        self, outcome: pb.Outcome.ValueType, message: str, *, http_status: int = 0, retryable: bool = True
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.http_status = http_status
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer below 500. `first`: the first bytes of a stream, empty for other bodies."""

    response: aiohttp.ClientResponse
    first: bytes

    @property
    def is_stream(self) -> bool:
        """Whether events follow."""
        return bool(self.first)


class Engines:
    """One pool of connections to every engine."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._engine_api_key = settings.engine_api_key.get_secret_value()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def open(self, reservation: Reservation, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Send the request and wait for the head of the answer, and for a stream's first bytes.

        Raises EngineError. What is given up on is closed, so that the engine stops working on it.
        """
        url = f"http://{reservation.endpoint.address}{path}"
        try:
            response = await self._session.post(
                url, data=body, headers=self._headers(reservation, headers), allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise failure_of(error) from error
        try:
            if response.status >= 500:
                message = f"the engine answered {response.status}"
                raise EngineError(pb.OUTCOME_SERVER_ERROR, message, http_status=response.status)
            return Answer(response, await _first_bytes(response))
        except BaseException:
            response.close()
            raise

    def _headers(self, reservation: Reservation, headers: dict[str, str]) -> dict[str, str]:
        """Only headers of our own making: the user's credential and cookies stay here."""
        sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        if self._engine_api_key:
            sent["Authorization"] = f"Bearer {self._engine_api_key}"
        return {**sent, **reservation.headers}


async def _first_bytes(response: aiohttp.ClientResponse) -> bytes:
    if response.status >= 300 or response.content_type != "text/event-stream":
        return b""
    try:
        first = await response.content.readany()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise failure_of(error) from error
    if not first:
        raise EngineError(pb.OUTCOME_SERVER_ERROR, "the engine sent nothing")
    return first


def failure_of(error: Exception) -> EngineError:
    """Say what an exception of the HTTP client means. An engine that was silent too long ends the request."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return EngineError(pb.OUTCOME_CONNECT_ERROR, "the engine could not be reached")
    if isinstance(error, asyncio.TimeoutError):
        return EngineError(pb.OUTCOME_TIMEOUT, "the engine was silent for too long", retryable=False)
    return EngineError(pb.OUTCOME_SERVER_ERROR, "the engine broke off")
