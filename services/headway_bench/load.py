"""A bare-bones load generator, in a process of its own: a few requests over and over, one at a time a connection.

`python -m headway_bench.load HOST:PORT CONNECTIONS SECONDS BODY_BYTES` prints one JSON object.
"""

import asyncio
import json
import random
import sys
import time
from typing import Final, cast

import uvloop

__all__ = ["main", "requests_of"]

_PROMPTS: Final = 64
_SHARED: Final = 512
_PATH: Final = "/v1/chat/completions"


def requests_of(host: str, body_bytes: int) -> list[bytes]:
    """Whole HTTP requests with prompts of so many bytes; all begin alike, as conversations do."""
    words = random.Random(7)  # the same requests in every run
    found = []
    for _ in range(_PROMPTS):
        fill = "".join(words.choices("abcdefghijklmnopqrstuvwxyz ", k=max(0, body_bytes - _SHARED)))
        text = ("You are a helpful assistant. " * 20)[:_SHARED] + fill
        body = json.dumps({"messages": [{"role": "user", "content": text}], "model": "m", "max_tokens": 64}).encode()
        head = f"POST {_PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        found.append(head.encode() + b"\r\n\r\n" + body)
    return found


class _Connection(asyncio.Protocol):
    """Sends one request after another until told to stop."""

    def __init__(self, requests: list[bytes], until: float, first: int, tally: "_Tally") -> None:
        self._requests, self._until, self._next, self._tally = requests, until, first, tally
        self._buffer = b""
        self._sent = 0.0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # also uvloop's, which does not say so
        self._send()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found or not _complete(head.lower(), body):
            return
        self._buffer = b""
        now = time.perf_counter()
        self._tally.add(now - self._sent, head[9:12] == b"200")
        if now < self._until:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None or time.perf_counter() < self._until:
            self._tally.broken += 1
        self.closed.set_result(None)

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._requests[self._next % len(self._requests)])
        self._next += 1


class _Tally:
    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.failed = 0
        self.broken = 0

    def add(self, latency_s: float, ok: bool) -> None:
        self.latencies.append(latency_s)
        self.failed += not ok


def _complete(head: bytes, body: bytes) -> bool:
    _, found, rest = head.partition(b"content-length: ")
    if found:
        return len(body) >= int(rest.partition(b"\r\n")[0])
    return body.endswith(b"0\r\n\r\n")


async def _run(address: str, connections: int, seconds: float, body_bytes: int) -> dict[str, float]:
    host, _, port = address.rpartition(":")
    loop, tally, requests = asyncio.get_running_loop(), _Tally(), requests_of(address, body_bytes)
    began = time.perf_counter()
    made = []
    for number in range(connections):
        _, protocol = await loop.create_connection(
            lambda number=number: _Connection(requests, began + seconds, number * 7, tally),  # type: ignore[misc]
            host,
            int(port),
        )
        made.append(protocol.closed)
    await asyncio.gather(*made)
    took = time.perf_counter() - began
    latencies = sorted(tally.latencies)
    return {
        "requests": len(latencies),
        "requests_per_s": len(latencies) / took,
        "failed": tally.failed,
        "broken": tally.broken,
        "p50_ms": latencies[len(latencies) // 2] * 1e3 if latencies else float("nan"),
        "p99_ms": latencies[len(latencies) * 99 // 100] * 1e3 if latencies else float("nan"),
    }


def main() -> None:
    """Run as the arguments say."""
    address, connections, seconds, body_bytes = sys.argv[1:]
    print(json.dumps(uvloop.run(_run(address, int(connections), float(seconds), int(body_bytes)))))


if __name__ == "__main__":
    main()
