"""One stream at a time, to one scheduler of several."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc
import structlog
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

from headway_client.backoff import Backoff
from headway_client.errors import RouteRefused, refusal_from_rpc
from headway_client.options import ClientOptions
from headway_client.outbox import Outbox
from headway_client.stats import ClientStats

__all__ = ["STABLE_AFTER_S", "Connection", "StreamListener"]

log = structlog.get_logger(__name__)

STABLE_AFTER_S = 1.0
"""A stream that lived shorter counts as a failed attempt."""

SILENT_FOR_S = 5.0
"""So long a target that did not answer is passed over, while another one answers at all."""
_STANDBY_PAUSE_S = 0.1
"""A standby that answers may lead in a moment: it is asked again at least this often."""

_ANSWER_S = 0.005
"""So long a message may wait for the answer to the one before."""

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    # The client has its own backoff; gRPC's would only be added to it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class StreamListener(Protocol):
    """Who is told what happens on the stream."""

    def welcomed(self, first: pb.RouteStreamResponse, target: str) -> None:
        """Take note of a new stream and its first message."""

    def received(self, message: pb.RouteStreamResponse) -> None:
        """Take any further message."""

    def lost(self) -> None:
        """Take note that a stream which had been welcomed is over."""

    def unavailable(self, target: str, error: grpc.aio.AioRpcError) -> None:
        """Take note of the status that ended a stream, welcomed or not."""


class Connection:
    """Keeps a stream open: stays with the first target that answers, moves on when that one does not.

    Of schedulers that stand by for each other it finds the one that leads: a standby is asked again and again, and one
    that hangs is not waited for meanwhile.
    """

    def __init__(
        self,
        targets: Sequence[str],
        token: str | Callable[[], str],
        credentials: grpc.ChannelCredentials | Callable[[], grpc.ChannelCredentials] | None,
        options: ClientOptions,
        outbox: Outbox,
        stats: ClientStats,
        listener: StreamListener,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._targets = tuple(targets)
        self._token = token
        self._credentials = credentials
        self._options = options
        self._outbox = outbox
        self._stats = stats
        self._listener = listener
        self._clock = clock
        self._backoff = Backoff(rng, options.backoff_initial_s, options.backoff_max_s)
        self._leaving: asyncio.Future[None] | None = None
        self._heard = asyncio.Event()
        self._target = self._targets[0]
        self._silent_until: dict[str, float] = {}
        self._met_standby = False
        self._in_use: tuple[grpc.aio.Channel, tuple[tuple[str, str], ...]] | None = None

    async def identify(self, keys: Sequence[bytes]) -> pb.IdentifyKeysResponse:
        """Ask the present scheduler whose keys these are, by their SHA-256. Raises RouteRefused."""
        nobody = RouteRefused(grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER", "none answers")
        if self._in_use is None:
            raise nobody
        channel, metadata = self._in_use
        try:
            request = pb.IdentifyKeysRequest(key_sha256=keys)
            stub = routing_pb2_grpc.RouterStub(channel)
            return await stub.IdentifyKeys(request, timeout=self._options.connect_timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise refusal_from_rpc(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise nobody from None  # the channel was closed meanwhile
        except grpc.aio.UsageError:
            raise nobody from None

    async def run(self) -> None:
        """Serve until the outbox is closed and written, or the task is cancelled."""
        failed: set[str] = set()
        for target in self._in_turn():
            self._target = target
            lived = await self._serve(target)
            if self._outbox.is_closed:
                return
            if lived:
                failed.clear()
                self._backoff.reset()
            else:
                failed.add(target)
            if failed >= self._worth_asking():
                failed.clear()
                await self._pause()

    async def _pause(self) -> None:
        """After a round without success. A standby among those asked may lead in a moment."""
        pause_s = self._backoff.next_s()
        await asyncio.sleep(min(pause_s, _STANDBY_PAUSE_S) if self._met_standby else pause_s)
        self._met_standby = False

    def leave(self, *, silent: bool = False) -> None:
        """Give the present stream up; `silent`: because the scheduler does not answer."""
        if silent:
            self._note_silent()
        _resolve(self._leaving)

    def leave_after(self, delay_s: float) -> None:
        """Give the present stream up, if it is still the present one by then."""
        asyncio.get_running_loop().call_later(delay_s, _resolve, self._leaving)

    def _in_turn(self) -> Iterator[str]:
        """Those worth asking, over and over."""
        for target in itertools.cycle(self._targets):
            if target in self._worth_asking():
                yield target

    def _worth_asking(self) -> set[str]:
        """The targets without those that are silent now; if none is left, the one that has been for longest."""
        now, targets = self._clock(), set(self._targets)
        silent = {target: until for target, until in self._silent_until.items() if now < until}
        return targets - silent.keys() or {min(silent, key=silent.__getitem__)}

    def _note_silent(self) -> None:
        self._silent_until[self._target] = self._clock() + SILENT_FOR_S

    def _channel(self, target: str) -> grpc.aio.Channel:
        credentials = self._credentials
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        if not isinstance(credentials, grpc.ChannelCredentials):
            credentials = credentials()
        return grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = self._token if isinstance(self._token, str) else self._token()
        return (("authorization", f"Bearer {token}"),) if token else ()

    async def _serve(self, target: str) -> bool:
        """Hold a stream to one scheduler until it ends; return whether it lived for a while."""
        try:
            metadata, channel = self._metadata(), self._channel(target)
        except OSError as error:
            log.error("credential_not_read", target=target, problem=str(error))
            self._stats.connect_failures += 1
            return False
        async with channel:
            self._in_use = channel, metadata
            try:
                welcomed_at = await self._hold(channel, target, metadata)
            finally:
                self._in_use = None
        if welcomed_at is None:
            self._stats.connect_failures += 1
            return False
        self._listener.lost()
        return self._clock() - welcomed_at >= STABLE_AFTER_S

    async def _hold(
        self, channel: grpc.aio.Channel, target: str, metadata: tuple[tuple[str, str], ...]
    ) -> float | None:
        """Hold a stream until it ends; return when it was welcomed, if it was."""
        welcomed_at: float | None = None
        stream = routing_pb2_grpc.RouterStub(channel).RouteStream(metadata=metadata)
        try:
            first = await asyncio.wait_for(stream.read(), self._options.connect_timeout_s)
            if isinstance(first, pb.RouteStreamResponse):
                welcomed_at = self._clock()
                self._silent_until.pop(target, None)
                self._leaving = asyncio.get_running_loop().create_future()
                self._listener.welcomed(first, target)
                await self._exchange(stream, self._leaving)
            log.info("scheduler_stream_ended", target=target)
        except grpc.aio.AioRpcError as error:
            reason = refusal_from_rpc(error).reason
            log.info("scheduler_unavailable", target=target, code=error.code().name, reason=reason)
            self._met_standby |= reason == "STANDBY"
            # A stream that lived may have been opened with a token of before: the next one shows today's.
            if welcomed_at is None or error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                self._listener.unavailable(target, error)
        except TimeoutError:
            log.info("scheduler_silent", target=target)
            self._note_silent()
        finally:
            self._leaving = None
            stream.cancel()
        return welcomed_at

    async def _exchange(self, stream: "grpc.aio.StreamStreamCall[Any, Any]", leaving: asyncio.Future[None]) -> None:
        """Read and write until the stream ends or is to be left."""
        reader = asyncio.create_task(self._read(stream))
        writer = asyncio.create_task(self._write(stream))
        try:
            await asyncio.wait({reader, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
        finally:
            leaving.cancel()
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, stream: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        while isinstance(message := await stream.read(), pb.RouteStreamResponse):
            self._heard.set()
            self._listener.received(message)

    async def _write(self, stream: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        try:
            while (message := await self._outbox.next_message(self._clock)) is not None:
                self._heard.clear()
                await stream.write(message)
                if message.routes:
                    await self._answered()
            await stream.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # A stream that cannot be written has ended: its reader says how.
            self._outbox.unsend()

    async def _answered(self) -> None:
        """Wait until the scheduler says something, but not long: what it has not read yet it reads no sooner in more
        messages, and each of them costs it as much as what is in them.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self._heard.wait()


def _resolve(leaving: asyncio.Future[None] | None) -> None:
    if leaving is not None and not leaving.done():
        leaving.set_result(None)
