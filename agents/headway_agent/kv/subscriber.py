"""Follows one engine's KV events over ZMQ, and keeps its block set true.

Sequence numbers tell what was missed. A gap is asked for again at the replay socket, whose buffer ends somewhere; what
cannot be had means that nothing is known of the cache any more. A number that goes back is an engine that restarted.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from headway_agent.config import KvEventSettings
from headway_agent.kv.blocks import BlockSet
from headway_agent.kv.events import Malformed, decode

__all__ = ["Subscriber"]

log = structlog.get_logger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_RETRY_S = 1.0
_BACKLOG = 100_000
"""Messages that wait for us at most: more is a gap, to be replayed."""


@dataclass(slots=True)
class Subscriber:
    """One engine rank's events into `blocks`. `next_sequence` is the first not applied yet; None: nothing was heard."""

    name: str
    settings: KvEventSettings
    blocks: BlockSet
    dp_rank: int | None = None
    next_sequence: int | None = None
    _last_live: int = -1
    _told_unusable: bool = False
    _context: zmq.asyncio.Context | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Follow until cancelled."""
        self._context = context
        while True:
            try:
                await self._follow()
            except zmq.ZMQError as error:
                log.warning("kv_events_failed", endpoint=self.name, problem=str(error))
            except Exception:  # a fault of ours in one engine's events ends no other's
                log.exception("kv_events_failed", endpoint=self.name)
            self.blocks.forget(complete=False)
            await asyncio.sleep(_RETRY_S)

    async def rebuild(self) -> None:
        """Start over from what the engine can still replay: it is another one."""
        async with self._turn:
            self.blocks.forget(complete=False)
            self.next_sequence, self._last_live = None, -1
            await self._replay(0)

    def emptied(self) -> None:
        """The engine's cache is known to be empty."""
        self.blocks.forget(complete=True)

    # Live

    async def _follow(self) -> None:
        with self._socket(zmq.SUB) as socket:
            socket.set_hwm(_BACKLOG)
            socket.subscribe(self.settings.topic)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            if self.settings.bind:
                socket.bind(self.settings.address)
            else:
                socket.connect(self.settings.address)
            watching = asyncio.create_task(self._watch(monitor))
            try:
                await self._listen(socket)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                socket.disable_monitor()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """An engine that is gone holds nothing; one that is there, new or again, is asked for all it can replay.

        Sequence numbers alone do not tell a restart from a gap when the new ones have passed the old.
        """
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await self.rebuild()
            elif event == zmq.EVENT_DISCONNECTED:
                log.info("kv_events_disconnected", endpoint=self.name)
                self.blocks.forget(complete=False)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                log.warning("kv_events_not_understood", endpoint=self.name, frames=len(frames))
                continue
            async with self._turn:
                await self._hear(int.from_bytes(frames[1], "big"), frames[2])

    async def _hear(self, sequence: int, payload: bytes) -> None:
        went_back = sequence <= self._last_live
        self._last_live = sequence
        if went_back:
            log.info("kv_events_restarted", endpoint=self.name, sequence=sequence)
            self.blocks.forget(complete=sequence == 0)
            self.next_sequence = 0
        expected = self.next_sequence
        if expected is not None and sequence < expected:
            return  # a replay brought it already
        if sequence != (expected or 0):
            await self._fill(expected or 0, sequence)
            if self.next_sequence is not None and sequence < self.next_sequence:
                return
        elif expected is None:
            self.blocks.complete = True  # we were here from its first message on
        self._apply(sequence, payload)

    async def _fill(self, expected: int, sequence: int) -> None:
        """Messages from `expected` on were missed: have them again, or know nothing."""
        await self._replay(expected)
        reached = self.next_sequence or 0
        if reached >= sequence:
            return
        log.warning("kv_events_lost", endpoint=self.name, expected=expected, got=sequence)
        self.blocks.forget(complete=False)

    def _apply(self, sequence: int, payload: bytes) -> None:
        self.next_sequence = sequence + 1
        try:
            batch = decode(payload)
            if self.dp_rank is None or batch.dp_rank in (None, self.dp_rank):
                for event in batch.events:
                    self.blocks.apply(event)
        except (Malformed, ValueError) as error:
            log.warning("kv_events_malformed", endpoint=self.name, problem=str(error))
            self.blocks.forget(complete=False)
        if self.blocks.unusable_block_size and not self._told_unusable:
            self._told_unusable = True
            log.warning("kv_events_unusable", endpoint=self.name, block_size=self.blocks.unusable_block_size)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        assert self._context is not None  # noqa: S101 - only `run` and what it calls want sockets
        socket = self._context.socket(kind)
        socket.linger = 0
        return socket

    # Replay

    async def _replay(self, start: int) -> None:
        """Apply what the engine kept, from `start` on; where it kept less than that, forget what was before."""
        if not self.settings.replay_address or self._context is None:
            return
        expected: int | None = None
        try:
            async for sequence, payload in self._replayed(start):
                if expected is None or sequence != expected:
                    # The first: does it begin where we left off? Later: a hole in the buffer itself.
                    if expected is not None or sequence != (self.next_sequence or 0):
                        self.blocks.forget(complete=False)
                    elif sequence == 0:
                        self.blocks.forget(complete=True)
                self._apply(sequence, payload)
                expected = sequence + 1
        except TimeoutError:
            log.warning("kv_replay_unanswered", endpoint=self.name, start=start)

    async def _replayed(self, start: int) -> AsyncIterator[tuple[int, bytes]]:
        """The messages kept from `start` on. Raises TimeoutError."""
        with self._socket(zmq.DEALER) as socket:
            socket.set_hwm(0)
            socket.connect(self.settings.replay_address)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(self.settings.replay_timeout_s):
                    frames = await socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == _END:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]
