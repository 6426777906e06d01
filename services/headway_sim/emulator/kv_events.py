"""Publishes what an emulated engine's prefix cache gains and loses, as vLLM does: ZMQ PUB, and a ROUTER for replays.

Events come from the engine model's own blocks. A token of text is four bytes, so its id is those bytes as a number.
"""

import asyncio
import contextlib
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from headway_sim.engine import BLOCK_TOKENS, TOKEN_BYTES

__all__ = ["Encoding", "KvPublisher"]

_BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
_KEPT: Final = 10_000
"""Batches that can be replayed, as in vLLM."""
_KNOWN_BLOCKS: Final = 1_000_000
_END: Final = (-1).to_bytes(8, "big", signed=True)
_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)


class Encoding(StrEnum):
    """How an event is written."""

    ARRAY = "array"
    MAP = "map"


@dataclass(frozen=True, slots=True)
class _Content:
    """What stands behind a key of the engine model."""

    parent: int | None
    data: bytes
    salt: str


@dataclass(slots=True)
class KvPublisher:
    """One engine's publisher. Addresses are ZMQ's; port 0 takes a free one. `kept` batches can be replayed."""

    host: str
    port: int
    replay_port: int
    unix_time_s: Callable[[], float]
    encoding: Encoding = Encoding.ARRAY
    kept: int = _KEPT
    address: str = ""
    replay_address: str = ""
    sequence: int = 0
    muted: bool = False
    """Lose what is published: it can only be replayed."""
    _context: zmq.asyncio.Context | None = None
    _socket: zmq.Socket[bytes] | None = None
    _answering: asyncio.Task[None] | None = None
    _contents: OrderedDict[int, _Content] = field(default_factory=OrderedDict)
    _events: list[dict[str, Any]] = field(default_factory=list)  # JSON-like values, hence Any
    _buffer: deque[tuple[int, bytes]] = field(default_factory=deque)

    async def start(self) -> None:
        """Bind both sockets."""
        self._context = zmq.asyncio.Context()
        self._socket = zmq.Socket(self._context, zmq.PUB)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self.address = self._bind(self._socket, self.port)
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        self.replay_address = self._bind(router, self.replay_port)
        self._answering = asyncio.create_task(self._answer(router))

    async def close(self) -> None:
        """Close both sockets."""
        if self._answering is not None:
            self._answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._answering
        if self._socket is not None:
            self._socket.close(linger=0)
        if self._context is not None:
            self._context.destroy(linger=0)

    # What the engine model says

    def describe(self, keys: list[int], content: bytes, salt: str) -> None:
        """A request comes in: so its keys stand for these bytes."""
        parent: int | None = None
        for number, key in enumerate(keys):
            data = content[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES]
            self._contents[key] = _Content(parent, data, "" if number else salt)
            self._contents.move_to_end(key)
            parent = key
        while len(self._contents) > _KNOWN_BLOCKS:
            self._contents.popitem(last=False)

    def stored(self, key: int) -> None:
        """A block can be hit from now on."""
        content = self._contents.get(key)
        if content is None:
            return
        ids = list(struct.unpack(f"<{BLOCK_TOKENS}I", content.data))
        extras = [content.salt] if content.salt else None
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and last["block_hashes"][-1] == content.parent:
            last["block_hashes"].append(key)
            last["token_ids"].extend(ids)
            last["extra_keys"].append(extras)
            return
        self._note(
            {
                "type": "BlockStored",
                "block_hashes": [key],
                "parent_block_hash": content.parent,
                "token_ids": ids,
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [extras],
            }
        )

    def removed(self, key: int) -> None:
        """A block was evicted."""
        self._note({"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU"})

    def cleared(self) -> None:
        """The cache was emptied."""
        self._note({"type": "AllBlocksCleared"})

    # The wire

    def _note(self, event: dict[str, Any]) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self.publish)  # what one turn brings goes together
        self._events.append(event)

    def publish(self) -> None:
        """Send what was noted, as one batch."""
        if not self._events or self._socket is None or self._socket.closed:
            return
        events, self._events = self._events, []
        payload = msgspec.msgpack.encode(self._batch(events))
        sequence, self.sequence = self.sequence, self.sequence + 1
        self._buffer.append((sequence, payload))
        while len(self._buffer) > self.kept:
            self._buffer.popleft()
        if not self.muted:
            self._socket.send_multipart([b"", sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def _batch(self, events: list[dict[str, Any]]) -> object:
        if self.encoding is Encoding.MAP:
            return {"ts": self.unix_time_s(), "events": events, "data_parallel_rank": None}
        return [self.unix_time_s(), [_array(event) for event in events], None]

    async def _answer(self, router: zmq.asyncio.Socket) -> None:
        """Send again what was asked for, as far back as it is kept."""
        while True:
            client, _, start = await router.recv_multipart()
            first = int.from_bytes(start, "big")
            for sequence, payload in [each for each in self._buffer if each[0] >= first]:
                await router.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", _END, b""])

    def _bind(self, socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", port: int) -> str:
        socket.bind(f"tcp://{self.host}:{port or '*'}")
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _array(event: dict[str, Any]) -> list[Any]:
    if event["type"] == "BlockStored":
        return [event["type"], *(event[name] for name in _STORED)]
    return [event["type"], *(event[name] for name in ("block_hashes", "medium") if name in event)]
